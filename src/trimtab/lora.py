"""A LoRA on single tokens in two kernels, where PEFT's layer takes eight.

PEFT's layers stay; their forward is replaced while a decode step is captured, and only there. What
is computed is what `peft.tuners.lora` computes: the product in float32, rounded where it rounds.
Sums run in another order, so a result may differ by a rounding: see `BOUND`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.errors import first_line
from trimtab.foreign import has_input_hooks

BOUND = 2**-7
"""Of |output| + |what the LoRA adds|: a rounding of either to bfloat16 (2^-9) gone the other way,
and the sums' own error; the most by which an output may differ from PEFT's."""

TOKENS = 8
"""The most tokens of a step that the kernels are made for: its batch."""


@dataclass(frozen=True)
class Lora:
    """What a layer adds: `up @ down @ x * scale`, `down` [rank, in] and `up` [out, rank].

    `rounded`: the product is rounded to the output's dtype before it is added, not after.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    rounded: bool


class Products(Protocol):
    """The two products of a LoRA.

    `down(x, lora)`: x [..., in], contiguous, to float32 [tokens, rank], beside what is computed
    meanwhile: whoever calls keeps x until `add` has returned.
    `add(base, down, lora)`: the layer's output of the base's [..., out], a tensor of its own.
    """

    def down(self, x: torch.Tensor, lora: Lora) -> torch.Tensor: ...

    def add(self, base: torch.Tensor, down: torch.Tensor, lora: Lora) -> torch.Tensor: ...


def plain_lora(layer: Any) -> Lora | None:
    """The one LoRA that a PEFT layer applies, if it is no more than two float32 products."""
    kind = (type(layer).__module__, type(layer).__name__)
    rounded = kind == ("peft.tuners.lora.bnb", "Linear4bit")
    if not rounded and kind != ("peft.tuners.lora.layer", "Linear"):
        return None
    if layer.disable_adapters or layer.merged or layer.training or has_input_hooks(layer):
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        return None
    (name,) = names
    down, up = layer.lora_A[name], layer.lora_B[name]
    variants = (getattr(layer, "lora_variant", {}), getattr(layer, "use_dora", {}))
    if any(one.get(name) for one in variants):
        return None
    for one in (down, up):
        plain = type(one) is torch.nn.Linear and one.bias is None
        if not plain or one.weight.dtype != torch.float32 or not one.weight.is_contiguous():
            return None
    scale = layer.scaling[name]
    if not isinstance(scale, float | int):
        return None
    return Lora(down.weight.detach(), up.weight.detach(), float(scale), rounded)


def reference(base: torch.Tensor, x: torch.Tensor, lora: Lora) -> torch.Tensor:
    """What PEFT computes, in its own order."""
    added = x.float() @ lora.down.T @ lora.up.T * lora.scale
    return base + added.to(base.dtype) if lora.rounded else (base + added).to(base.dtype)


def is_right(products: Products, lora: Lora, dtype: torch.dtype) -> bool:
    """Whether products are within `BOUND` of PEFT's on random numbers; makes the kernels, too."""
    device = lora.down.device
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, 1, lora.down.shape[1], generator=random, device=device).to(dtype)
    base = torch.randn(1, 1, lora.up.shape[0], generator=random, device=device).to(dtype)
    ours = products.add(base, products.down(x, lora), lora).double()
    theirs = reference(base, x, lora).double()
    limit = BOUND * (theirs.abs() + (theirs - base.double()).abs().amax())
    return bool(((ours - theirs).abs() <= limit).all())


class Shortcuts:
    """Which layers of a model may take `products`, checked once for each shape."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._right: dict[Any, bool] = {}
        self.fault = ""
        """Why the products were not taken where they could have been."""

    def _takes(self, lora: Lora, dtype: torch.dtype) -> bool:
        key = (lora.down.shape, lora.up.shape, lora.rounded, dtype)
        if key not in self._right:
            try:
                with torch.cuda.device_of(lora.down):
                    self._right[key] = is_right(self._products, lora, dtype)
                self.fault = self.fault or ("" if self._right[key] else "they differ from PEFT's")
            except Exception as error:
                # A compiler that is not there, or fails: PEFT's own way is as right.
                self._right[key], self.fault = False, first_line(error)
        return self._right[key]

    @contextlib.contextmanager
    def taken(self, layers: Iterable[Any], dtype: torch.dtype) -> Iterator[int]:
        """While inside, layers that can take the products do; yields how many.

        Args:
            layers: PEFT's layers.
            dtype: of the outputs of the model's layers.
        """
        with contextlib.ExitStack() as undo:
            count = 0
            for layer in layers:
                lora = plain_lora(layer) if hasattr(layer, "lora_A") else None
                if lora is None or "forward" in vars(layer) or not self._takes(lora, dtype):
                    continue
                own = layer.forward
                # First: an interrupt may come between the two.
                undo.callback(vars(layer).pop, "forward", None)
                layer.forward = functools.partial(through, self._products, own, layer, lora)
                count += 1
            yield count


def through(
    products: Products,
    own: Callable[..., torch.Tensor],
    layer: Any,
    lora: Lora,
    x: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """A LoRA layer's forward by way of `products`; by its own for many tokens, or more arguments.

    x [..., in] to [..., out].
    """
    few = x.numel() <= TOKENS * x.shape[-1]
    if args or kwargs or not few or torch.is_autocast_enabled():
        return own(x, *args, **kwargs)
    # Held here: memory that is let go could be used again before it has been read beside.
    given = x.contiguous()
    down = products.down(given, lora)
    return products.add(layer.base_layer(x), down, lora)
