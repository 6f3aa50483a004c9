"""`trimtab run`: one answer to one prompt, and the quantized base as a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli import quiet
from trimtab.cli.options import Answering, spread
from trimtab.cli.result import print_json
from trimtab.memory import format_size

if TYPE_CHECKING:
    from trimtab.placement import Placement
    from trimtab.saving import Saved


@spread(Answering)
def command(
    asked: Answering,
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The prompt; - or left out: stdin.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    save_quantized: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the base as quantized here; without --prompt only that."
        ),
    ] = None,
) -> None:
    """Answer one prompt."""
    text = None if save_quantized and prompt is None else _prompt(prompt)
    if save_quantized:
        _check_free(save_quantized)
    from trimtab.cli.session import opened

    with opened(asked) as placed:
        saved = _save(placed, save_quantized) if save_quantized else None
        if text is None:
            found: dict[str, Any] = {"text": None, "tokens": [], "adapter": None}
        else:
            found = _answer(placed, asked, text, raw)
        found["report"] = placed.report().to_dict()
    if saved:
        found["saved"] = saved.to_dict()
        told = f"{saved.folder}: {format_size(saved.nbytes)} of tensors in {saved.quant}"
        if text is None and not asked.json:
            print(told)
        else:
            print(told, file=sys.stderr)
    if asked.json:
        print_json(found)
    elif text is not None:
        print()


def _answer(placed: Placement, asked: Answering, text: str, raw: bool) -> dict[str, Any]:
    from trimtab.cli.answer import encode, generate, room, stream_for

    out = sys.stdout

    def write(fresh: str) -> None:
        out.write(fresh)
        out.flush()

    stream = stream_for(placed, _silent if asked.json else write)
    adapter = asked.chosen(placed.adapters)
    inputs = encode(placed, text, raw)
    tokens = asked.max_new_tokens or room(placed, inputs, None)
    generate(placed, inputs, stream, adapter=adapter, max_new_tokens=tokens)
    return {"text": stream.text, "tokens": stream.tokens, "adapter": adapter}


def _check_free(folder: Path) -> None:
    """Says that the folder is taken before minutes of loading."""
    with quiet.engine():
        from trimtab.saving import Growing

        Growing.refuse_taken(folder.expanduser())


def _save(placed: Placement, folder: Path) -> Saved:
    return placed.save_quantized(
        folder, progress=lambda file: print(f"wrote {file}", file=sys.stderr)
    )


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter("give the text, or - to read stdin", param_hint="--prompt")
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    return quiet.text_of(text)


def _silent(fresh: str) -> None:
    pass
