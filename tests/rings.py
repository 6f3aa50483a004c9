"""Slabs that count themselves, and a ring run over them; `from rings import ...`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.fakes import RecordingSlab
from trimtab.plan import WeightSpec
from trimtab.store import SlabLayout
from trimtab.stream import Ring

CPU = torch.device("cpu")


def slabs(count: int, log: list[object] | None = None) -> list[RecordingSlab]:
    """Slabs of 256, 512, 768, 256, ... bytes; slab i is full of i + 1."""
    made = []
    for number in range(count):
        rows = 256 * (1 + number % 3)
        layout = SlabLayout.of([WeightSpec(f"{number}.weight", (rows, 1), "uint8")])
        slab = RecordingSlab(layout, number, log)
        slab.buffer.fill_(number + 1)
        made.append(slab)
    return made


def holds(ring: Ring, slot: int, slab: RecordingSlab) -> bool:
    buffer = ring.slots[slot].buffer[: slab.layout.nbytes]
    return buffer.unique().tolist() == [int(slab.name) + 1]  # type: ignore[call-overload]


def run(ring: Ring, made: Sequence[RecordingSlab], order: Sequence[int]) -> None:
    for index in order:
        slot = ring.take(index)
        assert holds(ring, slot, made[index])
        ring.give(slot)
