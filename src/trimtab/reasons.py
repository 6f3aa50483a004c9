"""Why a unit is where it is, and what would help when it does not fit, in plain words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trimtab.drafts import Draft, Facts, slab_bytes
from trimtab.errors import DoesNotFit
from trimtab.formats import DTYPE_BYTES
from trimtab.memory import format_size
from trimtab.plan import LOOKED_UP, STREAMED, Unit


def reason(facts: Facts, draft: Draft, unit: Unit, mapped: bool) -> str:
    """One sentence, with bytes."""
    away = draft.away.get(unit.name)
    if away is None:
        return _why_resident(facts, draft, unit)
    size = format_size(away.nbytes)
    by_map = "the device map says so; " if mapped else ""
    rests = draft.rests[unit.name]
    if away.mode == STREAMED:
        return f"{by_map}{size} are brought in from {rests} for each forward" + (
            "" if mapped else f": {_gap(facts)}"
        )
    if away.mode == LOOKED_UP:
        row = sum(one.shape[-1] * DTYPE_BYTES[one.dtype] for one in away.weights)
        return (
            f"{by_map}{format_size(row)} of its {size} are read for a token, straight from {rests}"
        )
    return by_map + _why_idle(facts, draft, unit, size)


def _why_resident(facts: Facts, draft: Draft, unit: Unit) -> str:
    if unit.tied_to is not None and not unit.weights:
        return f"no bytes of its own: it multiplies with those of {unit.tied_to}"
    size = format_size(facts.resident[unit.name])
    if unit.kind == "rest":
        return f"{size} of norms, scalars and buffers, used all the time"
    if not draft.away:
        return f"everything fits; {size}"
    if unit.kind == "table" and facts.outline.is_tied(unit):
        return f"{size}; tied to the head, which reads all of it for each token"
    return f"{size}; there is room for it"


def _why_idle(facts: Facts, draft: Draft, unit: Unit, size: str) -> str:
    needs = " and ".join(unit.needs)
    rests = draft.rests[unit.name]
    if facts.needed(unit):
        return f"{size}, brought in from {rests} for a prompt with {needs}; the room is counted"
    # As `rooms.BringIn` has it.
    spare = facts.budget.running - draft.totals[facts.budget.runs] + draft.costs["bring_in"]
    verdict = (
        f"can be brought in all the same, {format_size(spare)} are spare"
        if draft.away[unit.name].room <= spare
        else f"cannot be brought in, only {format_size(spare)} are spare"
    )
    return f"only prompts with {needs} use its {size}, which rest on {rests}; it {verdict}"


def _gap(facts: Facts) -> str:
    total = sum(facts.resident.values()) + sum(facts.running.values())
    return (
        f"all together would take {format_size(total)} "
        f"of the {format_size(facts.budget.running)} on {facts.budget.runs}"
    )


def does_not_fit(facts: Facts, drafts: Sequence[Draft], mapped: bool) -> DoesNotFit:
    """The error TT401 with the shortfall, the smallest possible budget and what would help."""
    budget = facts.budget
    runs = budget.runs
    leanest = min(drafts, key=lambda draft: draft.totals[runs])
    smallest = leanest.totals[runs]
    housed = [draft for draft in drafts if draft.over(budget) == 0]
    who = "as the device map places it, the model" if mapped else "the model"
    if housed:
        best = min(housed, key=lambda draft: draft.missing)
        tier, short = "disk" if runs == "cpu" else "cpu and disk", best.missing
        wanted = sum(one.nbytes for one in best.away.values())
        held = budget.disk if runs == "cpu" else budget.cpu + budget.disk
        what = (
            f"{who} does not fit: {format_size(wanted)} have to rest on {tier}, "
            f"{format_size(short)} more than the {format_size(held)} given"
        )
        helps, why = [f"give {_rest(facts, best)}", *_requantized(facts)], ""
    else:
        tier, short = runs, smallest - budget.running
        what = (
            f"{who} does not fit: the leanest plan needs {format_size(smallest)} on {runs}, "
            f"{format_size(short)} more than the {format_size(budget.running)} given"
        )
        flag = "--cpu" if runs == "cpu" else "--gpu"
        rest = f" and {_rest(facts, leanest)}" if leanest.missing else ""
        helps = [f"give {flag} at least {format_size(smallest, up=True)}{rest}", *_savings(facts)]
        why = _largest(leanest)
    return DoesNotFit(
        "TT401",
        what,
        why=why,
        fix="; ".join(helps),
        shortfall=short,
        tier=tier,
        smallest=smallest,
    )


def _rest(facts: Facts, draft: Draft) -> str:
    """What must be given for what rests elsewhere than where it runs."""
    budget = facts.budget
    if budget.runs == "cpu":
        return f"--disk at least {format_size(budget.disk + draft.missing, up=True)}"
    return f"--cpu or --disk {format_size(draft.missing, up=True)} more"


def _largest(draft: Draft) -> str:
    parts = sorted(draft.costs.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(
        f"{name.replace('_', ' ')} {format_size(size)}" for name, size in parts if size
    )
    return f"beside the weights that stay it holds: {named}"


def _savings(facts: Facts) -> list[str]:
    """What less could be asked for, with the bytes that each saves on the device that runs."""
    found = []
    if facts.context > 512:
        half = dataclasses.replace(facts, context=facts.context // 2)
        found.append((f"a context of {half.context}", _saved(facts, half)))
    if facts.batch > 1:
        found.append(("a batch of 1", _saved(facts, dataclasses.replace(facts, batch=1))))
    if facts.adapters:
        found.append(("no adapter", facts.running["adapters"]))
        one_by_one = dataclasses.replace(facts, adapter_memory=0)
        size = format_size(one_by_one.adapters_here)
        found.append((f"an adapter memory of {size}", _saved(facts, one_by_one)))
    told = [f"{name} saves {format_size(size)}" for name, size in found if size > 0]
    return [*told, *_requantized(facts)]


def _saved(facts: Facts, less: Facts) -> int:
    return sum(facts.running.values()) - sum(less.running.values())


def _requantized(facts: Facts) -> list[str]:
    quant = facts.outline.quant
    better = {"none": "nf4", "int8": "nf4", "nf4": "nf4-dq", "fp4": "fp4-dq"}.get(quant)
    layers = [unit for unit in facts.outline.units if unit.kind == "layer"]
    if better is None or not layers or facts.outline.stored:
        return []
    before = sum(slab_bytes(unit.weights) for unit in layers)
    after = sum(
        slab_bytes(
            [
                dataclasses.replace(one, storage=better)
                if one.storage == quant or (quant == "none" and len(one.shape) == 2)
                else one
                for one in unit.weights
            ]
        )
        for unit in layers
    )
    if after >= before:
        return []
    return [
        f"--quant {better} makes the layers {format_size(after)} instead of {format_size(before)}"
    ]
