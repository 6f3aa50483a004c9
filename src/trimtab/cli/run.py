"""`trimtab run`: one answer to one prompt."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from trimtab.cli.options import Running, spread
from trimtab.cli.result import print_json


@spread(Running)
def command(
    asked: Running,
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The prompt; - or left out: stdin.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
) -> None:
    """Answer one prompt."""
    text = _prompt(prompt)
    from trimtab.cli.answer import encode, generate, room, stream_for
    from trimtab.cli.session import opened

    with opened(asked) as placed:
        out = sys.stdout

        def write(fresh: str) -> None:
            out.write(fresh)
            out.flush()

        stream = stream_for(placed, _silent if asked.json else write)
        adapter = asked.chosen(placed.adapters)
        inputs = encode(placed, text, raw)
        tokens = asked.max_new_tokens or room(placed, inputs, None)
        generate(placed, inputs, stream, adapter=adapter, max_new_tokens=tokens)
        found: dict[str, Any] = {
            "text": stream.text,
            "tokens": stream.tokens,
            "adapter": adapter,
            "report": placed.report().to_dict(),
        }
    if asked.json:
        print_json(found)
    else:
        print()


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter("give the text, or - to read stdin", param_hint="--prompt")
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    return text


def _silent(fresh: str) -> None:
    pass
