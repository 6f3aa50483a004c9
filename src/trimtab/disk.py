"""The disk tier: a locked folder, slabs in files, and how a GPU reads them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import torch

from trimtab.errors import FormatFault, MemoryFault, PlacementFault
from trimtab.memory import format_size
from trimtab.store import HostMemory, SlabLayout, accept

READERS = 4
"""Threads that read parts of one file at a time."""

PART = 8 * 2**20
"""Bytes of a part."""


class OwnThreads(ThreadPoolExecutor):
    """Threads that read for a placement; a forked child has none of them, and is told so.

    Raises:
        PlacementFault: TT224, work is given to them in another process than that which made them.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._owner = os.getpid()

    @property
    def own(self) -> bool:
        """Whether this is the process that made them."""
        return os.getpid() == self._owner

    def submit(self, *work: Any, **options: Any) -> Any:
        self.require_own()
        return super().submit(*work, **options)

    def require_own(self) -> None:
        if not self.own:
            raise PlacementFault(
                "TT224",
                "a forked process uses a placement that its parent made",
                why="the threads that read the model's layers from the disk are the parent's alone",
                fix="load the model in the process that uses it, after the fork",
                parent=self._owner,
            )


class DiskFolder:
    """A folder that one placement owns while it is open: locked, and emptied on close.

    Files that a killed process left in it are removed first; other people's files stay. Closed in a
    forked child, it stays as it is: it is the parent's.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._made: Callable[[], Any] | None = None
        self._files: list[Path] = []
        self.readers = OwnThreads(READERS, "trimtab-disk")
        try:
            if path is None:
                path = tempfile.mkdtemp(prefix="trimtab-")
                # Also when nobody closes it.
                self._made = weakref.finalize(self, _remove, path, os.getpid())
            self.path = Path(path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path / "trimtab.lock")
        except OSError as error:
            raise disk_fault(error, path or tempfile.gettempdir(), 0) from error
        if self._lock is None:
            raise PlacementFault(
                "TT206",
                f"the disk folder {self.path} is in use by another placement",
                fix="close the other placement, or give each one a folder of its own",
            )
        self._empty(self.path.glob("trimtab-*.slab"))

    def reserve(self, nbytes: int) -> Path:
        """A new file of `nbytes`, its blocks taken now, so that a full disk is found at once.

        Raises:
            MemoryFault: TT403, if the disk is full.
        """
        path = self.path / f"trimtab-{len(self._files)}.slab"
        self._files.append(path)
        try:
            with open(path, "wb") as file:
                if nbytes and hasattr(os, "posix_fallocate"):
                    reserve_blocks(file, nbytes)
                file.truncate(nbytes)
        except OSError as error:
            raise disk_fault(error, self.path, nbytes) from error
        return path

    def close(self) -> None:
        if self._lock is None:
            return
        self.readers.shutdown(wait=True)
        if self.readers.own:
            self._empty(self._files)
            with contextlib.suppress(OSError):
                # While it is held: else another placement's lock could be what is removed.
                (self.path / "trimtab.lock").unlink()
        self._lock.close()
        self._lock = None
        if self._made is not None:
            self._made()

    def _empty(self, files: Iterable[Path]) -> None:
        for path in files:
            # Windows keeps a file that is still mapped; the next placement here removes it.
            with contextlib.suppress(OSError):
                path.unlink()


def _remove(path: str, owner: int) -> None:
    # A forked child has it from its parent, whose files they are.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def reserve_blocks(file: IO[Any], nbytes: int) -> None:
    """Takes the blocks of a file now, where the file system can."""
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


class DiskSlab:
    """A slab in a file, read straight into the buffer of a CPU, through a pinned one for a GPU."""

    tier = "disk"

    def __init__(self, layout: SlabLayout, folder: DiskFolder, staging: Staging) -> None:
        self.layout = layout
        self.path = folder.reserve(layout.nbytes)
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
        # Two threads may write, and a file has one position.
        self._turn = threading.Lock()
        self._readers = folder.readers
        self._staging = staging

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None:
        span, resting = accept(self.layout, weight, key, tensor)
        flat = resting.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        rest = flat.numpy().data
        try:
            with self._turn:
                self._file.seek(span.offset)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise disk_fault(error, self.path, span.nbytes) from error

    def fetch(self, buffer: torch.Tensor) -> None:
        if buffer.device.type == "cpu":
            self._read_into(buffer[: self.layout.nbytes], 0)
        else:
            self._staging.through(
                buffer[: self.layout.nbytes], lambda host: self._read_into(host, 0)
            )

    def read(
        self, weight: str, device: torch.device, key: str | None = None
    ) -> dict[str, torch.Tensor]:
        private = {}
        for part, span in self.layout.chosen(weight, key).items():
            flat = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")
            self._read_into(flat, span.offset)
            private[part] = flat.view(span.stored).view(span.shape).to(device, span.dtype)
        return private

    def close(self) -> None:
        self._file.close()

    def _read_into(self, flat: torch.Tensor, offset: int) -> None:
        """Reads a slab's bytes from `offset` on, in parts at the same time: one read alone leaves a
        fast disk idle."""
        first, *others = flat.split(PART)
        starts = range(offset + PART, offset + flat.numel(), PART)
        reading = [
            self._readers.submit(self._read_part, part, start)
            for part, start in zip(others, starts, strict=True)
        ]
        try:
            self._read_part(first, offset)
        finally:
            # Whoever is told of a fault may use the buffer again: nobody writes to it then.
            wait(reading)
        for one in reading:
            one.result()

    def _read_part(self, flat: torch.Tensor, offset: int) -> None:
        rest = flat.numpy().data
        with open(self.path, "rb", buffering=0) as file:
            file.seek(offset)
            while rest:
                got = file.readinto(rest)
                if not got:
                    raise FormatFault(
                        "TT502",
                        f"{self.path} ends {len(rest)} bytes early",
                        why="somebody shortened a file of this placement while it was open",
                    )
                rest = rest[got:]


class Staging:
    """Two pinned buffers through which file bytes reach a GPU; a buffer waits for its last copy."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._buffers = [HostMemory(nbytes, pin=True) for _ in range(2 if cuda and nbytes else 0)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._next = 0
        # The thread that reads ahead, and whoever brings in what is idle.
        self._turn = threading.Lock()

    def through(self, target: torch.Tensor, fill: Any) -> None:
        with self._turn:
            at, self._next = self._next, (self._next + 1) % len(self._buffers)
            before = self._copied[at]
            if before is not None:
                before.synchronize()
            host = self._buffers[at].buffer[: target.numel()]
            fill(host)
            target.copy_(host, non_blocking=True)
            self._copied[at] = done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(target.device))

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """A flat uint8 tensor over a file: read when it is touched, written back by the system."""
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def disk_fault(error: OSError, path: object, nbytes: int) -> MemoryFault | PlacementFault:
    """The error that an OSError of a disk tier stands for."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MemoryFault(
            "TT403",
            f"the disk of {path} is full: {format_size(nbytes)} more were needed",
            fix="free space, or name a folder on another disk",
            needed=nbytes,
        )
    return PlacementFault("TT204", f"the disk folder {path} cannot be used: {error.strerror}")


def take_lock(path: Path) -> IO[Any] | None:
    """The open and locked file, or None if somebody else has the lock."""
    while True:
        file = open(path, "a+b")  # noqa: SIM115
        if not _lock(file):
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        # Its owner removed it between our open and our lock.
        file.close()


def _lock(file: IO[Any]) -> bool:
    """Whether the lock was had; the system frees it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        lock: Any = msvcrt
        try:
            lock.locking(file.fileno(), lock.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
