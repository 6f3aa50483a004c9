"""bitsandbytes NF4 and FP4, with and without double quantization.

Sizes: QLoRA (Dettmers et al. 2023), section 3, and `bitsandbytes.functional.quantize_4bit`: two
weights a byte, one absmax for 64 weights in float32; with double quantization the absmax are 8
bits, one float32 for 256 of them, and one float32 offset for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.formats.base import Component, Guards, Share

if TYPE_CHECKING:
    import torch

BLOCK = 64
NESTED_BLOCK = 256
SHORT = ("bfloat16", "float16")
"""Dtypes that a scale may rest in, where the weights had no more digits."""


@dataclass(frozen=True)
class Recipe:
    """What a 4-bit weight needs beside its moving tensors; the code books are shared by all."""

    shape: torch.Size
    dtype: torch.dtype
    blocksize: int
    code: torch.Tensor
    nested_code: torch.Tensor | None
    nested_blocksize: int | None
    nested_dtype: torch.dtype | None


class FourBit:
    """A `Params4bit` weight: packed bytes and the state they are decoded with."""

    def __init__(self, quant_type: str, nested: bool) -> None:
        self.name = quant_type + ("-dq" if nested else "")
        self.quant_type = quant_type
        self.nested = nested

    def layout(
        self, shape: tuple[int, ...], dtype: str, quantized_from: str | None = None
    ) -> tuple[Component, ...]:
        numel = math.prod(shape)
        blocks = -(-numel // BLOCK)
        packed = Component("data", ((numel + 1) // 2, 1), "uint8")
        if not self.nested:
            # An absmax is one of the weights: it has no more digits than they had.
            short = quantized_from if quantized_from in SHORT else ""
            return (packed, Component("absmax", (blocks,), "float32", short))
        return (
            packed,
            Component("absmax", (blocks,), "uint8"),
            Component("nested_absmax", (-(-blocks // NESTED_BLOCK),), "float32"),
            Component("offset", (), "float32"),
        )

    def constant_bytes(self, shape: tuple[int, ...]) -> int:
        """Code books, one copy for all weights of a placement: 16 and 256 float32."""
        return 64 + (1024 if self.nested else 0)

    def split(
        self, module: Any, parameter: Any, share: Share
    ) -> tuple[dict[str, torch.Tensor], Any]:
        state = parameter.quant_state
        self._compare(state)
        parts = {"data": parameter.data, "absmax": state.absmax}
        if self.nested:
            parts["nested_absmax"] = state.state2.absmax
            parts["offset"] = state.offset
        inner = state.state2 if self.nested else None
        recipe = Recipe(
            shape=state.shape,
            dtype=state.dtype,
            blocksize=state.blocksize,
            code=share(state.code),
            nested_code=None if inner is None else share(inner.code),
            nested_blocksize=None if inner is None else inner.blocksize,
            nested_dtype=None if inner is None else inner.dtype,
        )
        return parts, recipe

    def _compare(self, state: Any) -> None:
        """A stored weight says itself how it is stored, whatever the config says."""
        name = state.quant_type + ("-dq" if state.nested else "")
        if (name, state.blocksize) != (self.name, BLOCK):
            raise ValueError(f"{name}, in blocks of {state.blocksize}")

    def join(self, parts: dict[str, torch.Tensor], recipe: Any) -> Any:
        from bitsandbytes.functional import QuantState

        inner = None
        if recipe.nested_code is not None:
            inner = QuantState(
                absmax=parts["nested_absmax"],
                code=recipe.nested_code,
                blocksize=recipe.nested_blocksize,
                dtype=recipe.nested_dtype,
            )
        state = QuantState(
            absmax=parts["absmax"],
            shape=recipe.shape,
            code=recipe.code,
            blocksize=recipe.blocksize,
            quant_type=self.quant_type,
            dtype=recipe.dtype,
            offset=parts.get("offset"),
            state2=inner,
        )
        return parts["data"], state

    def stored(self, parts: dict[str, torch.Tensor], recipe: Any) -> dict[str, torch.Tensor]:
        data, state = self.join(parts, recipe)
        named = state.as_dict(packed=True)
        return {"weight": data, **{f"weight.{key}": one for key, one in named.items()}}

    def bind(self, module: Any, parameter: Any, joined: Any) -> None:
        # Into their dicts: a module's own way looks for tensors, for each weight of each forward.
        parameter.data, state = joined
        parameter.__dict__["quant_state"] = module.__dict__["quant_state"] = state

    def release(self, module: Any, parameter: Any, bare: torch.Tensor, guards: Guards) -> None:
        parameter.data = bare
        parameter.__dict__["quant_state"] = module.__dict__["quant_state"] = None


FOUR_BIT = tuple(FourBit(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True))
