"""transformers' static caches: made, told apart, and counted by hand where a graph replays."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model's forward takes its cache: `cache` since transformers 5.20."""
    named = inspect.signature(model.forward).parameters
    return "cache" if "cache" in named else "past_key_values"


def static_cache(model: PreTrainedModel, length: int) -> Any:
    """A static cache of `length` tokens whose updates can be captured in a CUDA graph."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            kind: Any = type(layer)
            layer.__class__ = _capturable(kind)
    return cache


@functools.cache
def _capturable(kind: type) -> type:
    """A sliding layer that, once full, takes a token without making a tensor from host memory.

    The layer's own way (`torch.tensor([-1], device=...)`) copies from the host, which waits, and
    may not be captured (transformers 5.1 to 5.24). The values are the same.
    """

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if keys.shape[-2] != 1 or not self.is_initialized or not _is_full(self):
            return kind.update(self, keys, values, *args, **kw)  # type: ignore[attr-defined]
        _set_length(self, _length(self) + 1)
        for held, new in ((self.keys, keys), (self.values, values)):
            held.copy_(torch.cat((held[:, :, 1:], new), dim=2))
        return self.keys, self.values

    return type(kind.__name__, (kind,), {"update": update})


def _length(layer: Any) -> int:
    counted = getattr(layer, "cumulative_length_int", None)
    return int(layer.cumulative_length if counted is None else counted)


def _set_length(layer: Any, length: int) -> None:
    counts = "cumulative_length_int" if hasattr(layer, "cumulative_length_int") else None
    setattr(layer, counts or "cumulative_length", length)


def _is_full(layer: Any) -> bool:
    return _length(layer) >= int(layer.max_cache_len)


def _windows(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]


def full_windows(cache: Any) -> tuple[bool, ...]:
    """Which sliding layers of a static cache are full: they take another way through `update`."""
    return tuple(_is_full(layer) for layer in _windows(cache))


def window_lengths(cache: Any) -> list[int]:
    """What the host has counted of each sliding layer."""
    return [_length(layer) for layer in _windows(cache)]


def set_window_lengths(cache: Any, lengths: list[int]) -> None:
    for layer, length in zip(_windows(cache), lengths, strict=True):
        _set_length(layer, length)
