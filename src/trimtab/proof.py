"""The proof that an adapter is applied: each tensor of its file against the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from trimtab.adapted import adapter_state, base_of
from trimtab.adapters import ADAPTED
from trimtab.errors import AdapterFault
from trimtab.fit import Fit, three


@dataclass(frozen=True)
class Applied:
    """The proof that an adapter is applied.

    `modules` are the base's modules it changes, `tensors` the number of its tensors, each compared
    with the model's to the last bit, `nbytes` what they take there, `notes` what was mapped,
    skipped or dropped.
    """

    name: str
    source: str
    modules: tuple[str, ...]
    tensors: int
    nbytes: int
    notes: tuple[str, ...]


def check_injected(
    model: PeftModel, decided: Fit, given: Mapping[str, torch.Tensor], name: str
) -> None:
    header = decided.header
    if header.is_prompt:
        return
    state = adapter_state(model, header, name, buffers=False)
    shared = {id(one) for key, one in state.items() if key in given}
    lacking = sorted(key for key, one in state.items() if id(one) not in shared)
    if decided.config.get("save_projection"):  # else PEFT makes them anew, by a seed
        known = adapter_state(model, header, name)
        lacking += sorted(key for key in known if header.is_shared(key) and key not in given)
    if lacking:
        raise AdapterFault(
            "TT312",
            f"the file of {header.source} lacks {len(lacking)} tensors: {three(lacking)}",
            why="PEFT would leave them untrained",
            fix="the file is incomplete, or its config is not the one it was saved with",
        )
    for key, here in state.items():
        if key in given and here.shape != given[key].shape:
            raise AdapterFault(
                "TT306",
                f"{key.removeprefix(ADAPTED)} of {header.source} is {list(given[key].shape)}, the"
                f" model needs {list(here.shape)}",
                fix="check that the adapter was made for this model and that its config is its own",
                found=tuple(given[key].shape),
                wanted=tuple(here.shape),
            )


def account(
    model: PeftModel, decided: Fit, given: Mapping[str, torch.Tensor], name: str
) -> Applied:
    """Compares every tensor of an adapter file with the model's, to the last bit.

    Raises:
        AdapterFault: TT303, a tensor of the file is not in the model, or has other values there.
    """
    state = adapter_state(model, decided.header, name)
    for key in given:
        if key not in state and (plain := _plain_attribute(model, key, name)) is not None:
            state[key] = plain
    wrong = [key for key, one in given.items() if not _arrived(model, decided, state, key, one)]
    if wrong:
        raise AdapterFault(
            "TT303",
            f"{len(wrong)} of the {len(given)} tensors of {decided.header.source} did not arrive in"
            f" the model: {three(wrong)}",
            why="PEFT loaded the adapter without them",
            unused=tuple(sorted(wrong)),
        )
    return Applied(
        name,
        decided.header.source,
        decided.modules,
        len(given),
        sum(one.nbytes for one in {id(one): one for one in state.values()}.values()),
        (*decided.notes, *_untrained(decided, given)),
    )


def _untrained(decided: Fit, given: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Says of a LoRA that changes nothing that it does not."""
    header = decided.header
    ends = [one for key, one in given.items() if ".lora_B." in key or "lora_embedding_B" in key]
    alone = len(ends) * 2 == len(given) and header.peft_type == "LORA"
    if alone and (not any(one.any() for one in ends) or header.config.get("lora_alpha") == 0):
        yield f"{header.source} changes nothing: its lora_B or its lora_alpha is zero"


def _arrived(
    model: PeftModel,
    decided: Fit,
    state: Mapping[str, torch.Tensor],
    key: str,
    given: torch.Tensor,
) -> bool:
    if key not in state:
        return False
    here = state[key].detach()
    if same(here, given) or not decided.header.is_shared(key):
        return same(here, given)
    # peft 0.18 rounds what VeRA's layers share to the base's dtype.
    return same(here, given.to(base_of(model).dtype))  # type: ignore[arg-type]


def _plain_attribute(model: nn.Module, key: str, name: str) -> torch.Tensor | None:
    """A tensor that a layer keeps in a dictionary of its own, by adapter name."""
    path, _, last = key.rpartition(".")
    held: Any = getattr(dict(model.named_modules()).get(path), last, None)
    is_kept = isinstance(held, dict | nn.ModuleDict | nn.ParameterDict) and name in held
    return held[name] if is_kept else None


def same(here: torch.Tensor, there: torch.Tensor) -> bool:
    """Whether the model has a tensor of a file, in the dtype that it has there."""
    return here.shape == there.shape and torch.equal(here.cpu(), there.to(here.dtype))
