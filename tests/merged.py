"""The parameters of a merge, as written and in memory, compared; `from merged import ...`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tiny

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All parameters by name, ties repeated, and nothing is missing or left over."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, said = getattr(transformers, name).from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert [key for key, found in said.items() if found] == []
    return dict(model.named_parameters(remove_duplicate=False))


def in_memory(base: Path, adapter: Path, **options: Any) -> dict[str, torch.Tensor]:
    """PEFT's merge of the same, by name."""
    merged = tiny.reference(base, "none", adapter, **options).merge_and_unload()
    return dict(merged.named_parameters(remove_duplicate=False))


def different(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    assert set(found) == set(wanted)
    return [name for name, one in wanted.items() if not torch.equal(found[name], one)]
