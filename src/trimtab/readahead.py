"""A checkpoint's files brought into memory ahead of the loader, which takes them page by page.

transformers maps the files, and waits for the disk at each page that is not there yet, while a
quantizer waits for it. What is read here goes nowhere; the system keeps the pages, and gives them
up when memory is needed.
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


@contextlib.contextmanager
def read_ahead(checkpoint: Checkpoint, room: int) -> Iterator[None]:
    """While inside, threads read up to `room` bytes of the files, in the order of the loader.

    Nothing is raised: what cannot be read, the loader will find.
    """
    stop = threading.Event()
    threads = min(READERS, max(1, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(threads, thread_name_prefix="trimtab-ahead") as readers:
        for path, start in parts(checkpoint)[: max(room, 0) // PART]:
            readers.submit(_read, path, start, stop)
        try:
            yield
        finally:
            stop.set()
            readers.shutdown(cancel_futures=True)


def parts(checkpoint: Checkpoint) -> list[tuple[Path, int]]:
    """Files and where their parts start, in the order in which the loader takes the tensors."""
    if checkpoint.folder is None:
        return []
    files = {checkpoint.folder / one.file for one in checkpoint.tensors.values()}
    spans = []
    for path in files:
        with contextlib.suppress(OSError, DamagedFile):
            spans += [(foreign.natural_order(one.name), path, one) for one in read_header(path)[0]]
    ordered: dict[tuple[Path, int], None] = {}
    for _, path, one in sorted(spans, key=lambda span: span[0]):
        for start in range(one.start // PART * PART, one.stop, PART):
            ordered[path, start] = None
    return list(ordered)


def _read(path: Path, start: int, stop: threading.Event) -> None:
    if stop.is_set():
        return
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        if _is_there(file.fileno(), start) and _is_there(file.fileno(), start + PART - 1):
            return
        file.seek(start)
        # A small buffer, used again: a large one would be cleared first, with Python's lock held.
        buffer = bytearray(min(PART, 2**20))
        for _ in range(PART // len(buffer)):
            file.readinto(buffer)


def _is_there(file: int, at: int) -> bool:
    """Whether a byte can be had without waiting for the disk; False where nobody knows."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
    except OSError:
        return False
    return True
