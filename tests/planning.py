"""Plans for tests, on a machine that is told; `from planning import planned`."""

from __future__ import annotations

import functools
from typing import Any

import tiny
from trimtab.checkpoint import open_checkpoint
from trimtab.hardware import Hardware
from trimtab.memory import Budget, GiB
from trimtab.outline import CacheLayer, Outline, build_outline
from trimtab.plan import PlacedUnit, Plan, Unit, WeightSpec
from trimtab.planner import make_plan

MACHINE = Hardware((), 64 * GiB, 32 * GiB, GiB, 12.0, 300.0)
ROOMY = Budget("gpu:0", 8 * GiB, 8 * GiB, 8 * GiB)


@functools.cache
def outline(name: str, quant: str = "none") -> Outline:
    return build_outline(open_checkpoint(tiny.checkpoint(name)), quant)


def planned(found: Outline | str, budget: Budget = ROOMY, **options: Any) -> Plan:
    found = outline(found) if isinstance(found, str) else found
    options = {"context": 32, **options}
    return make_plan(found, budget, hardware=MACHINE, **options)


def needed(found: Outline, runs: str = "gpu:0", **options: Any) -> int:
    """Bytes on the device that runs when everything is resident."""
    roomy = ROOMY if runs != "cpu" else Budget("cpu", 0, 8 * GiB, 8 * GiB)
    return planned(found, roomy, **options).totals[runs]


def modes(made: Plan) -> dict[str, str]:
    return {unit.name: unit.mode for unit in made.units}


def unit(made: Plan, name: str) -> PlacedUnit:
    return next(one for one in made.units if one.name == name)


def books_balance(made: Plan) -> None:
    """The totals are the sum of what is said of the units and of the costs."""
    for tier, total in made.totals.items():
        resting = sum(one.moving_bytes for one in made.units if one.rests == tier)
        staging = 0
        if tier == made.runs:
            resting = sum(one.staying_bytes for one in made.units) + sum(made.costs.values())
        elif tier == "cpu":
            staging = 2 * max((u.moving_bytes for u in made.units if u.rests == "disk"), default=0)
        assert total == resting + staging


def many_layers(count: int) -> Outline:
    layers = tuple(
        Unit(
            f"layers.{at}", "layer", (WeightSpec(f"layers.{at}.w", (256, 256), "bfloat16", "nf4"),)
        )
        for at in range(count)
    )
    units = (*layers, Unit("", "rest", (WeightSpec("norm.weight", (64,), "bfloat16"),)))
    cache = (CacheLayer(1, 16, None, False),) * count
    nothing: frozenset[str] = frozenset()
    return Outline("A", units, (), cache, 100, 64, "bfloat16", "nf4", nothing, nothing)
