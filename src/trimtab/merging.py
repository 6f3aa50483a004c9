"""Merging is refused on a placed model before the first layer is touched, not half way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from trimtab import foreign
from trimtab.errors import AdapterFault

_ON_TUNER = ("merge_adapter", "merge_and_unload")
_ON_LAYER = ("merge",)


class Refusal:
    """Stands in for a method that merges."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AdapterFault(
            "TT309",
            "an adapter cannot be merged into a placed model",
            why="a streamed layer's bytes rest in a store that nothing writes to, and a quantized"
            " weight would be rounded a second time",
            fix="`trimtab merge` writes a merged checkpoint in 16 bits; `unload` takes the adapters"
            " off without merging",
        )


def refuse_merging(model: nn.Module) -> None:
    """Replaces what merges, on PEFT's tuner and on each of its layers; call it for each adapter."""
    for module, method in _merging(model):
        vars(module)[method] = Refusal()


def allow_merging(model: nn.Module) -> None:
    """Undoes `refuse_merging`."""
    for module, method in _merging(model):
        if isinstance(vars(module).get(method), Refusal):
            del vars(module)[method]


def _merging(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    tuner = getattr(model, "base_model", None)
    if isinstance(tuner, BaseTuner):
        yield from ((tuner, method) for method in _ON_TUNER)
    for _, _, layer in foreign.adapter_layers(model):
        if isinstance(layer, BaseTunerLayer):
            yield from ((layer, method) for method in _ON_LAYER)
