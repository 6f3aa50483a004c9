"""A checkpoint's files brought into memory ahead of the loader, which takes them page by page.

transformers maps the files, and the disk rests while a tensor goes from there to its home. What is
read here goes nowhere; the system keeps the pages, and gives them up when memory is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from trimtab import foreign
from trimtab.checkpoint import Checkpoint
from trimtab.headers import DamagedFile, read_header

READERS: Final = 4
"""Threads at most; half as many as there are cores, where that is fewer."""

PART: Final = 8 * 2**20
"""Bytes of a part."""

STEP: Final = 2**20
"""Bytes of one read. A larger buffer would be cleared first, with Python's lock held."""

Part = tuple[Path, int]
"""A file, and where in it the part starts."""


@contextlib.contextmanager
def read_ahead(checkpoint: Checkpoint, room: int) -> Iterator[None]:
    """While inside, threads read up to `room` bytes that are not in memory yet, in the order of the
    loader.

    Nothing is raised: what cannot be read, the loader will find.
    """
    away = absent(parts(checkpoint))[: max(room, 0) // PART]
    if not away:
        yield
        return
    stop = threading.Event()
    threads = min(READERS, max(1, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(threads, thread_name_prefix="trimtab-ahead") as readers:
        try:
            for part in away:
                readers.submit(_read, part, stop)
            yield
        finally:
            stop.set()
            readers.shutdown(cancel_futures=True)


def parts(checkpoint: Checkpoint) -> list[Part]:
    """All parts of the files, in the order in which the loader takes the tensors."""
    if checkpoint.folder is None:
        return []
    files = {checkpoint.folder / one.file for one in checkpoint.tensors.values()}
    spans = []
    for path in files:
        with contextlib.suppress(OSError, DamagedFile):
            spans += [(foreign.natural_order(one.name), path, one) for one in read_header(path)[0]]
    ordered: dict[Part, None] = {}
    for _, path, one in sorted(spans, key=lambda span: span[0]):
        for start in range(one.start // PART * PART, one.stop, PART):
            ordered[path, start] = None
    return list(ordered)


def absent(every: list[Part]) -> list[Part]:
    """Those of the parts whose first or last byte cannot be had without waiting for the disk; all
    of them where nobody knows."""
    if not hasattr(os, "RWF_NOWAIT"):
        return every
    with contextlib.ExitStack() as stack:
        files = {}
        for path in dict.fromkeys(path for path, _ in every):
            with contextlib.suppress(OSError):
                files[path] = stack.enter_context(open(path, "rb"))
        return [
            (path, start)
            for path, start in every
            if path in files
            and not all(_is_there(files[path].fileno(), at) for at in (start, start + PART - 1))
        ]


def _is_there(file: int, at: int) -> bool:
    try:
        os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
    except OSError:
        return False
    return True


def _read(part: Part, stop: threading.Event) -> None:
    path, start = part
    buffer = bytearray(STEP)
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        file.seek(start)
        for _ in range(0, PART, STEP):
            if stop.is_set():
                return
            file.readinto(buffer)
