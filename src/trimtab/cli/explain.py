"""`trimtab explain`: the page of a code, or what is known of an error text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trimtab.cli.findings import show
from trimtab.cli.options import AsJson


def command(
    what: Annotated[
        str, typer.Argument(metavar="CODE|TEXT", help="As TT401; an error text; - for stdin.")
    ] = "-",
    json: AsJson = False,
) -> None:
    """Say what an error means and what to do."""
    from trimtab.diagnosis import explain, registry

    text = sys.stdin.read() if what == "-" else what
    if registry.CODE.fullmatch(text.strip().upper()):
        text = text.strip().upper()
        try:
            told = registry.rule(text).markdown()
        except LookupError as error:
            raise typer.BadParameter(str(error), param_hint="CODE") from None
        if not json:
            print(told)
            return
    show(explain(text), as_json=json, none="no code of trimtab's is in that text")
