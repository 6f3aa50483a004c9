"""A layout of one weight of each kind of format, and what may lie in a slab of it."""

from __future__ import annotations

import torch

from trimtab.plan import WeightSpec
from trimtab.rooms import widen
from trimtab.store import Slab, SlabLayout

WEIGHTS = (
    WeightSpec("a.weight", (3, 7), "bfloat16"),
    WeightSpec("b.weight", (64, 130), "bfloat16", "nf4-dq"),
    WeightSpec("c.weight", (5, 64), "float16", "int8"),
    WeightSpec("d.weight", (6, 130), "bfloat16", "nf4", "bfloat16"),
    WeightSpec("e.weight", (64, 65), "bfloat16", "fp4", "bfloat16"),
)
LAYOUT = SlabLayout.of(WEIGHTS)


def contents(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Random bits for every tensor of the layout, NaN and all; of what is widened random numbers,
    NaN and infinity."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (LAYOUT.room,), dtype=torch.uint8, generator=generator)
    widened = LAYOUT.widening(flat)
    assert widened is not None
    numbers = torch.randn(widened[1].shape, generator=generator)
    numbers[:2] = torch.tensor([torch.nan, torch.inf])
    widened[0].copy_(numbers.to(widened[1].dtype))
    return {
        weight: {key: one.clone() for key, one in parts.items()}
        for weight, parts in LAYOUT.views(flat).items()
    }


def fill(slab: Slab, given: dict[str, dict[str, torch.Tensor]], device: str = "cpu") -> None:
    for weight, parts in given.items():
        for key, one in parts.items():
            slab.put(weight, key, one.to(device))


def bring(buffer: torch.Tensor) -> torch.Tensor:
    """What a carrier does with a slab that was fetched."""
    widen(LAYOUT.widening(buffer))
    return buffer


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the last bit, but that what is widened may have another NaN: a GPU has one of its own."""
    return one.keys() == other.keys() and all(
        one[key].shape == other[key].shape
        and one[key].dtype == other[key].dtype
        and bits(one_nan(key, one[key])) == bits(one_nan(key, other[key]))
        for key in one
    )


def one_nan(key: str, tensor: torch.Tensor) -> torch.Tensor:
    if key != "absmax" or not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
