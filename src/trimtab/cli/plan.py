"""`trimtab plan`: where each part of a model would live, and why. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli import quiet
from trimtab.cli.options import Planning, spread
from trimtab.cli.result import console, print_json


@spread(Planning)
def command(
    asked: Planning,
    *,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan, for run and chat --plan.")
    ] = None,
) -> None:
    """Decide where each part of a model would live.

    From a memory budget, the config and the headers alone. Exit code 3: it does not fit.
    """
    arguments = asked.arguments()
    with quiet.engine():
        from trimtab.api import plan

        decided = plan(**arguments)
    if save is not None:
        try:
            decided.save(save)
        except OSError as error:
            said = f"{save} cannot be written: {error.strerror}"
            raise typer.BadParameter(said, param_hint="--save") from None
    if asked.json:
        print_json(decided.to_dict())
        return
    from trimtab.cli.picture import draw

    draw(decided, console())
