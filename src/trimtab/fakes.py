"""Fakes of the seams of the engine, for tests: a slab that records, a lane that is late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.store import SlabLayout, accept
from trimtab.stream import Ring


class RecordingSlab:
    """A slab in plain memory; `fetches` counts, and `log`, if given, gets `name` for each fetch.

    Args:
        layout: what it holds.
        name: what it calls itself in `log`.
        log: a list that several slabs may share.
    """

    tier = "cpu"

    def __init__(
        self, layout: SlabLayout, name: object = None, log: list[object] | None = None
    ) -> None:
        self.layout = layout
        self.name = name
        self.log = log if log is not None else []
        self.fetches = 0
        self.reads = 0
        self.closed = False
        self.fault: BaseException | None = None
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)

    def put(self, weight: str, key: str, tensor: torch.Tensor) -> None:
        span, resting = accept(self.layout, weight, key, tensor)
        span.resting(self.buffer).copy_(resting)

    def fetch(self, buffer: torch.Tensor) -> None:
        if self.fault is not None:
            raise self.fault
        self.fetches += 1
        self.log.append(self.name)
        buffer[: self.layout.nbytes].copy_(self.buffer)

    def read(
        self, weight: str, device: torch.device, key: str | None = None
    ) -> dict[str, torch.Tensor]:
        self.reads += 1
        spans = self.layout.chosen(weight, key)
        return {
            part: span.resting(self.buffer).clone().to(device, span.dtype)
            for part, span in spans.items()
        }

    def close(self) -> None:
        self.closed = True


@dataclass
class Event:
    """A position in one of the two streams of a `DeferredLane`, reached or not."""

    reached: bool = False


class DeferredLane:
    """A lane whose copies and computation are as far apart as their events allow.

    What is launched with `compute` stands in one queue, what with `copy` in another. With
    `late="copy"` the computation runs at once and a copy only when it is waited for; with
    `late="compute"` each copy runs as soon as its mark allows and the computation when `finish`
    is called, a step at a time. A ring that forgets an event therefore computes on wrong bytes.

    Args:
        late: which of the two is late, `copy` or `compute`.

    Example:
        >>> lane = DeferredLane("copy")
        >>> ticket = lane.copy(None, lambda: print("copied"))
        >>> lane.wait(ticket)
        copied
    """

    def __init__(self, late: str) -> None:
        self._late = late
        self._queues: dict[str, deque[tuple[Event | None, Callable[[], None]]]] = {
            "copy": deque(),
            "compute": deque(),
        }

    def compute(self, work: Callable[[], None]) -> None:
        """Launches a step of the computation."""
        self._launch("compute", None, work)

    def copy(self, after: Event | None, work: Callable[[], None]) -> Event:
        if after is not None:
            self._launch("copy", after, lambda: None)
        self._launch("copy", None, work)
        return self._record("copy")

    def wait(self, ticket: Event) -> None:
        self._launch("compute", ticket, lambda: None)

    def mark(self) -> Event:
        return self._record("compute")

    def close(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Runs all that was launched.

        Raises:
            RuntimeError: the two wait for each other.
        """
        while self._step(self._early()) or self._step(self._late):
            pass
        if any(self._queues.values()):
            raise RuntimeError("copies and computation wait for each other")

    def _early(self) -> str:
        return "compute" if self._late == "copy" else "copy"

    def _record(self, queue: str) -> Event:
        event = Event()

        def reach() -> None:
            event.reached = True

        self._launch(queue, None, reach)
        return event

    def _launch(self, queue: str, after: Event | None, work: Callable[[], None]) -> None:
        self._queues[queue].append((after, work))
        while self._step(self._early()) or self._is_needed():
            pass

    def _is_needed(self) -> bool:
        """Runs a step of late copies, if the computation stands and waits for them."""
        return self._late == "copy" and bool(self._queues["compute"]) and self._step("copy")

    def _step(self, name: str) -> bool:
        """Runs the next step of a queue; False if there is none, or it must wait."""
        queue = self._queues[name]
        if not queue or (queue[0][0] is not None and not queue[0][0].reached):
            return False
        queue.popleft()[1]()
        return True


class Rerun:
    """A recorder that records by running: what it captures is run again for each replay.

    As with a real one, capturing leaves no trace: tensors that `state` names, and the slots of the
    ring, are put back; and each replay finds the slots as the captured work found them.

    Args:
        ring: the ring that the captured work goes through.
        state: the tensors that it writes to beside the ring's.
    """

    def __init__(self, ring: Ring, state: Callable[[], list[torch.Tensor]]) -> None:
        self._ring = ring
        self._state = state

    def capture(
        self, work: Callable[[], dict[str, Any]]
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        slots, held = self._ring.slots, self._ring.held
        before = [(one, one.clone()) for one in (*self._state(), *(s.buffer for s in slots))]
        out = work()
        for tensor, value in before:
            tensor.copy_(value)

        def replay() -> None:
            for slot, index in zip(slots, held, strict=True):
                slot.holds, slot.busy = index, False
            for key, value in work().items():
                if isinstance(value, torch.Tensor):
                    out[key].copy_(value)

        return out, replay


class TorchProducts:
    """A LoRA's products in torch's own operations, in PEFT's order: equal to PEFT's."""

    def down(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
        down: torch.Tensor = lora.down
        return x.float().reshape(-1, x.shape[-1]) @ down.T

    def add(self, base: torch.Tensor, down: torch.Tensor, lora: Any) -> torch.Tensor:
        up: torch.Tensor = lora.up
        added = (down @ up.T * float(lora.scale)).view(base.shape)
        return base + added.to(base.dtype) if lora.rounded else (base + added).to(base.dtype)
