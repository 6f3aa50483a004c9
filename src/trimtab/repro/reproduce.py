"""The whole of it: what is tried, the stacks, the matrix, the report."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.errors import MemoryFault
from trimtab.memory import format_size
from trimtab.repro.cases import Subject
from trimtab.repro.environment import installed_stack, other_stack
from trimtab.repro.matrix import Stack, matrix
from trimtab.repro.report import Report
from trimtab.repro.subject import describe

OtherStack = Callable[
    [Mapping[str, str], Mapping[str, str]], contextlib.AbstractContextManager[Stack]
]


def reproduce(
    model: str,
    adapter: str = "",
    device_map: Mapping[str, Any] | None = None,
    *,
    quant: str = "nf4",
    tiny: bool = False,
    limit: float = 600,
    against: Mapping[str, str] | None = None,
    environment: Mapping[str, str] = os.environ,
    progress: Callable[[str], None] = lambda text: None,
    make_stack: OtherStack = other_stack,
) -> Report:
    """Tries an adapter on a split base, on the stock stack and with trimtab.

    Nothing is written to the user's files: a case that could gets a copy, in a folder of its own
    that is removed.

    Args:
        model: a folder, or a name on the hub.
        adapter: a PEFT adapter; it may be left out for a tiny model.
        device_map: a Hugging Face map; by default the second half of the layers is away.
        quant: one of the engine's formats; those with 4 bits are tried with double quantization
            and without.
        tiny: whether a tiny random model of the same architecture takes the model's place.
        limit: seconds for each case.
        against: versions by package, of a further stack.
        environment: the variables that the scripts get.
        progress: called with a line before each case.
        make_stack: makes the further stack, of versions and variables.

    Raises:
        TrimtabError: what is wrong with the model or the adapter; TT101, the further stack cannot
            be made; TT403, there is no room for a copy.

    Example:
        >>> print(reproduce("./my-model", "./sql-lora", tiny=True).markdown())  # doctest: +SKIP
    """
    import torch

    subject = describe(
        model, adapter, device_map, quant=quant, tiny=tiny, gpu=torch.cuda.is_available()
    )
    _require_room(subject)
    with contextlib.ExitStack() as held:
        stacks = [installed_stack(environment)]
        if against:
            progress(f"making an environment with {_named(against)}")
            stacks.append(held.enter_context(make_stack(against, environment)))
        return Report(subject, stacks, list(matrix(subject, stacks, limit, progress)), limit)


def _require_room(subject: Subject) -> None:
    if not subject.on_disk:
        return
    folder = tempfile.gettempdir()
    needed, free = 2 * subject.nbytes, shutil.disk_usage(folder).free
    if needed > free:
        raise MemoryFault(
            "TT403",
            f"a copy of {subject.shown} and what is offloaded of it take {format_size(needed)}, and"
            f" {format_size(free)} are free in {folder}",
            why="the stock stack may write to a base that is on the disk, so it gets a copy",
            fix="set TMPDIR to a folder on another disk, or use --tiny",
        )


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
