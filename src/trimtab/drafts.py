"""A draft of a plan: which units are away from the device that runs, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trimtab import costs
from trimtab.formats import ALIGNMENT, by_name, moving_bytes, resident_bytes, widened_bytes
from trimtab.hardware import ALLOCATOR, CAPTURE, CUDA_CONTEXT, INT8_CONTEXT, Hardware
from trimtab.memory import Budget, align
from trimtab.outline import Outline
from trimtab.plan import IDLE, LOOKED_UP, STREAMED, PlannedAdapter, Unit, WeightSpec

SLOTS = 2
"""Of the ring: one computes while the other is filled. A third gains nothing on an H200 (all or
half of a Llama, captured), and is worth a layer that need not move."""

STAGING = 2
"""Pinned buffers through which a GPU reads the disk, each of the largest unit that rests there."""


@dataclass(frozen=True)
class Away:
    """A unit that does not rest where it runs: which of its weights, and for a map, where.

    `nbytes` are those of its slab, `room` those of the memory that it is brought to, `released`
    what leaves the device that runs.
    """

    mode: str
    weights: tuple[WeightSpec, ...]
    nbytes: int
    room: int
    released: int
    rests: str | None = None


def move(
    unit: Unit, mode: str, weights: Sequence[WeightSpec] | None = None, rests: str | None = None
) -> Away:
    """The unit away, with these of its weights or with all that may leave."""
    gone = tuple(one for one in unit.weights if one.moves) if weights is None else tuple(weights)
    nbytes = slab_bytes(gone)
    room = nbytes + sum(widened_bytes(*_stored(one)) for one in gone)
    return Away(mode, gone, nbytes, room, _here(gone), rests)


def slab_bytes(weights: Sequence[WeightSpec]) -> int:
    """Bytes of these weights in one aligned slab."""
    return sum(moving_bytes(*_stored(one)) for one in weights)


def _stored(weight: WeightSpec) -> tuple[str, tuple[int, ...], str, str | None]:
    return weight.storage, weight.shape, weight.dtype, weight.quantized_from


def _here(weights: Sequence[WeightSpec]) -> int:
    """Bytes of these weights on the device that runs."""
    own = sum(resident_bytes(one.storage, one.shape, one.dtype) for one in weights)
    return own + _code_bytes(weights)


def _code_bytes(weights: Sequence[WeightSpec]) -> int:
    """Code books of resident weights: bitsandbytes gives each its own."""
    return sum(align(by_name(one.storage).constant_bytes(one.shape), ALIGNMENT) for one in weights)


@dataclass(frozen=True)
class Facts:
    """Everything that a decision depends on."""

    outline: Outline
    budget: Budget
    hardware: Hardware
    adapters: tuple[PlannedAdapter, ...]
    context: int
    batch: int
    modalities: tuple[str, ...]
    adapter_memory: int | None = None

    @property
    def on_gpu(self) -> bool:
        return self.budget.runs != "cpu"

    def needed(self, unit: Unit) -> bool:
        """Whether a prompt of the modalities asked for uses the unit."""
        return not unit.needs or any(one in self.modalities for one in unit.needs)

    @property
    def adapters_here(self) -> int:
        """Bytes of adapters on the device that runs: within the cap, and one of them at least."""
        sizes = [one.nbytes for one in self.adapters]
        if self.adapter_memory is None or not self.on_gpu:
            return sum(sizes)
        return max([min(self.adapter_memory, sum(sizes)), *sizes])

    @property
    def adapters_resting(self) -> int:
        """Bytes of host memory for adapters: each that has rested keeps its place there."""
        total = sum(one.nbytes for one in self.adapters)
        return total if self.adapters_here < total else 0

    @cached_property
    def resident(self) -> Mapping[str, int]:
        """Bytes of each unit when all of it is on the device that runs."""
        return {unit.name: _here(unit.weights) + unit.buffer_bytes for unit in self.outline.units}

    @cached_property
    def shared_codes(self) -> int:
        """One copy of the code books for all that is away; booked even when nothing is."""
        return max((_code_bytes((one,)) for one in self.outline.weights), default=0)

    @cached_property
    def loading(self) -> Mapping[bool, Mapping[str, int]]:
        """The loader's transient for each unit, by whether the unit stays."""
        return {
            stays: {
                unit.name: costs.loading(unit.weights, resident=stays)
                for unit in self.outline.units
            }
            for stays in (True, False)
        }

    @cached_property
    def running(self) -> Mapping[str, int]:
        """What running holds beside the weights, whatever is away."""
        outline = self.outline
        prefill = costs.activations(outline, self.context, self.batch)
        decoded = costs.decoding(outline.weights, self.budget.runs)
        cast = costs.adapting(outline, self.context, self.batch) if self.adapters else 0
        # int8 products cannot be captured, and have kernels of their own.
        eight = outline.quant == "int8"
        context = CUDA_CONTEXT + (INT8_CONTEXT if eight else 0)
        allocator = ALLOCATOR + (0 if eight else CAPTURE)
        return {
            "kv_cache": costs.kv_cache(outline, self.context, self.batch),
            "logits": costs.logits(outline, self.batch),
            "adapters": self.adapters_here,
            "context": context if self.on_gpu else 0,
            "allocator": allocator if self.on_gpu else 0,
            "transient": prefill + max(decoded, cast),
        }


@dataclass(frozen=True)
class Draft:
    """A choice and its price: `missing` are bytes that find no place in RAM or on the disk."""

    away: Mapping[str, Away]
    rests: Mapping[str, str]
    costs: Mapping[str, int]
    totals: Mapping[str, int]
    slots: int
    slot_bytes: int
    streamed: int
    missing: int

    def over(self, budget: Budget) -> int:
        """Bytes above the budget of the device that runs."""
        return max(0, self.totals[budget.runs] - budget.running)

    def fits(self, budget: Budget) -> bool:
        return self.over(budget) == 0 and self.missing == 0


def price(facts: Facts, away: Mapping[str, Away]) -> Draft:
    """What a choice costs on each tier."""
    budget = facts.budget
    ring = [one for one in away.values() if one.mode == STREAMED]
    slots = min(SLOTS, len(ring))
    slot_bytes = max((one.room for one in ring), default=0)
    beside = _beside(facts, away, slots * slot_bytes)
    held = sum(facts.resident.values()) - sum(one.released for one in away.values())
    rests, used, missing = _settle(facts, away)
    totals = {"cpu": used["cpu"], "disk": used["disk"]}
    totals[budget.runs] = (
        totals.get(budget.runs, 0) + held + facts.shared_codes + sum(beside.values())
    )
    streamed = sum(one.nbytes for one in ring)
    return Draft(away, rests, beside, totals, slots, slot_bytes, streamed, missing)


def _beside(facts: Facts, away: Mapping[str, Away], ring: int) -> dict[str, int]:
    """The costs beside the weights, on the device that runs.

    While loading there is no cache yet, no logits, no adapter and no slot: of what the loader
    needs, only what is above these and the running transient is counted.
    """
    called = [
        away[unit.name].room
        for unit in facts.outline.units
        if unit.name in away and away[unit.name].mode == IDLE and facts.needed(unit)
    ]
    # With a GPU, a looked-up table is loaded straight into RAM.
    loading = max(
        facts.loading[unit.name not in away][unit.name]
        for unit in facts.outline.units
        if not (facts.on_gpu and unit.name in away and away[unit.name].mode == LOOKED_UP)
    )
    running = facts.running
    later = running["kv_cache"] + running["logits"] + running["adapters"] + ring
    transient = max(running["transient"], loading - later)
    return {**running, "transient": transient, "slots": ring, "bring_in": max(called, default=0)}


def _settle(facts: Facts, away: Mapping[str, Away]) -> tuple[dict[str, str], dict[str, int], int]:
    """Where what is away rests, the bytes on each tier, and those that find no place.

    RAM while it lasts, looked-up tables first, then what is streamed; once something does not fit,
    all that follows goes to the disk.
    """
    budget = facts.budget
    order = sorted(away, key=lambda name: (LOOKED_UP, STREAMED, IDLE).index(away[name].mode))
    if not facts.on_gpu:
        used = {"cpu": 0, "disk": sum(one.nbytes for one in away.values())}
        return dict.fromkeys(order, "disk"), used, max(0, used["disk"] - budget.disk)
    resting = facts.adapters_resting
    rests = _fill(order, away, budget.cpu - resting)
    if "disk" in rests.values():
        largest = max(one.nbytes for one in away.values() if one.mode != LOOKED_UP)
        rests = _fill(order, away, budget.cpu - resting - STAGING * largest)
    stored = [away[name].nbytes for name in order if rests[name] == "disk"]
    held = sum(away[name].nbytes for name in order if rests[name] == "cpu")
    used = {"cpu": held + resting + STAGING * max(stored, default=0), "disk": sum(stored)}
    missing = max(0, used["cpu"] - budget.cpu) + max(0, used["disk"] - budget.disk)
    return rests, used, missing


def _fill(order: Sequence[str], away: Mapping[str, Away], ram: int) -> dict[str, str]:
    rests = {}
    full = False
    for name in order:
        one = away[name]
        fixed = one.rests or ("cpu" if one.mode == LOOKED_UP else None)
        full = full or (fixed is None and one.nbytes > ram)
        rests[name] = fixed or ("disk" if full else "cpu")
        if rests[name] == "cpu":
            ram -= one.nbytes
    return rests
