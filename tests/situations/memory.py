"""Situations of TT4: budgets, full disks, memory that runs out."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from placing import carried_out, placed, planned
from situations.situation import CARD, NO_GPU, llama, lora, shows
from trimtab import disk, rooms
from trimtab.diagnosis import Finding, check
from trimtab.merge import merge


@shows(
    "TT401",
    "the model does not fit: the leanest plan needs SIZE on cpu, SIZE more than the SIZE given",
)
def _budget(at: Path, wrong: bool) -> list[Finding]:
    return check(llama(), cpu="1KiB" if wrong else "1GiB", context=64, hardware=NO_GPU)


@shows("TT402", "'6 potatoes' is not a size")
def _size(at: Path, wrong: bool) -> list[Finding]:
    return check(llama(), gpu="6 potatoes" if wrong else "6GiB", hardware=CARD)


@shows("TT403", "the disk of DIR/slabs is full: SIZE more were needed")
def _full_disk(at: Path, wrong: bool) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(disk, "reserve_blocks", full)
        folder = disk.DiskFolder(at / "slabs")
        try:
            folder.reserve(10 << 20)
        finally:
            folder.close()


@shows("TT403", "writing DIR/out.partial needs SIZE more, and SIZE are free")
def _full_disk_of_a_merge(at: Path, wrong: bool) -> None:
    usage = shutil.disk_usage(at)
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
        merge(llama(), lora(at), at / "out")


@shows("TT404", "cpu ran out of memory while BASE was running")
def _gpu_memory(at: Path, wrong: bool) -> None:
    """As torch raises it, from within an answer."""
    with placed(llama()) as found, found.running():
        if wrong:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


@shows("TT404", "SIZE of memory for model.layers.0 could not be had")
def _host_memory(at: Path, wrong: bool) -> None:
    def none(*given: Any, **options: Any) -> None:
        raise MemoryError("cannot allocate")

    made = planned(llama(), "none", ("layers",), device="cpu", tier="disk")
    units = tuple(
        dataclasses.replace(one, rests="cpu") if one.mode == "streamed" else one
        for one in made.units
    )
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(rooms, "MemorySlab", none)
        carried_out(dataclasses.replace(made, units=units)).close()


@shows(
    "TT406",
    "2 adapters are needed at once, a, b: together SIZE, and the adapter memory is SIZE",
)
def _adapter_memory(at: Path, wrong: bool) -> None:
    """On a CPU nothing needs to move: the cap is set past the plan."""
    with placed(llama()) as found, torch.no_grad():
        found.shelf.cap = 400_000 if wrong else 1_000_000
        for name in ("a", "b"):
            found.add_adapter(name, tiny.adapter(llama(), seed=ord(name)))
        found.model.base_model.set_adapter(["a", "b"])
        found.model(**tiny.inputs(llama()))
