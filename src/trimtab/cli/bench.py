"""`trimtab bench`: how fast a placement runs, against the floor that its link sets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import Running, spread
from trimtab.cli.result import console, print_json
from trimtab.memory import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.bench import Bench


@spread(Running)
def command(
    asked: Running,
    *,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of the prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the answer.")] = 32,
) -> None:
    """Measure decoding against what the link allows."""
    from trimtab.cli import quiet
    from trimtab.cli.session import opened

    start = time.perf_counter()
    with opened(asked) as placed, quiet.engine():
        from trimtab.bench import bench

        loaded = time.perf_counter() - start
        with placed.using(asked.chosen(placed.adapters)):
            found = bench(
                placed, prompt_tokens=prompt_tokens, new_tokens=new_tokens, load_seconds=loaded
            )
    if asked.json:
        print_json(found.to_dict())
    else:
        console().print(table(found))


def table(found: Bench) -> Table:
    """A row for each figure that there is."""
    from rich.table import Table

    rows = [
        ("decode", f"{found.decode:.1f} tokens/s"),
        ("forecast", f"{found.forecast:.1f} tokens/s"),
        ("prefill", f"{found.prefill:.0f} tokens/s"),
        ("loading, imports and plan", f"{found.load_seconds:.1f} s"),
    ]
    if found.floor is not None and found.link_gbps is not None:
        rows += [
            ("streamed for a token", format_size(found.streamed_bytes)),
            ("link", f"{found.link_gbps:.1f} GB/s"),
            ("floor", f"{found.floor:.1f} tokens/s"),
            ("share of the floor", f"{found.share:.2f}"),
            ("above it, for each streamed unit", f"{found.stall_ms:.2f} ms"),
        ]
    if found.switch_ms is not None:
        rows.append(("another adapter", f"{found.switch_ms:.2f} ms"))
    steps = found.steps
    rows.append(("captured steps", f"{steps['captured']}, replayed {steps['replayed']}"))
    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for name, value in rows:
        made.add_row(name, value)
    for why, count in steps["refusals"].items():
        made.add_row("not captured", f"{count}: {why}")
    return made
