"""The ring: slabs go through a few equal slots on the device that runs, ahead of their use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimtab.errors import RunningFault
from trimtab.lanes import Lane, lane_for
from trimtab.store import Slab


class Slot:
    """One buffer of the ring: the slab it holds, the copy that fills it, its last use.

    A use that is not known (None) is whatever the computation has been given so far.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Made inside an inference_mode block it could not be written to outside.
        with torch.inference_mode(False):
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.holds: int | None = None
        self.ticket: Any = None
        self.used: Any = None
        self.busy = False


class Ring:
    """Slabs in running order, a few slots, and the rule which slab is fetched next.

    The order is a circle: while the last units of a token run, the first of the next are fetched.
    A free slot takes the next slab that is not held, if that one is needed before what the slot
    holds now. A slab that is asked for out of order is fetched on demand.

    Args:
        slabs: the slabs of the streamed units, in running order.
        slots: how many buffers; each has room for the largest slab.
        device: where the buffers are.
        lane: what orders copies and computation.
        poison: fill a slot with 0xFF when its unit has run, so that a late read shows.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        slots: int,
        device: torch.device,
        lane: Lane | None = None,
        *,
        poison: bool = False,
    ) -> None:
        self._slabs = slabs
        reads = any(slab.tier == "disk" for slab in slabs)
        self._lane = lane if lane is not None else lane_for(device, reads=reads)
        self._poison = poison
        self._recording = False
        size = max((slab.layout.room for slab in slabs), default=0)
        count = min(slots, len(slabs)) if not poison else slots
        self.slots = [Slot(size, device) for _ in range(count if slabs else 0)]
        for slot in self.slots:
            slot.used = self._lane.mark()  # the allocator may hand out memory still in use

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(slot.buffer.numel() for slot in self.slots)

    def take(self, index: int) -> int:
        """The number of the slot that holds slab `index`, for the computation's exclusive use.

        Raises:
            RunningFault: TT607, if units are nested deeper than there are slots.
        """
        slot = next((one for one in self.slots if one.holds == index and not one.busy), None)
        if slot is None:
            slot = self._victim(index)
            if slot is None:
                raise RunningFault(
                    "TT607", f"{len(self.slots)} slots are in use and one more is needed"
                )
            self._fill(slot, index)
        slot.busy = True
        try:
            self._lane.wait(slot.ticket)
            self._ahead(index)
        except BaseException:
            # The copy may have failed: what the slot holds is not known.
            slot.busy, slot.holds = False, None
            raise
        return self.slots.index(slot)

    def give(self, number: int) -> None:
        """The computation is done with the slot: its next slab may come."""
        slot = self.slots[number]
        index = slot.holds
        if self._poison:
            slot.holds = None
            slot.buffer.fill_(0xFF)
        slot.used = self._lane.mark()
        slot.busy = False
        if self._recording and self._leaves_one and index == len(self._slabs) - 1:
            slot.holds = None
        elif index is not None:
            self._ahead(index)

    def forget(self, index: int) -> None:
        """Lets go the slot that slab `index` was taken in, if an interrupt lost its number."""
        for slot in self.slots:
            if slot.busy and slot.holds in (index, None):
                slot.busy, slot.holds, slot.used = False, None, self._lane.mark()

    @property
    def held(self) -> tuple[int | None, ...]:
        """What each slot holds."""
        return tuple(slot.holds for slot in self.slots)

    @property
    def _leaves_one(self) -> bool:
        """Whether a recorded token leaves a slot that the next one fills when it begins.

        No copy may be under way when a recording ends: with every slot full the link would stand
        still from there until the first unit of the next token has run.
        """
        return 1 < len(self.slots) < len(self._slabs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Around a token that is recorded: no copy of it starts earlier or ends later."""
        self._fork()
        self._recording = True
        try:
            if self._leaves_one:
                self._ahead(len(self._slabs) - 1)
            yield
        finally:
            self._recording = False
            # Also where it failed: a recording that a copy is outside of cannot be ended.
            self.fence()

    def ready(self) -> tuple[int | None, ...]:
        """What each slot holds, as a recorded token would leave it."""
        spare = self._victim(len(self._slabs) - 1) if self._leaves_one else None
        if spare is not None:
            spare.holds = None
        return self.held

    def fence(self) -> None:
        """The computation waits for every copy that is under way."""
        for slot in self.slots:
            self._lane.wait(slot.ticket)
            slot.ticket = None

    def turned(self, held: Sequence[int | None]) -> None:
        """The computation, as it was recorded, has run the ring: each slot holds this now."""
        for slot, index in zip(self.slots, held, strict=True):
            slot.holds = index
        self._fork()

    def _fork(self) -> None:
        """Copies from here on start after the computation's present position, none before it."""
        for slot in self.slots:
            slot.used = self._lane.mark()

    def lose(self) -> None:
        """Nothing is known of the slots: what was meant to fill them was not run."""
        for slot in self.slots:
            slot.busy, slot.holds, slot.ticket, slot.used = False, None, None, None

    def close(self) -> None:
        try:
            self._lane.close()
        finally:
            self.slots = []

    def _distance(self, held: int | None, index: int) -> int:
        """Steps from unit `index` until `held` is needed; nothing held is needed never."""
        if held is None:
            return len(self._slabs) + 1
        return (held - index) % len(self._slabs) or len(self._slabs)

    def _victim(self, index: int) -> Slot | None:
        free = [slot for slot in self.slots if not slot.busy]
        return max(free, key=lambda slot: self._distance(slot.holds, index), default=None)

    def _ahead(self, index: int) -> None:
        held = {slot.holds for slot in self.slots}
        for step in range(1, len(self._slabs)):
            wanted = (index + step) % len(self._slabs)
            if wanted in held:
                continue
            slot = self._victim(index)
            if slot is None or self._distance(slot.holds, index) <= step:
                return
            held.discard(slot.holds)
            held.add(wanted)
            self._fill(slot, wanted)

    def _fill(self, slot: Slot, index: int) -> None:
        slab = self._slabs[index]
        slot.holds = None
        after = self._lane.mark() if slot.used is None else slot.used
        slot.ticket = self._lane.copy(after, lambda: slab.fetch(slot.buffer))
        slot.holds = index
