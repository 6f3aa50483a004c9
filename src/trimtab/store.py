"""Where parked bytes rest: one flat slab per unit; here in memory, in `disk.py` in a file."""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab.errors import FormatFault
from trimtab.formats import ALIGNMENT, by_name
from trimtab.memory import align
from trimtab.plan import WeightSpec

GPU = "cuda:0"
"""The one that reads what is pinned here, whichever is current."""


@dataclass(frozen=True)
class Span:
    """Where one plain tensor lies: `offset` bytes into its slab, and into the buffer that the slab
    is brought to. What `rests` in a smaller dtype is widened there, to `arrives`.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rests: torch.dtype | None = None
    arrives: int = 0

    @property
    def stored(self) -> torch.dtype:
        """The dtype in the slab."""
        return self.rests or self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the slab."""
        return torch.Size(self.shape).numel() * self.stored.itemsize

    def resting(self, slab: torch.Tensor) -> torch.Tensor:
        """The tensor in a slab, flat uint8, as it rests: a view, no copy."""
        flat = slab[self.offset : self.offset + self.nbytes]
        return flat.view(self.stored).view(self.shape)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in a buffer, flat uint8, as it is computed from: a view, no copy."""
        if self.rests is None:
            return self.resting(buffer)
        nbytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        return buffer[self.arrives : self.arrives + nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SlabLayout:
    """The spans of a unit's weights, by weight and component, each aligned to `ALIGNMENT`.

    What rests in a smaller dtype lies first in the slab and is widened behind its end: `nbytes`
    move, and a buffer has `room` bytes. `short` are its bytes, and its dtypes before and after.
    """

    spans: Mapping[str, Mapping[str, Span]]
    nbytes: int
    room: int
    short: tuple[int, torch.dtype, torch.dtype] | None = None

    @classmethod
    def of(cls, weights: Iterable[WeightSpec]) -> SlabLayout:
        parts = [
            (one.name, part)
            for one in weights
            for part in by_name(one.storage).layout(one.shape, one.dtype, one.quantized_from)
        ]
        sizes = [align(part.resting_bytes, ALIGNMENT) for _, part in parts]
        nbytes = room = sum(sizes)
        first = 0
        other = sum(size for size, (_, part) in zip(sizes, parts, strict=True) if part.rests)
        spans: dict[str, dict[str, Span]] = {name: {} for name, _ in parts}
        short = None
        for size, (name, part) in zip(sizes, parts, strict=True):
            dtype = getattr(torch, part.dtype)
            if part.rests:
                rests = getattr(torch, part.rests)
                spans[name][part.key] = Span(first, part.shape, dtype, rests, room)
                first += size
                room += size * dtype.itemsize // rests.itemsize
                short = first, rests, dtype
            else:
                spans[name][part.key] = Span(other, part.shape, dtype)
                other += size
        return cls(spans, nbytes, room, short)

    def chosen(self, weight: str, key: str | None) -> Mapping[str, Span]:
        """The spans of a weight, or only that of one of its components."""
        spans = self.spans[weight]
        return spans if key is None else {key: spans[key]}

    def views(self, buffer: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """All tensors of the unit as views of `buffer` (flat uint8, of `room` bytes)."""
        return {
            weight: {key: span.view(buffer) for key, span in spans.items()}
            for weight, spans in self.spans.items()
        }

    def widening(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Views of a buffer: what is filled before the unit runs, and from what."""
        if self.short is None:
            return None
        nbytes, rests, dtype = self.short
        return buffer[self.nbytes : self.room].view(dtype), buffer[:nbytes].view(rests)


class Slab(Protocol):
    """The bytes of one parked unit.

    `put` fills one tensor while the unit is loaded; `fetch` brings the whole slab into a buffer of
    the device that runs, in the order of the current stream, and widens nothing; `read` is a
    private copy of one weight's tensors, or of the one named `key`, on that device. After `close`
    nothing is left.
    """

    tier: str
    layout: SlabLayout

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None: ...

    def fetch(self, buffer: torch.Tensor) -> None: ...

    def read(
        self, weight: str, device: torch.device, key: str | None = None
    ) -> dict[str, torch.Tensor]: ...

    def close(self) -> None: ...


def accept(
    layout: SlabLayout, weight: str, key: str, tensor: torch.Tensor
) -> tuple[Span, torch.Tensor]:
    """The span that `tensor` belongs into, and the tensor as it rests there.

    Raises:
        FormatFault: TT508, if shape or dtype differ from what was planned, or the dtype in which
            it was planned to rest cannot hold it.
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
    if span.rests is None:
        return span, tensor
    short = tensor.to(span.rests)
    if not torch.allclose(short.to(span.dtype), tensor, rtol=0, atol=0, equal_nan=True):
        raise FormatFault(
            "TT508",
            f"{weight} ({key}) was loaded with more digits than {span.rests} has",
            why=f"the plan takes it for quantized from {span.rests}, and it was not",
            fix="quantize the model again from its 16-bit checkpoint, or take quantized_from out "
            "of the quantization_config in its config.json",
        )
    return span, short


class HostMemory:
    """Page-aligned host memory of exact size, pinned if asked for.

    torch's own pinned allocator rounds up to a power of two; registering memory does not. Where
    the driver refuses, the memory stays pageable and `pinned` says so.

    Args:
        nbytes: the size.
        pin: whether it is to be pinned.
        by: a thread that pins it, so that whoever asks for the buffer, or whether it is pinned,
            waits; else it is pinned when it is made.
    """

    def __init__(self, nbytes: int, *, pin: bool, by: Executor | None = None) -> None:
        self._map: mmap.mmap | None = _pages(max(nbytes, 1), pin)
        self._buffer = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self._pinning: Future[bool] | None = None
        if pin and nbytes:
            self._pinning = Future()
            # Also when nobody closes it: memory that is unmapped and still registered could never
            # be registered again. And before it is pinned: an interrupt may come at any line.
            self._unpin = weakref.finalize(self, _unpin, self._pinning, self._buffer.data_ptr())
            with contextlib.ExitStack() as own:
                # An interrupt meets a thread that waits, not one that has pinned and not said so.
                by = by or own.enter_context(ThreadPoolExecutor(1))
                by.submit(_pin_as_told, self._pinning, self._buffer)

    @property
    def buffer(self) -> torch.Tensor:
        """The memory: flat uint8, zeros until it is written to; empty when it is closed."""
        if self._pinning is not None:
            self._pinning.result()
        return self._buffer

    @property
    def pinned(self) -> bool:
        return self._pinning is not None and self._pinning.result()

    def close(self) -> None:
        if self._map is None:
            return
        if self._pinning is not None:
            self._unpin()
            self._pinning = None
        # Views may be alive in user hands: the memory goes with the last of them.
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._map = None


def _pages(nbytes: int, pin: bool) -> mmap.mmap:
    """Anonymous memory of this process, in large pages where the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child would share the pages, and the first write move ours away from what is pinned.
    for advice in ("MADV_HUGEPAGE", *(("MADV_DONTFORK",) if pin else ())):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    return pages


def _pin_as_told(pinning: Future[bool], buffer: torch.Tensor) -> None:
    """Pins the memory, unless that has been cancelled, and tells those who wait."""
    if pinning.set_running_or_notify_cancel():
        try:
            pinning.set_result(_pin(buffer))
        except BaseException as error:
            pinning.set_exception(error)


def _pin(buffer: torch.Tensor) -> bool:
    # The driver takes pages one after the other; torch's threads take them side by side.
    buffer.zero_()
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(status) == 0:
        return True
    # The driver keeps the refusal as its last error, for the next launch to find.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=GPU)
    return False


def _unpin(pinning: Future[bool], address: int) -> None:
    """Undoes it, or keeps it from being done; where it is being done, right after that.

    Nobody waits: a garbage collection may call this on the very thread that pins.
    """
    pinning.cancel()
    pinning.add_done_callback(functools.partial(_unregister, address))


def _unregister(address: int, pinning: Future[bool]) -> None:
    if not pinning.cancelled() and pinning.exception() is None and pinning.result():
        try:
            torch.cuda.synchronize(GPU)
        finally:
            torch.cuda.cudart().cudaHostUnregister(address)


class MemorySlab:
    """A slab in host memory: pinned when a GPU runs, by the thread `by` where there is one."""

    tier = "cpu"

    def __init__(self, layout: SlabLayout, *, pin: bool, by: Executor | None = None) -> None:
        self.layout = layout
        self._memory = HostMemory(layout.nbytes, pin=pin, by=by)

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def buffer(self) -> torch.Tensor:
        """The slab itself: flat uint8."""
        return self._memory.buffer

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None:
        span, resting = accept(self.layout, weight, key, tensor)
        span.resting(self._memory.buffer).copy_(resting)

    def fetch(self, buffer: torch.Tensor) -> None:
        buffer[: self.layout.nbytes].copy_(self._memory.buffer, non_blocking=True)

    def read(
        self, weight: str, device: torch.device, key: str | None = None
    ) -> dict[str, torch.Tensor]:
        return {
            part: torch.empty(span.shape, dtype=span.dtype, device=device).copy_(
                span.resting(self._memory.buffer)
            )
            for part, span in self.layout.chosen(weight, key).items()
        }

    def close(self) -> None:
        self._memory.close()
