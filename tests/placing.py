"""Placements for tests: which parts are away is said by kind; `from placing import ...`.

`placed(folder, quant, away=("half",))` loads through a device map, with poisoned slots whose count
is coprime to the units. `away`: any of `half`, `layers`, `towers`, `tables`, `head`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from trimtab.adapters import read_adapter
from trimtab.api import plan
from trimtab.checkpoint import open_checkpoint
from trimtab.errors import DoesNotFit
from trimtab.outline import Outline, build_outline
from trimtab.place import place
from trimtab.placement import Placement
from trimtab.plan import Plan

AWAY: dict[str, tuple[str, ...]] = {
    "resident": (),
    "towers": ("towers",),
    "table": ("tables",),
    "half": ("half",),
    "all": ("layers", "towers", "tables", "head"),
}
"""The placements of the matrix, by name."""


def device_map(
    outline: Outline, away: Collection[str], device: str, tier: str
) -> dict[str, int | str]:
    """The map that puts these kinds of units to `tier` and the rest where `device` is."""
    owners = {owner for _, owner in outline.ties}
    wanted: list[str] = []
    layers = [unit.name for unit in outline.units if unit.kind == "layer"]
    if "layers" in away:
        wanted += layers
    elif "half" in away:
        wanted += layers[::2]
    for unit in outline.units:
        tied = any(weight.name in owners for weight in unit.weights)
        if f"{unit.kind}s" in away and unit.kind in ("tower", "table") and not tied:
            wanted.append(unit.name)
        if unit.kind == "head" and "head" in away and unit.weights:
            wanted.append(unit.name)
    here: int | str = "cpu" if device == "cpu" else 0
    return {"": here, **dict.fromkeys(wanted, tier)}


def planned(
    folder: Path,
    quant: str = "none",
    away: Collection[str] = (),
    adapters: Mapping[str, Path] | None = None,
    device: str = "cpu",
    tier: str = "",
    **options: Any,
) -> Plan:
    tier = tier or ("disk" if device == "cpu" else "cpu")
    outline = build_outline(open_checkpoint(folder), quant)
    options = {"gpu": None if device == "cpu" else "4GiB", "context": 64, **options}
    return plan(
        folder,
        adapters,
        quant=quant,
        cpu="2GiB",
        disk="2GiB",
        device_map=device_map(outline, away, device, tier),
        **options,
    )


def refused(folder: Path, adapters: Mapping[str, Path], **sizes: Any) -> Mapping[str, Any]:
    """What is said of a budget that is too small for a model in NF4: the `smallest` that is not."""
    with pytest.raises(DoesNotFit) as caught:
        plan(folder, adapters, "nf4", context=64, **sizes)
    return caught.value.parts


def placed(
    folder: Path,
    quant: str = "none",
    away: Collection[str] = (),
    adapters: Mapping[str, Path] | None = None,
    device: str = "cpu",
    tier: str = "",
    *,
    slots: int | None = None,
    poison: bool = True,
    **options: Any,
) -> Placement:
    """A poisoned placement; `options` go to `trimtab.plan`."""
    made = planned(folder, quant, away, adapters, device, tier, **options)
    return carried_out(made, slots=slots, poison=poison)


def carried_out(
    made: Plan, *, slots: int | None = None, poison: bool = True, **options: Any
) -> Placement:
    """A plan, carried out with poisoned slots."""
    streamed = len(made.of_mode("streamed"))
    slots = slots or next(n for n in (3, 4, 5, 7) if math.gcd(n, streamed) == 1 or not streamed)
    checkpoint = open_checkpoint(made.model)
    return place(
        dataclasses.replace(made, slots=slots),
        build_outline(checkpoint, made.quant, made.dtype),
        checkpoint,
        {one.name: read_adapter(one.source) for one in made.adapters},
        poison=poison,
        **options,
    )
