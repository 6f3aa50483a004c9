"""Private names of PEFT by which many adapters are held in one model, as `foreign` has the others.

Tested: peft 0.18.1, 0.19.1, 0.21.2.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def needed_adapters(layers: list[Any]) -> set[str]:
    """The adapters that PEFT's layers apply now: the active ones, or those of a mixed batch."""
    needed: set[str] = set()
    last = None
    for layer in layers:
        if layer._disable_adapters:
            continue
        rows: Any = ()
        for hook in layer._forward_pre_hooks.values():
            rows = getattr(hook, "keywords", {}).get("adapter_names") or rows
        choice = rows or layer._active_adapter
        if choice is not last:  # layers share one list
            needed.update((choice,) if isinstance(choice, str) else choice)
            last = choice
    return needed


def adapter_weights(layers: list[Any], name: str) -> list[torch.nn.Parameter]:
    """The parameters that an adapter has in PEFT's layers and wrappers, each once.

    A whole module that was trained may hold quantized ones, which are left out.
    """
    import torch

    found: dict[int, torch.nn.Parameter] = {}
    for layer in layers:
        for attribute in layer.adapter_layer_names:
            held = operator.attrgetter(attribute)(layer)
            if name not in held:
                continue
            one = held[name]
            for parameter in one.parameters() if isinstance(one, torch.nn.Module) else (one,):
                if type(parameter) is torch.nn.Parameter:
                    found[id(parameter)] = parameter
    return list(found.values())


def adapter_memory(layers: list[Any]) -> dict[str, tuple[int, ...]]:
    """Where in memory the weights of each adapter are that is active in PEFT's layers."""
    names = {name for layer in layers for name in layer.active_adapters}
    return {name: tuple(one.data_ptr() for one in adapter_weights(layers, name)) for name in names}


@contextlib.contextmanager
def adapters_hidden(layers: list[Any], shown: str | None = None) -> Iterator[None]:
    """While inside, LoRA layers have none of their adapters but `shown`; those that come stay.

    What PEFT does to add an adapter walks the model many times, those of all others included.
    """
    kept = []
    try:
        for layer in layers:
            for name in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"):
                held = layer._modules.get(name)
                if held is not None:
                    kept.append((held, held._modules))
                    own = shown is not None and shown in held._modules
                    held._modules = {shown: held._modules[shown]} if own else {}
        yield
    finally:
        for held, before in kept:
            before.update(held._modules)
            held._modules = before
        for layer in layers:
            if "adapter_layer_names" in vars(layer):  # to PEFT each DoRA was the layer's first
                layer.adapter_layer_names = tuple(dict.fromkeys(layer.adapter_layer_names))


def select_adapter(model: Any, layers: list[Any], name: str, before: Any) -> Any:
    """What PEFT's `set_adapter` does for inference, on layers found before; None if it is not so.

    The weights of a layer do not train while its choice is `before`, which an earlier call
    returned, and need not be frozen; `...`: those of no layer do. Returns the choice.
    """
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, _set_adapter

    tuner = model.base_model
    plain = isinstance(tuner, BaseTuner) and type(tuner).set_adapter is BaseTuner.set_adapter
    tuned = [one for one in layers if isinstance(one, BaseTunerLayer)]
    kinds = {type(one) for one in tuned}
    if not plain or any(one.set_adapter is not BaseTunerLayer.set_adapter for one in kinds):
        return None
    choice = [name]
    for layer in tuned:
        if isinstance(layer, tuner.tuner_layer_cls):
            attributes = vars(layer)
            if before is not ... and attributes.get("_active_adapter") is not before:
                layer.set_adapter(name, inference_mode=True)
            attributes["_active_adapter"] = choice
    for layer in layers:
        if isinstance(layer, AuxiliaryTrainingWrapper):
            _set_adapter(layer, name, inference_mode=True)
    tuner.active_adapter = name
    model.active_adapter = name
    return choice


@contextlib.contextmanager
def adapters_off(model: Any, layers: list[Any]) -> Iterator[None]:
    """What PEFT's `disable_adapter` does, on layers found before, without making weights train."""
    kept = [(vars(layer), layer._disable_adapters) for layer in layers]
    before = model._adapters_disabled
    try:
        for attributes, _ in kept:
            attributes["_disable_adapters"] = True
        model._adapters_disabled = True
        yield
    finally:
        for attributes, disabled in kept:
            attributes["_disable_adapters"] = disabled
        model._adapters_disabled = before
