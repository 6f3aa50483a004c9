"""`trimtab repro`: what the stock stack does with a split base and an adapter, as a report."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli import quiet
from trimtab.cli.options import AsJson, Quant, read_map, spread
from trimtab.cli.result import print_json

if TYPE_CHECKING:
    from trimtab.repro.report import Report

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Reproducing:
    """What is asked, as options."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the hub.")]
    adapter: Annotated[
        str, typer.Option(metavar="PATH", help="A PEFT adapter.", show_default=False)
    ] = ""
    device_map: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="A Hugging Face device map in JSON; default: the second half of the layers away.",
        ),
    ] = None
    quant: Annotated[
        Quant, typer.Option(help="4 bits are tried with double quantization and without.")
    ] = Quant.nf4
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Use a random model made from the config; no weights needed."),
    ] = False
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For each case.")] = 600
    against: Annotated[
        str,
        typer.Option(
            metavar="PACKAGE==VERSION,...",
            help="Try these versions, too, in a fresh environment.",
            show_default=False,
        ),
    ] = ""
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the Markdown there, too."),
    ] = None
    json: AsJson = False


@spread(Reproducing)
def command(asked: Reproducing) -> int:
    """Try an adapter on a split base, case by case.

    On the stock stack and with trimtab, each in a process of its own, on copies of what could be
    written to. The report has a script for each case that goes wrong. Exit code 1: trimtab's own
    case does.
    """
    if not asked.adapter and not asked.tiny:
        what = "an adapter is needed, but for a --tiny model"
        raise typer.BadParameter(what, param_hint="--adapter")
    if asked.out is not None and not asked.out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {asked.out.parent}", param_hint="--out")
    report = _reproduced(asked)
    if asked.out is not None:
        asked.out.write_text(report.markdown(), encoding="utf-8")
    if asked.json:
        print_json(report.to_dict())
    else:
        print(report.markdown(), end="")
    return 0 if report.ours else FAILED


def _reproduced(asked: Reproducing) -> Report:
    device_map = read_map(asked.device_map)
    # Without what this process has set by itself.
    told = {name: one for name, one in os.environ.items() if quiet.SWITCHES.get(name) != one}
    with quiet.engine():
        from trimtab.repro import environment
        from trimtab.repro.reproduce import reproduce

        try:
            wanted = environment.parse(asked.against) if asked.against else {}
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--against") from None
        return reproduce(
            asked.model,
            asked.adapter,
            device_map,
            quant=asked.quant.value,
            tiny=asked.tiny,
            limit=asked.limit,
            against=wanted,
            environment=told,
            progress=lambda text: print(text, file=sys.stderr),
        )
