"""Whether an adapter computes on quantized layers: one token through one layer of each sort.

Some of PEFT's kinds read packed bytes as if they were the matrix, or give 32 bits where the model
computes in 16. The stock stack shows it in the first forward, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from trimtab import foreign
from trimtab.adapted import base_of, base_parameters
from trimtab.adapters import ADAPTED, AdapterHeader
from trimtab.errors import AdapterFault, first_line
from trimtab.fit import Fit, three
from trimtab.park import Wrapped

_BY_QUANTIZATION = ("TT306", "TT312", "TT315")
"""What a kind that takes packed bytes for the matrix looks like while it is loaded."""


@contextlib.contextmanager
def refused_on_quantized(model: nn.Module, decided: Fit) -> Iterator[None]:
    """Says TT317 where an adapter fails to load because the layers it changes are quantized."""
    header = decided.header
    quantized = _quantized(model) & set(decided.modules)
    saved = {decided.keys[key] for key in header.saved_keys if key in decided.keys}
    copied = {one for one in quantized if any(f".{one}." in key for key in saved)}
    if copied:
        raise _unfit(
            header,
            copied,
            "they were trained whole, and PEFT would put 16 bits into a copy of the packed layer",
        )
    try:
        yield
    except AdapterFault as fault:
        other = fault.code not in _BY_QUANTIZATION or isinstance(fault.__cause__, ImportError)
        if other or not quantized or header.peft_type == "LORA" or _mixes(model, header):
            raise
        raise _unfit(header, quantized, fault.why or fault.what) from fault


def try_layers(model: PeftModel, header: AdapterHeader, name: str) -> None:
    """Sends a token through one quantized layer of each sort that the adapter changes.

    Raises:
        AdapterFault: TT317, if one raises, gives another dtype than the base's layer, or if all
            give what the base's layers give.
    """
    if header.peft_type == "LORA":  # which PEFT has for every format
        return
    seen: set[tuple[type, str]] = set()
    changed = False
    for path, layer in model.named_modules():
        sort = (type(layer), path.rpartition(".")[2])
        if sort in seen or not _adapts(layer, name):
            continue
        seen.add(sort)
        try:
            with torch.no_grad(), brought_in(model, path), foreign.only_adapter(layer, name):
                changed |= _changes(layer, base_of(model).dtype)  # type: ignore[arg-type]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as problem:
            why = f"{type(problem).__name__}: {first_line(problem)}"
            raise _unfit(header, {path.removeprefix(ADAPTED)}, why) from problem
    if seen and not changed:
        raise _unfit(header, {path for _, path in seen}, "they compute what they did without it")


@contextlib.contextmanager
def brought_in(model: nn.Module, path: str) -> Iterator[None]:
    """While inside, the module of that name has its weights, if it lies in a parked unit."""
    with contextlib.ExitStack() as stack:
        parts = path.split(".")
        for end in range(len(parts) + 1):
            forward = vars(model.get_submodule(".".join(parts[:end]))).get("forward")
            if isinstance(forward, Wrapped):
                stack.enter_context(forward.around())
        yield


def _mixes(model: nn.Module, header: AdapterHeader) -> bool:
    """Whether adapters of another kind are there, which PEFT refuses on any base."""
    configs = getattr(model, "peft_config", {}).values()
    return any(one.peft_type.value != header.peft_type for one in configs)


def _quantized(model: nn.Module) -> set[str]:
    return {
        name.rpartition(".")[0]
        for name, module, _, _ in base_parameters(model)
        if foreign.is_bitsandbytes(module)
    }


def _adapts(layer: nn.Module, name: str) -> bool:
    if not isinstance(layer, BaseTunerLayer):
        return False
    holds = any(name in getattr(layer, held, ()) for held in _held(layer))
    return holds and foreign.is_bitsandbytes(layer.get_base_layer())


def _held(layer: Any) -> tuple[str, ...]:
    return (*layer.adapter_layer_names, *layer.other_param_names)


def _changes(layer: Any, dtype: torch.dtype) -> bool:
    base = layer.get_base_layer()
    own = dict(base.named_parameters(recurse=False))
    given = torch.linspace(-1, 1, base.in_features, device=base.weight.device).to(dtype)
    given = given.reshape(1, 1, -1)
    try:
        bare, found = base(given), layer(given)
    finally:
        for key, one in own.items():  # on a CPU PEFT replaces what it dequantizes
            setattr(base, key, one)
    if found.dtype != bare.dtype:
        raise TypeError(f"its layers give {found.dtype}, and the model computes in {bare.dtype}")
    return not torch.equal(found, bare)


def _unfit(header: AdapterHeader, modules: set[str], why: str) -> AdapterFault:
    return AdapterFault(
        "TT317",
        f"{header.source} ({header.peft_type}) does not compute on quantized layers:"
        f" {three(modules)}",
        why=why,
        fix="use it on a 16-bit base (quant none, streamed if it does not fit), or train a LoRA",
    )
