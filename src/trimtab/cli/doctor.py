"""`trimtab doctor`: the state of this machine, as a block to paste into a report."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from trimtab.cli import quiet
from trimtab.cli.options import AsJson
from trimtab.cli.result import print_json

PROBLEMS = 4


def command(
    measure: Annotated[
        bool, typer.Option("--measure", help="Ask torch, too: devices, bandwidths. Takes seconds.")
    ] = False,
    json: AsJson = False,
) -> int:
    """Show versions, devices, memory, known faults.

    Home folders and tokens are masked. Exit code 4: problems.
    """
    from trimtab.diagnosis.doctor import examine

    # Without what this process has set by itself.
    told = {name: one for name, one in os.environ.items() if quiet.SWITCHES.get(name) != one}
    health = examine(measure, environment=told)
    if json:
        print_json(dataclasses.asdict(health))
    else:
        print(health.markdown())
    return PROBLEMS if any(one.severity != "note" for one in health.findings) else 0
