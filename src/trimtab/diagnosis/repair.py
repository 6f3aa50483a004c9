"""A device map that does what a faulty one was meant to do."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trimtab.devicemap import (
    CPU,
    DISK,
    GPU,
    KINDRED,
    known_names,
    most_specific,
    nearest_names,
    real_name,
    tier_of,
)
from trimtab.diagnosis.check import Look, look
from trimtab.diagnosis.finding import Finding
from trimtab.errors import PlacementFault, TrimtabError
from trimtab.fit import three
from trimtab.plan import RESIDENT

if TYPE_CHECKING:
    from trimtab.outline import Outline

WRAPPERS: Final = ("base_model", "module", "_orig_mod", "pretrained_model")
"""What PEFT, data parallelism, `torch.compile` and TRL put before a model's names."""

_VALUES: Final[Mapping[str, int | str]] = {GPU: 0, CPU: "cpu", DISK: "disk"}

_TRUNKS: Final = next(group for group in KINDRED if "language_model" in group)
"""Names of what holds a language model's layers; one class has such a level where another has none.
"""

Map = dict[str, int | str]


@dataclass(frozen=True)
class Repair:
    """A corrected map, in Hugging Face's words, for trimtab and for the stock stack.

    `changes` say in words what was changed; where there are none, the map was right and is as it
    was. Else each parameter and each buffer is covered, and no key of `device_map` covers what
    another one names. `left` are the problems that no map mends.
    """

    device_map: Map
    changes: tuple[str, ...]
    left: tuple[Finding, ...]


def repair(
    model: str | Path,
    device_map: Mapping[str, Any],
    adapters: Any = None,
    **asked: Any,
) -> Repair | None:
    """Corrects a device map; nothing is loaded.

    Keys that match nothing become the names that they can be meant for, or are left out; prefixes
    of wrappers go; a value that names no tier becomes one; what has no device goes where the rest
    of its layer is, else where the model runs; a buffer goes with its module. Where the budget does
    not hold what the map asks for and a plan without a map fits, the map is that plan's.

    Args:
        model: as for `trimtab.check`, like the arguments that follow the map.
        device_map: the map.

    Returns:
        None, if the names of the model's modules cannot be had; `check` says why.

    Example:
        >>> repair("./llama", {"transformer.h.2": "cpu", "": 0}).device_map["model.layers.2"]
        'cpu'
    """
    return mend(look(model, device_map, adapters, **asked), model, device_map, adapters, **asked)


def mend(
    here: Look,
    model: str | Path,
    device_map: Mapping[str, Any],
    adapters: Any = None,
    **asked: Any,
) -> Repair | None:
    """`repair`, where `here` is what `look` found with these arguments."""
    if here.outline is None:
        return None
    reach = [one.what for one in here.findings if one.code == "TT223"]
    fixed, changes = corrected(device_map, here.outline, here.runs or GPU, reach)
    then = look(model, fixed, adapters, **asked) if changes else here
    own = _own_map(then)
    if own is not None:
        changes.append("the budget does not hold what the map asks for: this is the plan's own map")
        fixed, then = own, look(model, own, adapters, **asked)
    left = tuple(one for one in then.findings if one.severity != "note")
    return Repair(fixed, tuple(changes), left)


def _own_map(here: Look) -> Map | None:
    """The map of the plan that is made without one, if that fits and the map does not."""
    if not (here.outline and here.plan and any(one.code == "TT401" for one in here.findings)):
        return None
    try:
        made = here.plan(None)
    except TrimtabError:
        return None
    away = {unit.name: unit.rests for unit in made.units if unit.mode != RESIDENT}
    runs = made.budget.runs
    return _exact(_leaves(here.outline, {"": runs, **away}, runs)[0])


def corrected(
    device_map: Mapping[str, Any], outline: Outline, runs: str = GPU, reach: Sequence[str] = ()
) -> tuple[Map, list[str]]:
    """The map for a model that runs on `runs`, and what was changed; the budget aside.

    `reach` is what the stock loader makes of it (TT223): that is a change, too.
    """
    names = known_names(outline)
    said: dict[str, list[str]] = {}
    tiers: dict[str, str] = {}
    # Keys that are real come last: they win.
    for key, value in sorted(device_map.items(), key=lambda item: item[0] in names):
        meant = [key] if key in names else _meant(key, names - outline.buffers)
        if not meant:
            said.setdefault("left out, since nothing is like it", []).append(repr(key))
        elif meant != [key]:
            said.setdefault(f"read as {three(map(repr, meant))}", []).append(repr(key))
        if meant:
            tier, why = _tier(key, value, runs)
            if why:
                said.setdefault(f"mapped to cpu, since {why}", []).append(repr(key))
            tiers |= dict.fromkeys((one for one in meant if one not in outline.buffers), tier)
    leaves, lost = _leaves(outline, tiers, runs)
    for tier, some in lost.items():
        said[f"mapped to {_VALUES[tier]}, since no key covers it"] = some
    changes = [*(f"{three(names)}: {change}" for change, names in said.items()), *reach]
    if not changes:
        return {key: _VALUES[tier_of(key, value)] for key, value in device_map.items()}, []
    return _exact(leaves), changes


def _tier(key: str, value: Any, runs: str) -> tuple[str, str]:
    """The tier that a value names, or else RAM, which every placement has, and why."""
    try:
        tier = tier_of(key, value)
    except PlacementFault as fault:
        second = fault.code == "TT204"
        return CPU, f"{value!r} is a second GPU" if second else f"{value!r} names no tier"
    return (CPU, "no GPU runs") if tier == GPU and runs == CPU else (tier, "")


# ------------------------------------------------------------------------------------------- keys


def _meant(key: str, names: frozenset[str]) -> list[str]:
    """The real names that a key most likely means; none, if nothing is like it."""
    real = real_name(key, names)
    if real is not None:
        return [real]
    if set(key) & set("*?["):
        level = [name for name in names if name.count(".") == key.count(".")]
        return sorted(fnmatch.filter(level, key))
    near = _walked(key, names) or nearest_names(key, names)[:1]
    return [one for one in near if re.findall(r"\d+", one) == re.findall(r"\d+", key)]


def _walked(key: str, names: frozenset[str]) -> list[str]:
    """Modules on the same path in this class, part by part: by name, by role, a level between."""
    below: dict[str, list[str]] = {}
    for name in sorted(names):
        below.setdefault(name.rpartition(".")[0], []).append(name)

    def children(parent: str, part: str) -> list[str]:
        near = [one for one in below.get(parent, ()) if one]
        deeper = [c for one in near if _last(one) in _TRUNKS for c in below.get(one, ())]
        roles = next((group for group in KINDRED if part in group), frozenset((part,)))
        for level in (near, deeper):
            for wanted in ({part}, roles):
                if found := [one for one in level if _last(one) in wanted]:
                    return found
        return []

    parts = [part for part in key.split(".") if part not in WRAPPERS and part != "base_layer"]
    while parts:
        here = [""]
        for part in parts:
            here = [child for parent in here for child in children(parent, part)]
        if here or parts[0] not in _TRUNKS:
            return here
        parts = parts[1:]  # a level that this class does not have
    return []


def _last(name: str) -> str:
    return name.rpartition(".")[2]


# ----------------------------------------------------------------------------------------- leaves


def _leaves(
    outline: Outline, tiers: Mapping[str, str], runs: str
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The tier of each parameter and buffer, and by tier those that no key covers."""
    found = {one.name: most_specific(one.name, tiers) for one in outline.weights}
    found |= {alias: found[owner] for alias, owner in outline.ties}
    found |= {name: most_specific(name, tiers) for name in outline.buffers}
    votes: dict[str, Counter[str]] = {}
    for name, tier in found.items():
        if tier is not None:
            for above in _above(name):
                votes.setdefault(above, Counter())[tier] += 1
    placed = {}
    lost: dict[str, list[str]] = {}
    for name, tier in found.items():
        if tier is None:
            counted = next((votes[one] for one in _above(name) if one in votes), None)
            tier = counted.most_common(1)[0][0] if counted else runs
            lost.setdefault(tier, []).append(name)
        placed[name] = tier
    return placed, lost


def _above(name: str) -> Iterator[str]:
    """The modules that a name lies in, from the inside out; the last one is its layer."""
    while re.search(r"\.\d+\.", name):
        name = name.rpartition(".")[0]
        yield name


def _exact(leaves: Mapping[str, str]) -> Map:
    """The shortest map in which no key covers what another one names."""
    made: Map = {}

    def put(prefix: str, inside: list[str]) -> None:
        tiers = {leaves[name] for name in inside}
        if len(tiers) == 1:
            made[prefix] = _VALUES[tiers.pop()]
            return
        start = len(prefix) + 1 if prefix else 0
        groups: dict[str, list[str]] = {}
        for name in inside:
            groups.setdefault(name[:start] + name[start:].partition(".")[0], []).append(name)
        for group, names in groups.items():
            put(group, names)

    put("", list(leaves))
    return made
