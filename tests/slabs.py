"""A layout of one weight of three formats, and what may lie in a slab of it."""

from __future__ import annotations

import torch

from trimtab.plan import WeightSpec
from trimtab.store import Slab, SlabLayout

WEIGHTS = (
    WeightSpec("a.weight", (3, 7), "bfloat16"),
    WeightSpec("b.weight", (64, 130), "bfloat16", "nf4-dq"),
    WeightSpec("c.weight", (5, 64), "float16", "int8"),
)
LAYOUT = SlabLayout.of(WEIGHTS)


def contents(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Random bits for every tensor of the layout, NaN and all."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (LAYOUT.nbytes,), dtype=torch.uint8, generator=generator)
    return {
        weight: {key: one.clone() for key, one in parts.items()}
        for weight, parts in LAYOUT.views(flat).items()
    }


def fill(slab: Slab, given: dict[str, dict[str, torch.Tensor]], device: str = "cpu") -> None:
    for weight, parts in given.items():
        for key, one in parts.items():
            slab.put(weight, key, one.to(device))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[key].shape == other[key].shape
        and one[key].dtype == other[key].dtype
        and bits(one[key]) == bits(other[key])
        for key in one
    )
