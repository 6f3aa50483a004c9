"""The ring's races: a copy or the computation late, events missing, tokens that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rings import CPU, slabs
from trimtab.errors import RunningFault
from trimtab.fakes import DeferredLane, RecordingSlab
from trimtab.lanes import HostLane
from trimtab.stream import Ring


class Kernels:
    """The computation of a fake lane: each unit compares its slot's bytes when its turn comes."""

    def __init__(self, lane: DeferredLane, made: Sequence[RecordingSlab]) -> None:
        self.lane, self.made = lane, made
        self.wrong: list[tuple[int, list[int]]] = []
        self.right = 0

    def launch(self, ring: Ring, slot: int, index: int) -> None:
        buffer = ring.slots[slot].buffer[: self.made[index].layout.nbytes]

        def compare() -> None:
            found = buffer.unique().tolist()
            self.right += found == [index + 1]
            if found != [index + 1]:
                self.wrong.append((index, found))

        self.lane.compute(compare)


def race(kind: type[Ring], late: str, units: int = 5, slots: int = 3) -> Kernels:
    """Four tokens through a ring of that class on a lane where `late` is late."""
    made, lane = slabs(units), DeferredLane(late)
    ring, kernels = kind(made, slots, CPU, lane), Kernels(lane, made)
    for slot in ring.slots:
        slot.buffer.fill_(0xEE)
    for index in list(range(units)) * 4:
        slot = ring.take(index)
        kernels.launch(ring, slot, index)
        ring.give(slot)
    lane.finish()
    return kernels


class WithoutWait(Ring):
    """Does not wait for the copy before the unit runs."""

    def take(self, index: int) -> int:
        lane: Any = self._lane
        lane.wait = lambda ticket: None
        try:
            return super().take(index)
        finally:
            del lane.wait


class WithoutAfter(Ring):
    """Does not wait for the unit before the slot is filled again."""

    def _fill(self, slot: Any, index: int) -> None:
        lane: Any = self._lane
        copy = lane.copy
        lane.copy = lambda after, work: copy(None, work)
        try:
            super()._fill(slot, index)
        finally:
            del lane.copy


class WithoutMark(Ring):
    """Keeps the mark of an earlier use."""

    def give(self, number: int) -> None:
        lane: Any = self._lane
        before = self.slots[number].used
        lane.mark = lambda: before  # an earlier use's
        try:
            super().give(number)
        finally:
            del lane.mark


@pytest.mark.parametrize("late", ["copy", "compute"])
@pytest.mark.parametrize(("units", "slots"), [(5, 3), (4, 1), (7, 4), (3, 2), (6, 3)])
def test_every_unit_runs_on_its_own_bytes_however_late(units: int, slots: int, late: str) -> None:
    kernels = race(Ring, late, units, slots)
    assert (kernels.wrong, kernels.right) == ([], 4 * units)


@pytest.mark.parametrize(
    ("kind", "late"),
    [(WithoutWait, "copy"), (WithoutAfter, "compute"), (WithoutMark, "compute")],
)
def test_a_ring_that_lacks_an_event_is_caught(kind: type[Ring], late: str) -> None:
    assert race(kind, late).wrong


def test_a_new_slot_waits_for_whoever_had_its_memory_before() -> None:
    """The allocator hands out memory that queued kernels of others still read."""
    made, lane = slabs(3), DeferredLane("compute")
    seen: list[int] = []
    lane.compute(lambda: seen.extend(ring.slots[0].buffer.unique().tolist()))
    ring = Ring(made, 2, CPU, lane)
    ring.slots[0].buffer.fill_(0xEE)
    ring.take(0)
    lane.finish()
    assert seen == [0xEE]


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, int, list[int | None]]:
    """Units, slots, and calls: a number enters that unit, None leaves the innermost one."""
    units, slots = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    drawn = draw(st.lists(st.one_of(st.none(), st.integers(0, units - 1)), max_size=40))
    return units, slots, drawn


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls(), st.sampled_from(["copy", "compute", "neither"]), st.booleans())
def test_any_order_of_units_runs_on_the_right_bytes(
    drawn: tuple[int, int, list[int | None]], late: str, poison: bool
) -> None:
    units, slots, order = drawn
    made, lane = slabs(units), DeferredLane("copy" if late == "neither" else late)
    poison = poison and late != "compute"  # a host-side fill would be ahead of the computation
    ring = Ring(made, slots, CPU, HostLane() if late == "neither" else lane, poison=poison)
    kernels = Kernels(lane, made)
    inside: list[tuple[int, int]] = []
    for index in order:
        if index is None:
            if inside:
                slot, entered = inside.pop()
                kernels.launch(ring, slot, entered)  # still its own after whatever was nested
                ring.give(slot)
        elif len(inside) == len(ring.slots):
            with pytest.raises(RunningFault, match="slots are in use"):
                ring.take(index)
        else:
            slot = ring.take(index)
            kernels.launch(ring, slot, index)
            inside.append((slot, index))
    lane.finish()
    assert kernels.wrong == []
    assert {slot for slot, _ in inside} == {n for n, slot in enumerate(ring.slots) if slot.busy}


class Traced(Ring):
    """A ring whose copies are told, and made by whoever listens."""

    told: list[tuple[str, int, int]]

    def _fill(self, slot: Any, index: int) -> None:
        self.told.append(("copy", self.slots.index(slot), index))
        slot.holds = index

    def token(self, order: Sequence[int]) -> list[tuple[str, int, int]]:
        self.told = []
        for index in order:
            slot = self.take(index)
            self.told.append(("use", slot, index))
            self.give(slot)
        return self.told


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(1, 5),
    st.lists(st.sampled_from(["recorded", "eager", "partly", "lost"]), max_size=30),
)
def test_a_recorded_token_finds_the_slots_as_it_was_recorded(
    units: int, slots: int, calls: list[str]
) -> None:
    """Recording makes no copy; what is replayed later must find what it counted on."""
    ring = Traced(slabs(units), slots, CPU)
    lie: list[int | None] = [None] * len(ring.slots)
    graphs: dict[Any, Any] = {}

    def execute(done: Sequence[tuple[str, int, int]]) -> None:
        for what, slot, index in done:
            if what == "copy":
                lie[slot] = index
            assert lie[slot] == index

    def recorded() -> None:
        key = ring.ready()
        if key not in graphs:
            ring.told = []
            with ring.recorded():
                before = ring.told
                done = [*before, *ring.token(range(units))]
            graphs[key] = done, ring.held
            ring.lose()
        done, held = graphs[key]
        execute(done)
        ring.turned(held)

    for call in calls:
        if call == "lost":
            ring.lose()
        elif call == "recorded":
            recorded()
        else:
            execute(ring.token(range(units if call == "eager" else units // 2)))
    execute(ring.token(range(units)))
    graphs.clear()
    for _ in range(4 * slots):
        recorded()
    assert len(graphs) <= len(ring.slots)
