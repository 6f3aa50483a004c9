"""Lanes: what a thread reads comes in time, and in order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import tiny
from rings import CPU, run, slabs
from slabs import LAYOUT, contents, fill
from trimtab.disk import DiskFolder, DiskSlab, Staging
from trimtab.fakes import RecordingSlab
from trimtab.store import SlabLayout
from trimtab.stream import Ring


class Gated(RecordingSlab):
    """A slab on a slow disk: a fetch ends when it is let."""

    tier = "disk"

    def __init__(self, layout: SlabLayout, name: object, log: list[object]) -> None:
        super().__init__(layout, name, log)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def fetch(self, buffer: torch.Tensor) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        super().fetch(buffer)


def gated(count: int, log: list[object]) -> list[Gated]:
    made = []
    for number, slab in enumerate(slabs(count)):
        one = Gated(slab.layout, number, log)
        one.buffer.fill_(number + 1)
        made.append(one)
    return made


def test_a_disk_is_read_while_the_device_computes() -> None:
    log: list[object] = []
    made = gated(5, log)
    ring = Ring(made, 3, CPU)
    made[1].gate.clear()
    slot = ring.take(0)  # 1 is being read, and nobody waits for it
    assert log == [0]
    made[1].gate.set()
    ring.give(slot)
    run(ring, made, [1, 2, 3, 4, *range(5)])
    ring.close()
    assert log[:10] == [0, 1, 2, 3, 4] * 2


def test_a_read_that_fails_is_told_where_it_is_needed_and_made_again() -> None:
    log: list[object] = []
    made = gated(5, log)
    ring = Ring(made, 3, CPU)
    made[1].fault = OSError("the disk is gone")
    ring.give(ring.take(0))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            ring.take(1)
    made[1].fault = None
    run(ring, made, [1, 2, 3, 4, 0, 1])
    ring.close()


def test_closing_waits_for_what_is_being_read() -> None:
    log: list[object] = []
    made = gated(4, log)
    ring = Ring(made, 3, CPU)
    made[1].gate.clear()
    ring.take(0)
    assert made[1].entered.wait(10)
    opened = threading.Timer(0.05, made[1].gate.set)
    opened.start()
    ring.close()
    assert made[1].gate.is_set()
    opened.join()
    assert ring.nbytes == 0


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_a_thread_that_reads_never_fills_a_slot_in_use(slots: int) -> None:
    log: list[object] = []
    made = gated(7, log)
    ring = Ring(made, slots, CPU, poison=True)
    run(ring, made, [0, 1, 2, 5, 3, 3, 6, 0, 4, *range(7), *range(7)])
    ring.close()


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("slots", [2, 3])
def test_a_device_runs_on_what_a_thread_reads_from_a_disk(
    tmp_path: Path, device: str, slots: int
) -> None:
    runs = torch.device(device)
    folder = DiskFolder(tmp_path)
    staging = Staging(LAYOUT.nbytes, runs)
    given = [contents(seed) for seed in range(5)]
    made = [DiskSlab(LAYOUT, folder, staging) for _ in given]
    for slab, parts in zip(made, given, strict=True):
        fill(slab, parts)
    files = [bytearray(slab.path.read_bytes()) for slab in made]
    ring = Ring(made, slots, runs, poison=True)
    for index in [0, 1, 2, 4, 3, 3, 0, *range(5), *range(5)]:
        slot = ring.take(index)
        found = ring.slots[slot].buffer[: LAYOUT.nbytes].clone()
        ring.give(slot)
        assert bytearray(found.cpu().numpy()) == files[index]
    ring.close()
    for one in (*made, staging, folder):
        one.close()
