"""The disk folder's lock, its files and its faults."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slabs import LAYOUT, bits, contents, equal, fill
from trimtab import disk
from trimtab.disk import DiskFolder, DiskSlab, Staging, map_file
from trimtab.errors import FormatFault, MemoryFault, PlacementFault
from trimtab.store import HostMemory

CPU = torch.device("cpu")


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


class Event:
    """Of a device that is always done."""

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_each_thread_has_a_staging_buffer_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    shared = staging()
    shared._buffers = [HostMemory(64, pin=False) for _ in range(2)]
    shared._copied = [None, None]
    reading, go_on = threading.Event(), threading.Event()

    def slowly(host: torch.Tensor) -> None:
        host.fill_(1)
        reading.set()
        assert go_on.wait(10)

    def brought(value: int) -> list[int]:
        target = torch.zeros(64, dtype=torch.uint8)
        shared.through(target, lambda host: host.fill_(value))
        return target.tolist()

    with ThreadPoolExecutor(2) as threads:
        target = torch.zeros(64, dtype=torch.uint8)
        ahead = threads.submit(shared.through, target, slowly)
        assert reading.wait(10)
        others = threads.submit(lambda: [brought(2), brought(3)])
        time.sleep(0.1)
        go_on.set()
        ahead.result(10)
        assert target.tolist() == [1] * 64
        assert others.result(10) == [[2] * 64, [3] * 64]


def test_a_folder_of_its_own_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    closed, forgotten = DiskFolder(), DiskFolder()
    closed.reserve(100)
    forgotten.reserve(100)
    closed.close()
    (left,) = tmp_path.iterdir()
    disk._remove(str(left), os.getpid() + 1)  # a child has it from its parent
    assert left.exists()
    forgotten._lock.close()
    del forgotten
    gc.collect()
    assert list(tmp_path.iterdir()) == []


FORK = """
import os, signal, sys
import torch
import tiny
from placing import placed
from trimtab.errors import PlacementFault

torch.set_num_threads(1)
folder = tiny.checkpoint("llama")
given = tiny.inputs(folder)
with placed(folder, "none", ("layers",), tier="disk") as one:
    before = tiny.logits(one.model, given)
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends it where it waits for ever
        try:
            tiny.logits(one.model, given)
        except PlacementFault as fault:
            one.close()
            os._exit(7 if fault.code == "TT224" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(tiny.logits(one.model, given), before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_told_so_and_leaves_its_parent_all_it_has() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", FORK], env={**os.environ, "PYTHONPATH": path}, check=True)
