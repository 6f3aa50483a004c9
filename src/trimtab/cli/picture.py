"""A plan as a picture: a strip for each tier, the units in running order, totals, reasons."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trimtab.memory import format_size
from trimtab.plan import IDLE, LOOKED_UP, RESIDENT, STREAMED, PlacedUnit, Plan

if TYPE_CHECKING:
    from rich.console import Console

MODES = (RESIDENT, STREAMED, LOOKED_UP, IDLE)
WORKING = "working memory"
FREE = "free"


@dataclass(frozen=True)
class Brush:
    """How a mode is drawn: without colours, and on terminals without block characters, too."""

    block: str
    ascii: str
    style: str

    def glyph(self, plain: bool) -> str:
        return self.ascii if plain else self.block


BRUSHES = {
    RESIDENT: Brush("█", "#", "green"),
    STREAMED: Brush("▓", ">", "yellow"),
    LOOKED_UP: Brush("▒", ":", "cyan"),
    IDLE: Brush("░", "-", "magenta"),
    WORKING: Brush("=", "=", "blue"),
    FREE: Brush("·", ".", "bright_black"),
}


def draw(plan: Plan, console: Console) -> None:
    """Prints the whole picture."""
    with console.capture() as captured:
        console.print(Text(title(plan), style="bold"))
        asked = f"context {plan.context}, batch {plan.batch}, {' + '.join(plan.modalities)}"
        console.print(f"{plan.quant}, {plan.dtype}; {asked}")
        console.print()
        console.print(strips(plan, console))
        console.print(legend(plan, console))
        console.print(totals(plan))
        console.print(reasons(plan, console))
        for line in (*forecast(plan), *(f"note: {note}" for note in plan.notes)):
            console.print(line)
    # rich fills its lines with spaces.
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def title(plan: Plan) -> str:
    # A long path says less than its end.
    name = plan.model if len(plan.model) <= 40 else re.split(r"[/\\]", plan.model.rstrip("/\\"))[-1]
    return f"{name}  {plan.architecture}"


def strips(plan: Plan, console: Console) -> Table:
    """A strip for each tier: what rests there by mode, to the scale of its budget; the units."""
    sizes = {tier: format_sizes(used, budget_of(plan, tier)) for tier, used in used_tiers(plan)}
    label = max(len("units"), *map(len, sizes))
    width = max(10, min(console.width, 100) - label - max(map(len, sizes.values())) - 4)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=width)
    for tier, size in sizes.items():
        table.add_row(Text(tier), strip(plan, tier, width, plain_of(console)), Text(size))
    table.add_row("units", order(plan, plain_of(console)), f"{len(plan.units)}, in running order")
    return table


def strip(plan: Plan, tier: str, width: int, plain: bool) -> Text:
    """The strip of one tier, `width` characters; whatever is there has one character at least."""
    parts = dict(contents(plan, tier))
    parts[FREE] = max(0, budget_of(plan, tier) - sum(parts.values()))
    drawn = Text()
    for name, length in zip(parts, share(list(parts.values()), width), strict=True):
        drawn.append(BRUSHES[name].glyph(plain) * length, BRUSHES[name].style)
    return drawn


def contents(plan: Plan, tier: str) -> Iterable[tuple[str, int]]:
    """Bytes on a tier by mode, then what the plan counts beside the weights."""
    for mode in MODES:
        units = plan.of_mode(mode)
        moving = sum(unit.moving_bytes for unit in units if unit.rests == tier and mode != RESIDENT)
        # What stays of a unit that moves is resident.
        staying = sum(unit.staying_bytes for unit in plan.units) if mode == RESIDENT else 0
        yield mode, moving + (staying if tier == plan.runs else 0)
    yield WORKING, sum(plan.costs.values()) if tier == plan.runs else 0


def share(amounts: Sequence[int], width: int) -> list[int]:
    """Whole characters in proportion, `width` in all, one at least for each amount above zero."""
    whole = sum(amounts)
    if not whole:
        return [0] * len(amounts)
    exact = [one * width / whole for one in amounts]
    lengths = [max(1, round(one)) if one else 0 for one in exact]
    while (missing := width - sum(lengths)) != 0:
        step, least = (1, 0) if missing > 0 else (-1, 1)
        able = [at for at, length in enumerate(lengths) if length > least]
        # Where rounding was the most unfair.
        lengths[max(able, key=lambda at: step * (exact[at] - lengths[at]))] += step
    return lengths


def order(plan: Plan, plain: bool) -> Text:
    """One character a unit, in the order in which the model runs them."""
    brushes = [BRUSHES[unit.mode] for unit in plan.units]
    return Text.assemble(*((brush.glyph(plain), brush.style) for brush in brushes))


def legend(plan: Plan, console: Console) -> Text:
    used = {mode for mode in MODES if plan.of_mode(mode)} | {WORKING, FREE}
    drawn = Text()
    for name, brush in BRUSHES.items():
        if name in used:
            drawn.append(brush.glyph(plain_of(console)), brush.style)
            drawn.append(f" {name}   ")
    drawn.append("\n")
    return drawn


def totals(plan: Plan) -> Table:
    """Bytes by mode and tier, the working memory item by item, the sum and the budget."""
    tiers = [tier for tier, _ in used_tiers(plan)]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("units", justify="right")
    for tier in tiers:
        table.add_column(tier, justify="right")
    held = {tier: dict(contents(plan, tier)) for tier in tiers}
    for mode in MODES:
        if units := plan.of_mode(mode):
            sizes = [_size(held[tier][mode]) for tier in tiers]
            table.add_row(Text(mode, BRUSHES[mode].style), str(len(units)), *sizes)
    for name, nbytes in plan.costs.items():
        if nbytes:
            there = [_size(nbytes) if tier == plan.runs else "" for tier in tiers]
            table.add_row(Text(name.replace("_", " "), BRUSHES[WORKING].style), "", *there)
    sums = [format_size(plan.totals.get(tier, 0)) for tier in tiers]
    table.add_row("total", str(len(plan.units)), *sums, style="bold")
    table.add_row("budget", "", *(format_size(budget_of(plan, tier)) for tier in tiers))
    return table


def reasons(plan: Plan, console: Console) -> Table:
    """Why: by mode, a row for the units that share a reason."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    for mode in MODES:
        groups: dict[str, list[str]] = defaultdict(list)
        for unit in plan.of_mode(mode):
            groups[unit.reason].append(unit.name or _unnamed(unit))
        brush = BRUSHES[mode]
        if groups:
            table.add_row("")
            table.add_row(
                Text(brush.glyph(plain_of(console)), brush.style), Text(mode, brush.style)
            )
        for why, names in groups.items():
            table.add_row("", Text.assemble((compressed(names), "bold"), f": {why}"))
    table.add_row("")
    return table


def compressed(names: Sequence[str]) -> str:
    """Names with one number each as one: `model.layers.{0-3,7}`."""
    numbered: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        found = re.fullmatch(r"(.*?)\.(\d+)((?:\..*)?)", name)
        if found is None:
            numbered[name, ""] = []
        else:
            numbered[found.group(1), found.group(3)].append(int(found.group(2)))
    said = []
    for (before, after), numbers in numbered.items():
        spans = _spans(sorted(numbers))
        shown = f".{{{','.join(spans)}}}" if len(numbers) > 1 else f".{spans[0]}" if spans else ""
        said.append(f"{before}{shown}{after}")
    return ", ".join(said)


def _spans(numbers: Sequence[int]) -> list[str]:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ["-".join(map(str, span)) for span in spans]


def forecast(plan: Plan) -> tuple[str, str]:
    expected = plan.forecast
    rate = expected.tokens_per_second
    per_token = format_size(expected.bytes_per_token)
    shown = f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
    return (
        f"about {shown} tokens/s at batch 1, bound by {expected.basis}",
        f"{per_token if expected.bytes_per_token else 'nothing'} brought in for a token",
    )


def used_tiers(plan: Plan) -> list[tuple[str, int]]:
    """The tier that runs and those that hold something, with the bytes that are planned there."""
    tiers = list(dict.fromkeys((plan.runs, "cpu", "disk")))
    sizes = [(tier, plan.totals.get(tier, 0)) for tier in tiers]
    return [(tier, used) for tier, used in sizes if used or tier == plan.runs]


def budget_of(plan: Plan, tier: str) -> int:
    budgets: Mapping[str, int] = {"cpu": plan.budget.cpu, "disk": plan.budget.disk}
    return budgets.get(tier, plan.budget.gpu)


def format_sizes(used: int, budget: int) -> str:
    return f"{format_size(used)} of {format_size(budget)}"


def plain_of(console: Console) -> bool:
    """Whether the output cannot show block characters."""
    try:
        "".join(brush.block for brush in BRUSHES.values()).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else ""


def _unnamed(unit: PlacedUnit) -> str:
    return "norms, scalars and buffers" if unit.kind == "rest" else unit.kind
