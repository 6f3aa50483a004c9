"""`trimtab merge`: a checkpoint of base and adapters, file by file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli import quiet
from trimtab.cli.options import AsJson
from trimtab.cli.result import print_json
from trimtab.memory import format_size


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The base in 16 or 32 bits: a folder or a name.")
    ],
    adapter: Annotated[
        list[str], typer.Argument(metavar="ADAPTER...", help="PEFT adapters, merged in this order.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The folder to write.", show_default=False),
    ],
    weight: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER", help="Multiplies an adapter's scale; one for each; default: 1."
        ),
    ] = None,
    allow_unused: Annotated[
        bool, typer.Option("--allow-unused", help="Accept tensors that match nothing.")
    ] = False,
    allow_other_base: Annotated[
        bool, typer.Option("--allow-other-base", help="Accept adapters that name another base.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write a checkpoint with adapters merged in.

    In the base's own dtype, file by file, without a GPU; equal to PEFT's merge in memory. A merge
    that was interrupted goes on when it is called again.
    """
    if weight and len(weight) != len(adapter):
        raise typer.BadParameter(
            f"{len(weight)} weights for {len(adapter)} adapters", param_hint="--weight"
        )
    with quiet.engine():
        from trimtab.merge import merge

        merged = merge(
            model,
            adapter,
            out,
            weights=weight or None,
            allow_unused=allow_unused,
            allow_other_base=allow_other_base,
            progress=lambda file: print(f"wrote {file}", file=sys.stderr),
        )
    if json:
        print_json(merged.to_dict())
        return
    print(
        f"{merged.folder}: {format_size(merged.nbytes)}, {merged.tensors} of {merged.total} tensors"
        " changed or added"
    )
    for note in merged.notes:
        print(note)
