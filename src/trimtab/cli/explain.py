"""`trimtab explain`: the page of a code, or what is known of a traceback."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.findings import show
from trimtab.cli.options import AsJson


def command(
    what: Annotated[
        str, typer.Argument(metavar="CODE|FILE|TEXT", help="As TT401; a log; - for stdin.")
    ] = "-",
    json: AsJson = False,
) -> None:
    """Say what an error or a traceback means and what to do."""
    from trimtab.diagnosis import explain, registry

    text = _text(what)
    if registry.CODE.fullmatch(text.strip().upper()):
        text = text.strip().upper()
        try:
            told = registry.rule(text).markdown()
        except LookupError as error:
            raise typer.BadParameter(str(error), param_hint="CODE") from None
        if not json:
            print(told)
            return
    show(explain(text), as_json=json, none="nothing in that text is known here")


def _text(what: str) -> str:
    if what == "-":
        return sys.stdin.read()
    if os.path.isfile(what):  # which takes any text for a path, a long one too
        return Path(what).read_text(encoding="utf-8", errors="replace")
    if os.path.isdir(what):
        raise typer.BadParameter(f"{what} is a folder, not a log")
    if what.endswith((".log", ".txt")) and not what.split()[1:]:
        raise typer.BadParameter(f"there is no file {what}")
    return what
