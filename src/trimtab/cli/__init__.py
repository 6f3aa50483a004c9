"""The command line: one file a command, imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from trimtab.cli import quiet, verdict

COMMANDS = ("plan", "run", "chat", "check", "explain", "doctor", "repro", "merge", "bench", "demo")
"""In the order of the help; each is the function `command` of the file of that name."""


class _OnDemand(TyperGroup):
    """Commands that are imported when they are called, or for the list of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"trimtab.cli.{cmd_name}")
        holder = typer.Typer(add_completion=False, rich_markup_mode=None)
        holder.command(cmd_name)(module.command)
        return get_command(holder)


_app = typer.Typer(cls=_OnDemand, add_completion=False, rich_markup_mode=None)


@_app.callback()
def trimtab(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Runs PEFT adapters on quantized models that do not fit the GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (by default this process's) and returns the exit code.

    0 done, 1 failed, 2 usage, 3 does not fit, 4 the check found problems, 130 interrupted. Results
    go to stdout, everything else to stderr.

    Example:
        >>> main(["plan", "./my-model", "--gpu", "6GiB", "--json"])
        0
    """
    asked = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with quiet.any_text(), quiet.libraries():
            status = _invoke(asked)
        sys.stdout.flush()
    except BaseException as error:
        return verdict.tell(error, as_json="--json" in asked)
    return status


def _invoke(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        from trimtab import __version__

        typer.echo(f"trimtab {__version__}")
        return 0
    # Not `main` of the group: that prints errors and ends the process in its own way.
    group = get_command(_app)
    with group.make_context("trimtab", arguments) as context:
        status = group.invoke(context)
    return status if isinstance(status, int) else 0
