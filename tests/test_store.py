"""One contract for every kind of slab; the disk folder's lock, its files and its faults."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from slabs import LAYOUT, WEIGHTS, bits, bring, contents, equal, fill
from trimtab import disk
from trimtab.disk import DiskFolder, DiskSlab, Staging, map_file
from trimtab.errors import FormatFault, MemoryFault, PlacementFault
from trimtab.formats import ALIGNMENT
from trimtab.store import HostMemory, MemorySlab, Slab, SlabLayout

CPU = torch.device("cpu")
KINDS = ["memory", "disk"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DiskFolder]:
    made = DiskFolder(tmp_path / "disk")
    yield made
    made.close()


Make = Callable[[str], Slab]


@pytest.fixture
def make(folder: DiskFolder, device: str) -> Iterator[Make]:
    """Makes a slab of a kind for `device`; all are closed in the end."""
    made: list[Any] = []

    def one(kind: str) -> Slab:
        if kind == "memory":
            made.append(MemorySlab(LAYOUT, pin=device == "cuda"))
        else:
            staging = Staging(LAYOUT.nbytes, torch.device(device))
            made.extend([staging, DiskSlab(LAYOUT, folder, staging)])
        return made[-1]  # type: ignore[no-any-return]

    yield one
    for slab in reversed(made):
        slab.close()


devices = pytest.mark.parametrize("device", tiny.DEVICES)
kinds = pytest.mark.parametrize("kind", KINDS)

# ----------------------------------------------------------------------------------- the layout


def test_the_layout_is_exact_and_aligned() -> None:
    spans = [
        (weight, key, span.offset, span.nbytes)
        for weight, parts in LAYOUT.spans.items()
        for key, span in parts.items()
    ]
    assert spans == [
        ("a.weight", "data", 512, 42),
        ("b.weight", "data", 768, 4160),
        ("b.weight", "absmax", 5120, 130),
        ("b.weight", "nested_absmax", 5376, 4),
        ("b.weight", "offset", 5632, 4),
        ("c.weight", "CB", 5888, 320),
        ("c.weight", "SCB", 6400, 20),
        ("d.weight", "data", 6656, 390),
        ("d.weight", "absmax", 0, 26),
        ("e.weight", "data", 7168, 2080),
        ("e.weight", "absmax", 256, 130),
    ]
    assert LAYOUT.nbytes == 9472
    assert all(offset % ALIGNMENT == 0 for _, _, offset, _ in spans)


def test_what_rests_in_a_smaller_dtype_is_widened_behind_the_slab() -> None:
    assert LAYOUT.room == LAYOUT.nbytes + 2 * 512
    given = contents()
    buffer = torch.zeros(LAYOUT.room, dtype=torch.uint8)
    for weight in ("d.weight", "e.weight"):
        span = LAYOUT.spans[weight]["absmax"]
        assert span.resting(buffer).dtype is torch.bfloat16
        assert span.arrives % ALIGNMENT == 0
        span.resting(buffer).copy_(given[weight]["absmax"])
    bring(buffer)
    views = LAYOUT.views(buffer)
    for weight in ("d.weight", "e.weight"):
        assert views[weight]["absmax"].dtype is torch.float32
        assert bits(views[weight]["absmax"]) == bits(given[weight]["absmax"])
    assert SlabLayout.of(WEIGHTS[:3]).widening(buffer) is None


def test_views_are_of_the_buffer_itself() -> None:
    buffer = torch.zeros(LAYOUT.room, dtype=torch.uint8)
    LAYOUT.views(buffer)["c.weight"]["CB"].fill_(7)
    assert buffer[5888 : 5888 + 320].unique().tolist() == [7]
    assert buffer.count_nonzero() == 320


# ------------------------------------------------------------------------------- every slab


@devices
@kinds
def test_what_was_put_is_fetched_and_read(kind: str, device: str, make: Make) -> None:
    slab, given = make(kind), contents()
    fill(slab, given, device)
    buffer = torch.empty(LAYOUT.room + 512, dtype=torch.uint8, device=device).fill_(0xAB)
    slab.fetch(buffer)
    assert buffer[LAYOUT.nbytes :].unique().tolist() == [0xAB]
    buffer = bring(buffer)
    views = LAYOUT.views(buffer)
    assert all(equal(views[weight], given[weight]) for weight in given)
    assert buffer[LAYOUT.room :].unique().tolist() == [0xAB]
    for weight in given:
        private = slab.read(weight, torch.device(device))
        assert equal(private, given[weight])
        assert {one.device.type for one in private.values()} == {device}
    assert slab.tier == {"memory": "cpu", "disk": "disk"}[kind]
    assert slab.layout is LAYOUT


@devices
@kinds
def test_more_digits_than_planned_are_refused(kind: str, device: str, make: Make) -> None:
    slab, given = make(kind), contents()
    scales = given["d.weight"]["absmax"].to(device)
    slab.put("d.weight", "absmax", scales)
    scales[3] *= 1 + 2**-12
    with pytest.raises(
        FormatFault, match=r"d.weight \(absmax\) .* more digits than torch.bfloat16"
    ):
        slab.put("d.weight", "absmax", scales)


@devices
@kinds
def test_a_read_is_a_private_copy(kind: str, device: str, make: Make) -> None:
    slab, given = make(kind), contents()
    fill(slab, given, device)
    for one in slab.read("b.weight", torch.device(device)).values():
        one.zero_()
    assert equal(slab.read("b.weight", torch.device(device)), given["b.weight"])


@devices
@kinds
def test_two_slabs_do_not_touch_each_other(kind: str, device: str, make: Make) -> None:
    one, other = make(kind), make(kind)
    fill(one, contents(1), device)
    fill(other, contents(2), device)
    fill(one, contents(3), device)
    assert equal(other.read("c.weight", CPU), contents(2)["c.weight"])
    assert equal(one.read("c.weight", CPU), contents(3)["c.weight"])


@devices
@kinds
def test_a_tensor_that_is_not_contiguous_is_put_as_it_reads(
    kind: str, device: str, make: Make
) -> None:
    slab = make(kind)
    turned = torch.arange(21, dtype=torch.bfloat16).reshape(7, 3).T.to(device)
    slab.put("a.weight", "data", turned)
    assert torch.equal(slab.read("a.weight", CPU)["data"], turned.cpu())


@devices
@pytest.mark.parametrize(
    ("weight", "key", "tensor", "said"),
    [
        ("a.weight", "data", torch.zeros(7, 3, dtype=torch.bfloat16),
         "a.weight (data) was loaded as [7, 3] torch.bfloat16; the plan has [3, 7] torch.bfloat16"),
        ("a.weight", "data", torch.zeros(3, 7),
         "a.weight (data) was loaded as [3, 7] torch.float32; the plan has [3, 7] torch.bfloat16"),
        ("a.weight", "absmax", torch.zeros(3),
         "a.weight (absmax) was loaded as [3] torch.float32; the plan has nothing"),
    ],
    ids=["shape", "dtype", "part"],
)  # fmt: skip
@kinds
def test_what_was_not_planned_is_refused(
    kind: str, device: str, make: Make, weight: str, key: str, tensor: torch.Tensor, said: str
) -> None:
    slab = make(kind)
    fill(slab, contents(), device)
    with pytest.raises(FormatFault) as caught:
        slab.put(weight, key, tensor.to(device))
    assert (caught.value.code, caught.value.what) == ("TT508", said)
    assert equal(slab.read("a.weight", CPU), contents()["a.weight"])


@devices
@kinds
def test_closing_twice_does_nothing(kind: str, device: str, make: Make) -> None:
    slab = make(kind)
    slab.close()
    slab.close()


def test_the_memory_goes_with_the_last_view() -> None:
    memory = HostMemory(4096, pin=False)
    view = memory.buffer[:8]
    view.fill_(3)
    memory.close()
    assert memory.buffer.numel() == 0
    gc.collect()
    assert view.tolist() == [3] * 8


@pytest.mark.gpu
def test_pinned_memory_is_of_exact_size() -> None:
    memory = HostMemory(5 * 2**20 + 3, pin=True)
    assert (memory.buffer.numel(), memory.pinned, memory.buffer.is_pinned()) == (
        5 * 2**20 + 3, True, True,
    )  # fmt: skip
    memory.close()


# ----------------------------------------------------------------------------- the disk folder


def staging() -> Staging:
    return Staging(LAYOUT.nbytes, CPU)


def test_a_file_has_exactly_the_bytes_of_its_slab_and_its_blocks(folder: DiskFolder) -> None:
    slab = DiskSlab(LAYOUT, folder, staging())
    stat = slab.path.stat()
    assert stat.st_size == LAYOUT.nbytes
    assert stat.st_blocks * 512 >= LAYOUT.nbytes
    slab.close()


def test_a_folder_is_empty_when_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    folder = DiskFolder(tmp_path)
    slab = DiskSlab(LAYOUT, folder, staging())
    slab.close()
    folder.close()
    folder.close()
    assert [one.name for one in tmp_path.iterdir()] == ["mine.txt"]


def test_a_temporary_folder_is_gone_when_it_is_closed() -> None:
    folder = DiskFolder()
    folder.reserve(64)
    folder.close()
    assert not folder.path.exists()


def test_a_folder_in_use_is_refused_and_the_first_one_keeps_it(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path)
    for _ in range(2):
        with pytest.raises(PlacementFault) as caught:
            DiskFolder(tmp_path)
        assert caught.value.code == "TT206"
        assert caught.value.what == f"the disk folder {tmp_path} is in use by another placement"
    first.close()
    DiskFolder(tmp_path).close()


HOLD = """
import sys, time
from trimtab.disk import DiskFolder
folder = DiskFolder(sys.argv[1])
folder.reserve(1000)
print("held", flush=True)
time.sleep(600)
"""


def test_another_process_holds_the_folder_until_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PlacementFault, match="in use by another placement"):
            DiskFolder(tmp_path)
        assert (tmp_path / "trimtab-0.slab").stat().st_size == 1000
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    folder = DiskFolder(tmp_path)
    folder.close()
    # What the killed process left is removed: nobody else will.
    assert list(tmp_path.iterdir()) == []


def fail(number: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_before_anything_is_loaded(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail(number))
    with pytest.raises(MemoryFault) as caught:
        DiskSlab(LAYOUT, folder, staging())
    assert (caught.value.code, caught.value.parts["needed"]) == ("TT403", LAYOUT.nbytes)
    assert caught.value.what == f"the disk of {folder.path} is full: 9.25 KiB more were needed"
    folder.close()
    assert list(folder.path.iterdir()) == []


def test_a_file_system_without_reservations_is_used_all_the_same(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail(errno.EOPNOTSUPP))
    assert folder.reserve(100).stat().st_size == 100


class FullFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return fail(errno.ENOSPC) if name == "write" else getattr(self._file, name)


def test_a_disk_that_fills_while_loading(folder: DiskFolder) -> None:
    slab = DiskSlab(LAYOUT, folder, staging())
    slab._file = FullFile(slab._file)
    with pytest.raises(MemoryFault) as caught:
        fill(slab, contents())
    assert (caught.value.code, caught.value.parts["needed"]) == ("TT403", 42)
    slab.close()


def test_a_shortened_file_is_never_read_as_something_else(folder: DiskFolder) -> None:
    slab = DiskSlab(LAYOUT, folder, staging())
    fill(slab, contents())
    os.truncate(slab.path, LAYOUT.nbytes - 300)
    with pytest.raises(FormatFault) as caught:
        slab.fetch(torch.empty(LAYOUT.nbytes, dtype=torch.uint8))
    assert (caught.value.code, caught.value.what) == ("TT502", f"{slab.path} ends 300 bytes early")
    with pytest.raises(FormatFault, match="ends 76 bytes early"):
        slab.read("e.weight", CPU)
    assert equal(slab.read("b.weight", CPU), contents()["b.weight"])
    slab.close()


def test_a_lock_whose_file_was_removed_is_not_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the open and the lock of one placement, another one closed and removed the file."""
    real, path = disk._lock, tmp_path / "trimtab.lock"

    def late(file: Any) -> bool:
        if not removed:
            removed.append(path.unlink())
        return real(file)

    removed: list[None] = []
    monkeypatch.setattr(disk, "_lock", late)
    folder = DiskFolder(tmp_path)
    with pytest.raises(PlacementFault, match="in use by another placement"):
        DiskFolder(tmp_path)
    folder.close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlacementFault) as caught:
        DiskFolder(tmp_path / "file" / "below")
    assert caught.value.code == "TT204"
    assert str(tmp_path / "file" / "below") in caught.value.what


def test_a_mapped_file_holds_what_is_written_to_it(folder: DiskFolder) -> None:
    path = folder.reserve(1000)
    table = map_file(path, 1000)
    table.copy_(torch.arange(1000).to(torch.uint8))
    assert path.read_bytes() == bits(torch.arange(1000).to(torch.uint8))
    assert torch.equal(map_file(path, 1000), table)


@pytest.mark.parametrize("part", [1, 100, LAYOUT.nbytes - 1, LAYOUT.nbytes])
def test_parts_read_at_the_same_time_are_the_whole(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(disk, "PART", max(part, 64))
    slab, given = DiskSlab(LAYOUT, folder, staging()), contents()
    fill(slab, given)
    buffer = torch.empty(LAYOUT.nbytes, dtype=torch.uint8)

    def other() -> None:
        for weight in given:
            assert equal(slab.read(weight, CPU), given[weight])

    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(other) for _ in range(4)]
        slab.fetch(buffer)
        for one in others:
            one.result()
    assert buffer.numpy().tobytes() == slab.path.read_bytes()
    slab.close()


def test_a_fault_is_told_when_no_part_is_being_read_any_more(
    folder: DiskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PART", 128)
    slab = DiskSlab(LAYOUT, folder, staging())
    fill(slab, contents())
    read, ended = slab._read_part, threading.Event()

    def slow(flat: torch.Tensor, offset: int) -> None:
        if offset == 0:
            raise OSError("a bad block")
        time.sleep(0.05)
        read(flat, offset)
        ended.set()

    monkeypatch.setattr(slab, "_read_part", slow)
    buffer = torch.empty(LAYOUT.nbytes, dtype=torch.uint8)
    with pytest.raises(OSError, match="a bad block"):
        slab.fetch(buffer)
    assert ended.is_set()
    buffer.zero_()
    time.sleep(0.1)
    assert not buffer.any()
    slab.close()
