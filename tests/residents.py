"""The resident model beside a placement, and whether the placement is at rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

import tiny
from trimtab.adapters import read_adapter
from trimtab.apply import load_onto
from trimtab.guard import is_guarded
from trimtab.placement import Placement


def two(folder: Path) -> dict[str, Path]:
    return {"a": tiny.adapter(folder), "b": tiny.adapter(folder, "dora", seed=2)}


def resident(
    folder: Path, quant: str, adapters: Mapping[str, Path], device: str = "cpu"
) -> PeftModel:
    """The stock model, its adapters in 32 bits as their files: peft 0.18 rounds a second one."""
    model = tiny.reference(folder, quant, device=device)
    for name, path in adapters.items():
        model, _ = load_onto(model, read_adapter(path), name, device)
    return model  # type: ignore[no-any-return]


def logits(model: Any, folder: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.inputs(folder, device=str(model.device)), **options).logits.cpu()


def is_parked(placement: Placement) -> bool:
    """Every weight that the plan moved to a slab is a stand-in, and no slot is taken."""
    weights = [one.parameter for unit in placement._gate.units for one in unit.weights]
    held = {id(one) for one in placement.model.parameters()}
    ring = placement._rooms.ring
    assert ring is not None
    return all(is_guarded(one) and id(one) in held for one in weights) and not any(
        slot.busy for slot in ring.slots
    )


def logits_of(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**given).logits  # type: ignore[no-any-return]


def generated(model: Any, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    out = model.generate(**given, **{"do_sample": False, "max_new_tokens": 8, **options})
    return out if isinstance(out, torch.Tensor) else out.sequences
