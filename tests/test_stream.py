"""The ring: what it fetches and when, in how many bytes, and that no event of it is missing."""

from __future__ import annotations

import itertools

import pytest
import torch

import tiny
from rings import CPU, holds, run, slabs
from trimtab.errors import RunningFault
from trimtab.fakes import DeferredLane
from trimtab.lanes import CudaLane, HostLane, lane_for
from trimtab.plan import WeightSpec
from trimtab.store import MemorySlab, SlabLayout
from trimtab.stream import Ring

# ------------------------------------------------------------------------------ what is fetched


def test_slabs_come_ahead_of_their_use_and_wrap_over_the_token() -> None:
    log: list[object] = []
    made = slabs(5, log)
    ring = Ring(made, 3, CPU)
    assert log == []
    slot = ring.take(0)
    assert log == [0, 1, 2]
    ring.give(slot)
    assert log == [0, 1, 2, 3]
    run(ring, made, [1, 2])
    # While unit 2 runs, the first of the next token come already.
    assert log == [0, 1, 2, 3, 4, 0]
    run(ring, made, [3, 4, *list(range(5)) * 3])
    assert log[:15] == [0, 1, 2, 3, 4] * 3
    assert [one.fetches for one in made] == [5, 5, 5, 4, 4]


@pytest.mark.parametrize(("units", "slots"), [(5, 3), (7, 4), (6, 3), (4, 1), (2, 1)])
def test_each_slab_is_fetched_once_a_token(units: int, slots: int) -> None:
    log: list[object] = []
    made = slabs(units, log)
    run(Ring(made, slots, CPU), made, list(range(units)) * 4)
    assert log == [index % units for index in range(4 * units + slots)]


@pytest.mark.parametrize("units", [1, 2, 3])
def test_slots_for_all_units_fetch_each_once_for_good(units: int) -> None:
    made = slabs(units)
    ring = Ring(made, 5, CPU)
    assert len(ring.slots) == units
    run(ring, made, list(range(units)) * 3)
    assert [one.fetches for one in made] == [1] * units


@pytest.mark.parametrize(("units", "slots"), [(5, 2), (5, 3), (6, 3), (7, 4)])
def test_a_recorded_token_ends_with_a_slot_that_the_next_one_fills_first(
    units: int, slots: int
) -> None:
    log: list[object] = []
    made = slabs(units, log)
    ring = Ring(made, slots, CPU)
    run(ring, made, range(units))
    assert sorted(ring.held, key=str) == list(range(slots))
    # The one that is needed last, and only once.
    assert ring.ready() == ring.ready()
    assert {one for one in ring.held if one is not None} == set(range(slots - 1))
    for _ in range(3):
        log.clear()
        with ring.recorded():
            assert log == [slots - 1]
            run(ring, made, range(units))
        assert log == [(slots - 1 + n) % units for n in range(units)]
        assert ring.ready() == ring.held
        assert {one for one in ring.held if one is not None} == set(range(slots - 1))
    run(ring, made, [*range(units), 2, 0])


@pytest.mark.parametrize(("units", "slots"), [(3, 3), (2, 2), (4, 1)])
def test_it_leaves_none_where_it_has_one_or_enough(units: int, slots: int) -> None:
    log: list[object] = []
    made = slabs(units, log)
    ring = Ring(made, slots, CPU)
    for _ in range(3):
        with ring.recorded():
            run(ring, made, range(units))
        assert None not in ring.ready()
    assert len(log) == (units if slots == units else 3 * units + slots)


def test_out_of_order_skipped_and_repeated_units_have_their_bytes() -> None:
    made = slabs(7)
    run(Ring(made, 3, CPU), made, [0, 1, 2, 1, 4, 0, 6, 6, 6, 5, 3, 0, 2, 2])


def test_an_unexpected_unit_takes_the_slot_that_is_needed_last() -> None:
    log: list[object] = []
    made = slabs(6, log)
    ring = Ring(made, 3, CPU)
    run(ring, made, [0])
    assert {slot.holds for slot in ring.slots} == {1, 2, 3}
    slot = ring.take(5)
    assert ring.slots[slot].holds == 5
    # 3 went for 5; then 2 for 0, which is needed before it, now that 5 runs.
    assert {one.holds for one in ring.slots} == {5, 0, 1}


def test_units_may_be_nested_as_deep_as_there_are_slots() -> None:
    made = slabs(6)
    ring = Ring(made, 3, CPU)
    taken = [ring.take(index) for index in (0, 4, 2)]
    assert sorted(taken) == [0, 1, 2]
    assert all(holds(ring, slot, made[index]) for slot, index in zip(taken, (0, 4, 2), strict=True))
    with pytest.raises(RunningFault, match="3 slots are in use and one more is needed") as caught:
        ring.take(5)
    assert caught.value.code == "TT607"
    for slot in taken:
        ring.give(slot)
    run(ring, made, range(6))


def test_the_same_unit_twice_at_a_time_has_two_slots() -> None:
    made = slabs(4)
    ring = Ring(made, 3, CPU)
    first, second = ring.take(1), ring.take(1)
    assert first != second
    assert holds(ring, first, made[1])
    assert holds(ring, second, made[1])


# ----------------------------------------------------------------------------------- its memory


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize(("units", "slots", "made"), [(5, 3, 3), (2, 3, 2), (0, 3, 0), (4, 1, 1)])
def test_it_has_slots_of_the_largest_slab(units: int, slots: int, made: int, device: str) -> None:
    ring = Ring(slabs(units), slots, torch.device(device))
    largest = max((slab.layout.nbytes for slab in slabs(units)), default=0)
    assert [slot.buffer.numel() for slot in ring.slots] == [largest] * made
    assert ring.nbytes == made * largest
    assert {slot.buffer.device.type for slot in ring.slots} <= {device}
    ring.close()
    assert ring.nbytes == 0


@pytest.mark.gpu
def test_peak_memory_is_slots_times_slab() -> None:
    layout = SlabLayout.of([WeightSpec("weight", (1024, 1024), "float32")])
    made = [MemorySlab(layout, pin=True) for _ in range(6)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ring = Ring(made, 4, torch.device("cuda", 0))
    for index in list(range(6)) * 2:
        ring.give(ring.take(index))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before == 4 * layout.nbytes == ring.nbytes


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_slots_made_in_inference_mode_can_be_written_to_outside(device: str) -> None:
    made = slabs(3)
    with torch.inference_mode():
        ring = Ring(made, 2, torch.device(device), poison=True)
        ring.give(ring.take(0))
    ring.give(ring.take(1))
    assert not any(slot.buffer.is_inference() for slot in ring.slots)


def test_a_poisoned_slot_shows_a_late_read_and_is_filled_again() -> None:
    made = slabs(3)
    ring = Ring(made, 4, CPU, poison=True)
    assert len(ring.slots) == 4  # coprime to the units, as asked for
    slot = ring.take(0)
    view = ring.slots[slot].buffer
    ring._slabs = made[:1]  # nothing else would take the slot
    ring.give(slot)
    assert view.unique().tolist() == [0xFF]
    assert ring.slots[slot].holds is None
    ring._slabs = made
    run(ring, made, [0, 1, 2] * 4)


# ----------------------------------------------------------------------------------- its faults


def test_a_fetch_that_fails_costs_no_slot() -> None:
    made = slabs(5)
    ring = Ring(made, 3, CPU)
    for number in (0, 1, 2):
        made[number].fault = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            ring.take(0)
        assert [slot.busy for slot in ring.slots] == [False] * 3
        made[number].fault = None
    made[4].fault = OSError("gone")
    run(ring, made, [0])
    slot = ring.take(1)
    with pytest.raises(OSError, match="gone"):
        ring.give(slot)
    assert [slot.busy for slot in ring.slots] == [False] * 3
    made[4].fault = None
    run(ring, made, list(range(5)) * 2)


def test_a_forgotten_slot_is_free_again() -> None:
    made = slabs(4)
    ring = Ring(made, 2, CPU)
    ring.take(0), ring.take(2)
    ring.forget(0)
    assert [(slot.busy, slot.holds) for slot in ring.slots] == [(False, None), (True, 2)]
    ring.forget(2)
    run(ring, made, [3, 0, 1, 2])


# --------------------------------------------------------------------------------------- the lanes


def test_the_fake_lane_says_when_the_two_wait_for_each_other() -> None:
    lane = DeferredLane("compute")
    never = type(lane.mark())()
    lane.wait(lane.copy(never, lambda: None))
    with pytest.raises(RuntimeError, match="wait for each other"):
        lane.finish()


def test_a_cpu_copies_at_once() -> None:
    done: list[int] = []
    lane = lane_for(CPU)
    assert isinstance(lane, HostLane)
    lane.wait(lane.copy(lane.mark(), lambda: done.append(1)))
    assert done == [1]


@pytest.mark.gpu
def test_a_gpu_copies_beside_the_computation_and_in_the_order_of_events() -> None:
    device = torch.device("cuda", 0)
    lane = lane_for(device)
    assert isinstance(lane, CudaLane)
    layout = SlabLayout.of([WeightSpec("weight", (1 << 22,), "uint8")])
    made = [MemorySlab(layout, pin=True) for _ in range(4)]
    for number, slab in enumerate(made):
        slab.put("weight", "data", torch.full((1 << 22,), number + 1, dtype=torch.uint8))
    ring = Ring(made, 3, device, lane)
    sums = []
    for _, index in itertools.product(range(5), range(4)):
        slot = ring.take(index)
        torch.cuda._sleep(2_000_000)  # the host is far ahead of the computation
        sums.append(ring.slots[slot].buffer.sum(dtype=torch.int64))
        ring.give(slot)
    assert [int(one) >> 22 for one in sums] == [1, 2, 3, 4] * 5
