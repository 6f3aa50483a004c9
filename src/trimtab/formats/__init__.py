"""Storage formats by name: one file each."""

from __future__ import annotations

from trimtab.errors import FormatFault
from trimtab.formats.base import DTYPE_BYTES, Component, Format
from trimtab.formats.bnb4bit import FOUR_BIT
from trimtab.formats.bnb8bit import Int8
from trimtab.formats.plain import Plain
from trimtab.memory import align

ALIGNMENT = 256
"""Bytes that each tensor of a slab is aligned to: what CUDA's own allocator promises."""

_ALL: tuple[Format, ...] = (Plain(), *FOUR_BIT, Int8())
FORMATS = {one.name: one for one in _ALL}


def by_name(name: str) -> Format:
    """The format of that name.

    Raises:
        FormatFault: TT509, if there is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise FormatFault(
            "TT509",
            f"the storage format {name!r} is not supported",
            fix=f"one of {', '.join(FORMATS)}",
        ) from None


def resident_bytes(storage: str, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes that one weight computes from, each of its tensors aligned to `ALIGNMENT`."""
    return sum(align(part.nbytes, ALIGNMENT) for part in by_name(storage).layout(shape, dtype))


def moving_bytes(
    storage: str, shape: tuple[int, ...], dtype: str, quantized_from: str | None = None
) -> int:
    """Bytes that one weight takes in a slab, each of its tensors aligned to `ALIGNMENT`."""
    parts = by_name(storage).layout(shape, dtype, quantized_from)
    return sum(align(part.resting_bytes, ALIGNMENT) for part in parts)


def widened_bytes(
    storage: str, shape: tuple[int, ...], dtype: str, quantized_from: str | None = None
) -> int:
    """Bytes behind a slab that was brought in, for what rests in a smaller dtype than its own."""
    return sum(
        align(part.resting_bytes, ALIGNMENT) * (DTYPE_BYTES[part.dtype] // DTYPE_BYTES[part.rests])
        for part in by_name(storage).layout(shape, dtype, quantized_from)
        if part.rests
    )


__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "FORMATS",
    "Component",
    "Format",
    "by_name",
    "moving_bytes",
    "resident_bytes",
    "widened_bytes",
]
