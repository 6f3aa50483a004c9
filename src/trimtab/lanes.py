"""What orders copies beside the computation: on a CPU, on a GPU, and where a disk is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from trimtab.disk import OwnThreads


class Lane(Protocol):
    """Orders copies beside the computation.

    `copy(after, work)` runs `work` once the computation has reached the mark `after` (None: at
    once) and returns a ticket; `wait(ticket)` makes the computation wait for that copy; `mark()`
    is the computation's present position. Nothing here blocks the host, but where it must read.
    `close` ends it, when no copy is under way.
    """

    def copy(self, after: Any, work: Callable[[], None]) -> Any: ...

    def wait(self, ticket: Any) -> None: ...

    def mark(self) -> Any: ...

    def close(self) -> None: ...


class HostLane:
    """A CPU computes and copies in one order: every event is a no-op."""

    def copy(self, after: Any, work: Callable[[], None]) -> Any:
        work()

    def wait(self, ticket: Any) -> None:
        pass

    def mark(self) -> Any:
        return None

    def close(self) -> None:
        pass


class CudaLane:
    """One copy stream beside the current stream of a CUDA device, ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, after: Any, work: Callable[[], None]) -> Any:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work()
        done = torch.cuda.Event()
        done.record(self._stream)
        return done

    def wait(self, ticket: Any) -> None:
        if ticket is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket)

    def mark(self) -> Any:
        now = torch.cuda.Event()
        now.record(torch.cuda.current_stream(self._device))
        return now

    def close(self) -> None:
        self._stream.synchronize()


class ReadingLane:
    """A lane whose copies are made by a thread of their own, for what the host must read first.

    A disk is read while the device computes; whoever needs the bytes waits for the thread. One
    thread, so that copies keep their order.
    """

    def __init__(self, inner: Lane) -> None:
        self._inner = inner
        self._thread = OwnThreads(1, "trimtab-read")

    def copy(self, after: Any, work: Callable[[], None]) -> Any:
        return self._thread.submit(self._inner.copy, after, work)

    def wait(self, ticket: Any) -> None:
        if ticket is not None:
            self._thread.require_own()
            self._inner.wait(ticket.result())

    def mark(self) -> Any:
        return self._inner.mark()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._inner.close()


def lane_for(device: torch.device, *, reads: bool = False) -> Lane:
    """The lane of a device; `reads`: some of what is copied must be read from a disk."""
    inner: Lane = CudaLane(device) if device.type == "cuda" else HostLane()
    return ReadingLane(inner) if reads else inner
