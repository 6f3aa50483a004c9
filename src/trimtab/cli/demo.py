"""`trimtab demo`: a small model on a smaller budget, checked against all of it in memory."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from trimtab.cli import quiet
from trimtab.cli.options import AsJson
from trimtab.cli.result import console, print_json
from trimtab.errors import DoesNotFit, EnvironmentFault
from trimtab.memory import format_size
from trimtab.plan import STREAMED

if TYPE_CHECKING:
    from trimtab.placement import Placement
    from trimtab.plan import Plan

FOLDER = Path(__file__).parent.parent / "demo"
ADAPTER = "french"
QUANT = "nf4"
CONTEXT, LONGEST = 64, 24
"""Tokens: of prompt and answer together, and of an answer."""

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the weights: the smallest budget for them that the model fits is the demo's."""


@dataclass(frozen=True)
class Shown:
    """A held-out sum and its answers.

    `right`: they are the true ones; `same`: the all-resident model gives them, too.
    """

    question: str
    base: str
    adapter: str
    right: bool
    same: bool


def command(
    count: Annotated[int, typer.Option(min=1, help="Sums to ask.", show_default=True)] = 6,
    json: AsJson = False,
) -> int:
    """Check a small model, run on less memory than it takes.

    It has an adapter, and is loaded in NF4. Exit code 1: an answer is not that of the same model
    all in memory.
    """
    _require_bitsandbytes()
    sums = _held_out(count)
    questions = [one["question"] for one in sums]
    with quiet.engine():
        whole, lean = plans()
    if not json:
        from trimtab.cli.picture import draw

        draw(lean, console())
    with _one_thread():
        with placement(lean) as placed:
            answers = ask(placed, questions)
            report = placed.report()
        with placement(whole) as placed:
            expected = ask(placed, questions)
    shown = [
        Shown(
            question=asked["question"],
            base=base,
            adapter=adapted,
            right=(base, adapted) == (asked["english"], asked["french"]),
            same=(base, adapted) == wanted,
        )
        for asked, (base, adapted), wanted in zip(sums, answers, expected, strict=True)
    ]
    if json:
        rows = [asdict(one) for one in shown]
        print_json({"plan": lean.to_dict(), "answers": rows, "report": report.to_dict()})
    else:
        from trimtab.cli.measured import measured

        out = console()
        out.print(_table(shown))
        out.print()
        out.print(measured(report))
        out.print(_closing(shown, lean, whole))
    return 0 if all(one.same for one in shown) else 1


def plans() -> tuple[Plan, Plan]:
    """A plan with everything resident, and one on the smallest of `SHARES` that the model fits."""
    from trimtab.api import plan

    def on(**sizes: int) -> Plan:
        adapters = {ADAPTER: FOLDER / ADAPTER}
        return plan(FOLDER / "base", adapters, quant=QUANT, context=CONTEXT, **sizes)  # type: ignore[arg-type]

    whole = on()
    beside = sum(whole.costs.values())
    weights = whole.totals[whole.runs] - beside
    runs, rests = ("cpu", "disk") if whole.runs == "cpu" else ("gpu", "cpu")
    for share in SHARES:
        with suppress(DoesNotFit):
            lean = on(**{runs: beside + int(share * weights), rests: 2 * weights})
            if lean.of_mode(STREAMED):
                return whole, lean
    raise DoesNotFit("TT401", "no budget makes the demo's model stream its layers")


@contextmanager
def placement(decided: Plan) -> Iterator[Placement]:
    with quiet.engine():
        from trimtab.api import load

        placed = load(decided)
    with placed:
        yield placed


def ask(placed: Placement, questions: Sequence[str]) -> list[tuple[str, str]]:
    """For each question the base's answer and the adapter's."""
    options: dict[str, Any] = {"max_new_tokens": LONGEST, "do_sample": False}
    with quiet.engine():
        return [
            (
                placed.generate(question, adapter=None, **options),
                placed.generate(question, adapter=ADAPTER, **options),
            )
            for question in questions
        ]


def _held_out(count: int) -> list[dict[str, str]]:
    found = json.loads((FOLDER / "sums.json").read_text(encoding="utf-8"))["held_out"]
    step = max(1, len(found) // count)
    return [dict(one) for one in found[::step][:count]]


@contextmanager
def _one_thread() -> Iterator[None]:
    """More threads only wait for each other here: the matrices are tiny."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_bitsandbytes() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFault(
            "TT101",
            "the demo needs the package bitsandbytes, which is not installed",
            fix='pip install "trimtab[demo]"',
        )


def _table(shown: Sequence[Shown]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("question", "base", f"with {ADAPTER}", "right"):
        table.add_column(column)
    for one in shown:
        verdict = "yes" if one.right else "no"
        table.add_row(one.question, one.base, one.adapter, verdict if one.same else "DIFFERS")
    return table


def _closing(shown: Sequence[Shown], lean: Plan, whole: Plan) -> str:
    runs = lean.runs
    differing = sum(not one.same for one in shown)
    told = (
        f"{differing} of {len(shown)} answers differ from the all-resident model's"
        if differing
        else "every answer is the all-resident model's"
    )
    return (
        f"\n{told}, which takes {format_size(whole.totals[runs])} on {runs}; "
        f"here it was {format_size(lean.totals[runs])}"
    )
