"""The decision: a pure function of facts. No files, no devices, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab.devicemap import match_device_map
from trimtab.drafts import Away, Draft, Facts, move, price
from trimtab.errors import EnvironmentFault, RunningFault
from trimtab.forecast import forecast
from trimtab.hardware import Hardware
from trimtab.memory import Budget
from trimtab.outline import Outline
from trimtab.plan import (
    IDLE,
    LOOKED_UP,
    RESIDENT,
    STREAMED,
    PlacedUnit,
    Plan,
    PlannedAdapter,
    Unit,
    WeightSpec,
)
from trimtab.reasons import does_not_fit, reason

MODALITIES = ("text", "image", "video", "audio")


def make_plan(
    outline: Outline,
    budget: Budget,
    *,
    hardware: Hardware,
    model: str = "",
    fingerprint: str = "",
    adapters: Sequence[PlannedAdapter] = (),
    context: int = 4096,
    batch: int = 1,
    modalities: Sequence[str] = ("text",),
    device_map: Mapping[str, Any] | None = None,
    adapter_memory: int | None = None,
) -> Plan:
    """Decides where each unit rests, from facts alone.

    Everything is resident if it fits. Else, in this order: what the modalities do not need is idle;
    tables that are not tied to the head are looked up, the largest first; the towers that are
    needed are brought in only for their prompt; layers are streamed, as few as possible and spread
    evenly, and where that is less, the head and other projections. A device map is obeyed instead.

    Args:
        outline: the model's units.
        budget: bytes on each tier.
        hardware: bandwidths, for the forecast.
        model: what the user calls the model; kept in the plan.
        fingerprint: the checkpoint's; a plan is carried out on no other.
        adapters: their bytes are resident, as far as `adapter_memory` lets them be.
        context: tokens of prompt and answer together, in each sequence.
        batch: sequences at a time.
        modalities: of `text`, `image`, `video`, `audio`: what prompts will hold.
        device_map: a Hugging Face map.
        adapter_memory: the most bytes of adapters on a GPU; the others rest in host memory.

    Raises:
        DoesNotFit: TT401, with `parts["shortfall"]` in bytes, `parts["tier"]`, and
            `parts["smallest"]`, the smallest budget of the device that runs.
        PlacementFault: TT201 to TT204, from the map.
        EnvironmentFault: TT103, the map names a GPU and there is none.
        RunningFault: TT607, a modality that the model does not have, or less than one token or
            sequence.

    Example:
        >>> plan = make_plan(outline, default_budget(hardware, gpu="6GiB"), hardware=hardware)
        >>> plan.totals["gpu:0"] <= plan.budget.gpu
        True
    """
    _check_call(outline, context, batch, modalities)
    facts = Facts(
        outline, budget, hardware, tuple(adapters), context, batch, tuple(modalities),
        adapter_memory,
    )  # fmt: skip
    notes: tuple[str, ...] = ()
    if device_map is None:
        draft = _best(facts)
    else:
        away, notes = _obey(facts, device_map)
        draft = price(facts, away)
        if not draft.fits(budget):
            raise does_not_fit(facts, [draft], mapped=True)
    if adapter_memory is not None and not facts.on_gpu:
        notes += ("adapter memory: a CPU runs, and its memory is where adapters would rest",)
    mapped = device_map is not None
    units = tuple(_placed(facts, draft, unit, mapped) for unit in outline.units)
    return Plan(
        model=model,
        fingerprint=fingerprint,
        architecture=outline.architecture,
        quant=outline.quant,
        dtype=outline.dtype,
        budget=budget,
        context=context,
        batch=batch,
        modalities=facts.modalities,
        units=units,
        adapters=facts.adapters,
        slots=draft.slots,
        slot_bytes=draft.slot_bytes,
        costs=draft.costs,
        totals=draft.totals,
        forecast=forecast(outline, units, budget.runs, hardware),
        notes=notes,
        device_map=None if device_map is None else _plain(device_map),
        adapter_memory=adapter_memory,
    )


def _plain(device_map: Mapping[str, Any]) -> dict[str, int | str]:
    return {
        key: value if isinstance(value, int) else str(value) for key, value in device_map.items()
    }


def _check_call(outline: Outline, context: int, batch: int, modalities: Sequence[str]) -> None:
    if min(context, batch) < 1:
        raise RunningFault(
            "TT607",
            f"no call has {batch} sequences of {context} tokens",
            fix="plan with a batch and a context of 1 or more",
        )
    known = {"text", *(one for unit in outline.units for one in unit.needs)}
    for one in modalities:
        if one not in known:
            raise RunningFault(
                "TT607",
                f"a {outline.architecture} does not take the modality {one!r}",
                fix=f"one of {', '.join(name for name in MODALITIES if name in known)}",
            )


def _placed(facts: Facts, draft: Draft, unit: Unit, mapped: bool) -> PlacedUnit:
    away = draft.away.get(unit.name)
    runs = facts.budget.runs
    staying = facts.resident[unit.name] - (away.released if away else 0)
    return PlacedUnit(
        name=unit.name,
        kind=unit.kind,
        mode=away.mode if away else RESIDENT,
        rests=draft.rests[unit.name] if away else runs,
        runs=runs,
        moving=tuple(one.name for one in away.weights) if away else (),
        moving_bytes=away.nbytes if away else 0,
        # The code books that all parked weights share are booked on the unit of the norms.
        staying_bytes=staying + (facts.shared_codes if unit.kind == "rest" else 0),
        reason=reason(facts, draft, unit, mapped),
    )


# ------------------------------------------------------------------------------------- choices


def _best(facts: Facts) -> Draft:
    """Of all drafts that fit the one that streams least, and of those the first.

    The drafts and their order do not depend on the budget, and a larger budget only adds to those
    that fit: so it never streams more.
    """
    drafts = [price(facts, away) for away in _choices(facts)]
    fitting = [draft for draft in drafts if draft.fits(facts.budget)]
    if not fitting:
        raise does_not_fit(facts, drafts, mapped=False)
    return min(fitting, key=lambda draft: draft.streamed)


def _choices(facts: Facts) -> Iterator[dict[str, Away]]:
    units = facts.outline.units
    towers = [unit for unit in units if unit.kind == "tower"]
    unused = {unit.name: move(unit, IDLE) for unit in towers if not facts.needed(unit)}
    called = {unit.name: move(unit, IDLE) for unit in towers if facts.needed(unit)}
    tables: dict[str, Away] = {}
    yield {}
    yield unused
    for table in _lookable(facts.outline):
        tables = {**tables, table.name: move(table, LOOKED_UP)}
        yield {**unused, **tables}
    layers = {unit.name: move(unit, STREAMED) for unit in units if unit.kind == "layer"}
    outer = {
        unit.name: move(unit, STREAMED)
        for unit in units
        if unit.kind in ("projection", "head") and unit.weights
    }
    for further in ({}, outer):
        # A table can be looked up in RAM only: where that is short, it stays.
        for base in ({**unused, **tables, **called}, {**unused, **called}):
            for count in range(len(layers) + 1):
                chosen = {name: layers[name] for name in _spread(tuple(layers), count)}
                yield {**base, **chosen, **further}


def _lookable(outline: Outline) -> list[Unit]:
    """Tables that no head multiplies with, the largest first."""
    tables = [unit for unit in outline.units if unit.kind == "table" and not outline.is_tied(unit)]
    return sorted(tables, key=lambda unit: -move(unit, LOOKED_UP).nbytes)


def _spread(layers: Sequence[str], count: int) -> list[str]:
    """`count` of the layers, evenly spread: between two streamed ones there is time to fetch."""
    return [layers[(2 * index + 1) * len(layers) // (2 * count)] for index in range(count)]


# ---------------------------------------------------------------------------------- device maps


def _obey(facts: Facts, device_map: Mapping[str, Any]) -> tuple[dict[str, Away], tuple[str, ...]]:
    matched = match_device_map(device_map, facts.outline)
    runs = facts.budget.runs
    if not facts.on_gpu and "gpu:0" in matched.tiers.values():
        raise EnvironmentFault(
            "TT103",
            "the device map names GPU 0, and this plan runs on the CPU",
            why="there is no GPU here, or its budget is 0",
            fix="give the GPU's size (--gpu 8GiB) to plan for another machine; "
            "without a GPU, cpu runs and disk holds: map to these",
        )
    away: dict[str, Away] = {}
    notes = list(matched.notes)
    kept = 0
    for unit in facts.outline.units:
        gone = [one for one in unit.weights if matched.tiers[one.name] != runs]
        kept += sum(not one.moves for one in gone)
        gone = [one for one in gone if one.moves]
        if not gone:
            continue
        tiers = {matched.tiers[one.name] for one in gone}
        why = _stays(facts, unit)
        if why:
            notes.append(f"{unit.name or gone[0].name} stays on {runs}: {why}")
            continue
        found, more = _mapped(facts, unit, gone, tiers)
        away[unit.name] = found
        notes += more
    if kept:
        notes.append(f"{kept} parameters of one dimension (norms, biases) stay on {runs}")
    return away, tuple(notes)


def _stays(facts: Facts, unit: Unit) -> str:
    if unit.kind == "rest":
        return "it belongs to no unit that can be moved"
    if unit.kind == "table" and facts.outline.is_tied(unit):
        return "it is tied to the head, which reads all of it for each token; there is one copy"
    return ""


def _mapped(
    facts: Facts, unit: Unit, gone: Sequence[WeightSpec], tiers: set[str]
) -> tuple[Away, list[str]]:
    mode = {"table": LOOKED_UP, "tower": IDLE}.get(unit.kind, STREAMED)
    rests = "disk" if "disk" in tiers else "cpu"
    notes = []
    if len(tiers) > 1:
        notes.append(f"parts of {unit.name} are mapped to cpu and to disk: all rest on the disk")
    if mode == LOOKED_UP and facts.on_gpu and rests == "disk":
        rests = "cpu"
        notes.append(f"{unit.name} is mapped to the disk and rests on cpu: a GPU reads rows of RAM")
    return move(unit, mode, gone, rests), notes
