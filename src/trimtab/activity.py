"""PEFT's layers in a model, remembered, and which adapters they apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trimtab import foreign


class AdapterLayers:
    """PEFT's layers and wrappers in a model, which is walked only when its adapters have changed.

    An adapter is told by its config's identity: one of the same name, loaded later, is another.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._found: list[tuple[Mapping[str, Any], str, Any]] = []
        self.configs: dict[str, Any] = {}
        """Of the adapters. While they are held, no other config has their identity."""

    def now(self) -> list[Any]:
        """The layers as they are."""
        configs: dict[str, Any] = dict(getattr(self._model, "peft_config", {}))
        same = configs.keys() == self.configs.keys() and all(
            config is self.configs[name] for name, config in configs.items()
        )
        if not same or any(among.get(name) is not layer for among, name, layer in self._found):
            self._found = foreign.adapter_layers(self._model)
            self.configs = configs
        return self.last()

    def last(self) -> list[Any]:
        """The layers as `now` last found them."""
        return [layer for _, _, layer in self._found]


class ActiveAdapters:
    """Which adapters a model applies, asked for each token."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known = AdapterLayers(model)

    @property
    def configs(self) -> list[Any]:
        return list(self._known.configs.values())

    def state(self) -> tuple[Any, ...]:
        """Equal for two calls that compute the same."""
        layers = self._known.now()
        # Of those that are applied: others may come and go.
        ids = {name: id(config) for name, config in self._known.configs.items()}
        return tuple(foreign.applied_adapters(layer, ids) for layer in layers)

    def layers(self) -> list[Any]:
        """PEFT's layers, as `state` last found them."""
        return self._known.last()


def applies(state: tuple[Any, ...], name: str) -> bool:
    """Whether a state of `ActiveAdapters` applies the adapter in any of its layers."""
    return any(repr(name) in repr(one[1:]) for one in state)
