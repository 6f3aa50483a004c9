"""Files are read ahead of the loader: in its order, within a bound, and no longer than it loads."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tiny
from trimtab import foreign, readahead
from trimtab.checkpoint import Checkpoint, open_checkpoint
from trimtab.headers import read_header
from trimtab.readahead import Part, absent, parts, read_ahead

if TYPE_CHECKING:
    from typing_extensions import Buffer


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(readahead, "PART", 4096)
    return open_checkpoint(tiny.checkpoint("llama", shards=3))


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file were to come from the disk."""
    monkeypatch.setattr(readahead, "_is_there", lambda file, at: False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, nothing_there: None) -> list[Part]:
    """What is read, in order: by one thread."""
    found: list[Part] = []
    own = readahead._read

    def read(part: Part, stop: threading.Event) -> None:
        found.append(part)
        own(part, stop)

    monkeypatch.setattr(readahead, "_read", read)
    monkeypatch.setattr(readahead, "READERS", 1)
    return found


def finished(checkpoint: Checkpoint, room: int, count: int, seen: list[Part]) -> None:
    with read_ahead(checkpoint, room):
        while len(seen) < count:
            pass


def test_every_byte_once_in_the_order_of_the_loader(checkpoint: Checkpoint) -> None:
    assert checkpoint.folder is not None
    found = parts(checkpoint)
    assert len(found) == len(set(found))
    files = sorted({checkpoint.folder / one.file for one in checkpoint.tensors.values()})
    assert len(files) > 2
    held = {one.name: (file, one) for file in files for one in read_header(file)[0]}
    before = -1
    covered: set[Part] = set()
    for name in sorted(checkpoint.tensors, key=foreign.natural_order):
        file, one = held[name]
        mine = {(file, at) for at in range(one.start // 4096 * 4096, one.stop, 4096)}
        fresh = [found.index(part) for part in mine - covered]
        assert all(at > before for at in fresh)
        before = max(fresh, default=before)
        covered |= mine
    assert covered == set(found)


def test_it_reads_what_there_is_room_for(checkpoint: Checkpoint, seen: list[Part]) -> None:
    every = parts(checkpoint)
    finished(checkpoint, 5 * 4096 + 1, 5, seen)
    assert seen == every[:5]
    seen.clear()
    finished(checkpoint, 2**30, len(every), seen)
    assert seen == every
    seen.clear()
    finished(checkpoint, -1, 0, seen)
    assert seen == []


def test_a_part_is_read_whole_until_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "PART", 4096)
    monkeypatch.setattr(readahead, "STEP", 1024)
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    read: list[tuple[int, int | None]] = []
    stop = threading.Event()
    last = 3

    class Recorder(io.FileIO):
        def readinto(self, buffer: Buffer) -> int | None:
            at = self.tell()
            read.append((at, super().readinto(buffer)))
            if len(read) == last:
                stop.set()
            return read[-1][1]

    monkeypatch.setattr(
        readahead, "open", lambda path, mode, buffering: Recorder(path, mode), raising=False
    )
    readahead._read((path, 4096), stop)
    assert read == [(4096, 1024), (5120, 1024), (6144, 1024)]
    read.clear()
    stop.clear()
    last = 0
    readahead._read((path, 4096), stop)
    assert read == [(4096, 1024), (5120, 1024), (6144, 1024), (7168, 1024)]
    read.clear()
    readahead._read((path, 8192), stop)  # the end of the file comes first
    assert sum(count or 0 for _, count in read) == 10_000 - 8192


def test_it_ends_with_the_loader(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, nothing_there: None
) -> None:
    started, go_on = threading.Event(), threading.Event()
    count = 0

    def slow(part: Part, stop: threading.Event) -> None:
        nonlocal count
        count += 1
        started.set()
        go_on.wait()

    monkeypatch.setattr(readahead, "_read", slow)

    def interrupted() -> None:
        with read_ahead(checkpoint, 2**30):
            started.wait()
            threading.Timer(0.01, go_on.set).start()
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert threading.active_count() <= before + 1  # the timer's
    assert count <= readahead.READERS


def test_what_cannot_be_read_is_left_to_the_loader(
    checkpoint: Checkpoint, tmp_path: Path, seen: list[Part]
) -> None:
    folder = tiny.writable(tiny.checkpoint("llama", shards=3), tmp_path)
    copy = open_checkpoint(folder)
    first, second, third, *further = sorted(folder.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    assert {path for path, _ in parts(copy)} == {third, *further}
    with read_ahead(copy, 2**30):
        third.unlink()


def test_what_is_only_on_the_hub_is_not_read(checkpoint: Checkpoint) -> None:
    import dataclasses

    assert parts(dataclasses.replace(checkpoint, folder=None)) == []


def test_what_is_in_memory_is_not_read_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    every = parts(checkpoint)
    away = {every[1][1], every[3][1] + 4095}

    def preadv(file: int, buffers: list[bytearray], at: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if at in away:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", preadv, raising=False)
    expected = [(path, start) for path, start in every if start in away or start + 4095 in away]
    assert absent(every) == expected
    assert {every[1], every[3]} <= set(expected) < set(every)
    away.clear()
    assert absent(every) == []
    monkeypatch.setattr(readahead, "ThreadPoolExecutor", None)
    with read_ahead(checkpoint, 2**30):
        pass


def test_all_is_read_where_nobody_knows_what_is_in_memory(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    assert absent(parts(checkpoint)) == parts(checkpoint)


def test_a_file_that_is_gone_is_left_out(
    checkpoint: Checkpoint, tmp_path: Path, nothing_there: None
) -> None:
    assert absent([*parts(checkpoint), (tmp_path / "gone", 0)]) == parts(checkpoint)
