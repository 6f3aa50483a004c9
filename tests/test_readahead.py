"""Files are read ahead of the loader: in its order, within a bound, and no longer than it loads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import tiny
from trimtab import foreign, readahead
from trimtab.checkpoint import Checkpoint, open_checkpoint
from trimtab.headers import read_header
from trimtab.readahead import parts, read_ahead

Read = tuple[Path, int]


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(readahead, "PART", 4096)
    return open_checkpoint(tiny.checkpoint("llama", shards=3))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """What is read, in order: by one thread, and nothing is in memory yet."""
    found: list[Read] = []
    own = readahead._read

    def read(path: Path, start: int, stop: threading.Event) -> None:
        found.append((path, start))
        own(path, start, stop)

    monkeypatch.setattr(readahead, "_read", read)
    monkeypatch.setattr(readahead, "READERS", 1)
    return found


def finished(checkpoint: Checkpoint, room: int, count: int, seen: list[Read]) -> None:
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
    covered: set[Read] = set()
    for name in sorted(checkpoint.tensors, key=foreign.natural_order):
        file, one = held[name]
        mine = {(file, at) for at in range(one.start // 4096 * 4096, one.stop, 4096)}
        fresh = [found.index(part) for part in mine - covered]
        assert all(at > before for at in fresh)
        before = max(fresh, default=before)
        covered |= mine
    assert covered == set(found)


def test_it_reads_what_there_is_room_for(checkpoint: Checkpoint, seen: list[Read]) -> None:
    every = parts(checkpoint)
    finished(checkpoint, 5 * 4096 + 1, 5, seen)
    assert seen == every[:5]
    seen.clear()
    finished(checkpoint, 2**30, len(every), seen)
    assert seen == every
    seen.clear()
    finished(checkpoint, -1, 0, seen)
    assert seen == []


def test_it_ends_with_the_loader(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    count = 0

    def slow(path: Path, start: int, stop: threading.Event) -> None:
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
    checkpoint: Checkpoint, tmp_path: Path, seen: list[Read]
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
    asked: list[int] = []

    def there(file: int, at: int) -> bool:
        asked.append(at)
        return True

    path, start = parts(checkpoint)[0]
    monkeypatch.setattr(readahead, "_is_there", there)
    monkeypatch.setattr(readahead, "bytearray", None, raising=False)  # what a read would need
    readahead._read(path, start, threading.Event())
    assert asked == [start, start + 4095]
