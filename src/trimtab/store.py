"""Where parked bytes rest: one flat slab per unit, in memory or in a file."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from trimtab.errors import FormatFault, MemoryFault, PlacementFault
from trimtab.formats import ALIGNMENT, by_name
from trimtab.memory import align, format_size
from trimtab.plan import WeightSpec


@dataclass(frozen=True)
class Span:
    """Where one plain tensor lies in a slab: offset in bytes, shape, dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in `buffer`, a flat uint8 tensor: a view, no copy."""
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SlabLayout:
    """The spans of a unit's weights, by weight and component, each aligned to `ALIGNMENT`."""

    spans: Mapping[str, Mapping[str, Span]]
    nbytes: int

    @classmethod
    def of(cls, weights: Iterable[WeightSpec]) -> SlabLayout:
        spans: dict[str, dict[str, Span]] = {}
        offset = 0
        for weight in weights:
            parts = by_name(weight.storage).layout(weight.shape, weight.dtype)
            spans[weight.name] = mine = {}
            for part in parts:
                mine[part.key] = Span(offset, part.shape, getattr(torch, part.dtype))
                offset += align(part.nbytes, ALIGNMENT)
        return cls(spans, offset)

    def views(self, buffer: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """All tensors of the unit as views of `buffer` (flat uint8, at least `nbytes`)."""
        return {
            weight: {key: span.view(buffer) for key, span in spans.items()}
            for weight, spans in self.spans.items()
        }


class Slab(Protocol):
    """The bytes of one parked unit.

    `put` fills one tensor while the unit is loaded; `fetch` brings the whole slab into a buffer of
    the device that runs, in the order of the current stream; `read` is a private copy of one
    weight's tensors on that device. After `close` nothing of it is left.
    """

    tier: str
    layout: SlabLayout

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None: ...

    def fetch(self, buffer: torch.Tensor) -> None: ...

    def read(self, weight: str, device: torch.device) -> dict[str, torch.Tensor]: ...

    def close(self) -> None: ...


def check_span(layout: SlabLayout, weight: str, key: str, tensor: torch.Tensor) -> Span:
    """The span that `tensor` belongs into.

    Raises:
        FormatFault: TT508, if shape or dtype differ from what was planned.
    """
    span = layout.spans[weight].get(key)
    if span is None or tuple(tensor.shape) != span.shape or tensor.dtype != span.dtype:
        planned = "nothing" if span is None else f"{list(span.shape)} {span.dtype}"
        raise FormatFault(
            "TT508",
            f"{weight} ({key}) was loaded as {list(tensor.shape)} {tensor.dtype}; "
            f"the plan has {planned}",
            why="the checkpoint or the quantizer changed after the plan was made",
            fix="make the plan again",
        )
    return span


class HostMemory:
    """Page-aligned host memory of exact size, pinned if asked for.

    torch's own pinned allocator rounds up to a power of two; registering memory does not. Where
    the driver refuses, the memory stays pageable and `pinned` says so.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self._map: mmap.mmap | None = mmap.mmap(-1, max(nbytes, 1))
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self._unpin: Callable[[], Any] | None = None
        if pin and nbytes and _pin(self.buffer):
            # Also when nobody closes it: memory that is unmapped and still registered could never
            # be registered again.
            self._unpin = weakref.finalize(self, _unpin, self.buffer.data_ptr())

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def close(self) -> None:
        if self._map is None:
            return
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        # Views may be alive in user hands: the memory goes with the last of them.
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._map = None


def _pin(buffer: torch.Tensor) -> bool:
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(status) == 0:
        return True
    # The driver keeps the refusal as its last error, for the next launch to find.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def _unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


class MemorySlab:
    """A slab in host memory: pinned when a GPU runs."""

    tier = "cpu"

    def __init__(self, layout: SlabLayout, *, pin: bool) -> None:
        self.layout = layout
        self._memory = HostMemory(layout.nbytes, pin=pin)

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def buffer(self) -> torch.Tensor:
        """The slab itself: flat uint8."""
        return self._memory.buffer

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None:
        check_span(self.layout, weight, key, tensor).view(self._memory.buffer).copy_(tensor)

    def fetch(self, buffer: torch.Tensor) -> None:
        buffer[: self.layout.nbytes].copy_(self._memory.buffer, non_blocking=True)

    def read(self, weight: str, device: torch.device) -> dict[str, torch.Tensor]:
        spans = self.layout.spans[weight]
        return {
            key: torch.empty(span.shape, dtype=span.dtype, device=device).copy_(
                span.view(self._memory.buffer)
            )
            for key, span in spans.items()
        }

    def close(self) -> None:
        self._memory.close()


class DiskFolder:
    """A folder that one placement owns while it is open: locked, and emptied on close.

    Files that a killed process left in it are removed first; other people's files stay.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._made = path is None
        self._files: list[Path] = []
        try:
            self.path = Path(tempfile.mkdtemp(prefix="trimtab-") if path is None else path)
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
        self._empty(self._files)
        with contextlib.suppress(OSError):
            # While it is held: else another placement's lock could be what is removed.
            (self.path / "trimtab.lock").unlink()
        self._lock.close()
        self._lock = None
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)

    def _empty(self, files: Iterable[Path]) -> None:
        for path in files:
            # Windows keeps a file that is still mapped; the next placement here removes it.
            with contextlib.suppress(OSError):
                path.unlink()


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
        # Another thread may read a weight while this one fetches, and a file has one position.
        self._turn = threading.Lock()
        self._staging = staging

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None:
        span = check_span(self.layout, weight, key, tensor)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
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

    def read(self, weight: str, device: torch.device) -> dict[str, torch.Tensor]:
        private = {}
        for key, span in self.layout.spans[weight].items():
            flat = torch.empty(span.nbytes, dtype=torch.uint8)
            self._read_into(flat, span.offset)
            private[key] = flat.view(span.dtype).view(span.shape).to(device)
        return private

    def close(self) -> None:
        self._file.close()

    def _read_into(self, flat: torch.Tensor, offset: int) -> None:
        rest = flat.numpy().data
        with self._turn:
            self._file.seek(offset)
            while rest:
                got = self._file.readinto(rest)
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

    def through(self, target: torch.Tensor, fill: Any) -> None:
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        before = self._copied[at]
        if before is not None:
            before.synchronize()
        host = self._buffers[at].buffer[: target.numel()]
        fill(host)
        target.copy_(host, non_blocking=True)
        self._copied[at] = done = torch.cuda.Event()
        done.record()

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
