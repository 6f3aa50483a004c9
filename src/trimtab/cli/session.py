"""A placement for a command: made from its options, its progress shown, freed at the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trimtab.cli import quiet
from trimtab.cli.options import Running

if TYPE_CHECKING:
    from trimtab.placement import Placement
    from trimtab.plan import Plan


@contextlib.contextmanager
def opened(asked: Running) -> Iterator[Placement]:
    """The placement that the options ask for; everything is freed afterwards, whatever happens."""
    decided = asked.saved_plan()
    arguments = {} if decided else asked.arguments()
    with quiet.engine():
        from trimtab.api import load, plan

        decided = decided or plan(**arguments)
        names = tuple(one.name for one in decided.adapters)
        asked.chosen(names)  # a wrong name is said before minutes of loading
        with counted(decided) as progress:
            placed = load(
                decided,
                disk_folder=asked.disk_folder,
                progress=progress,
                allow_unused=names if asked.allow_unused else (),
                allow_other_base=names if asked.allow_other_base else (),
            )
    with placed:
        for note in (note for one in placed.applied.values() for note in one.notes):
            print(f"note: {note}", file=sys.stderr)
        yield placed


@contextlib.contextmanager
def counted(plan: Plan) -> Iterator[Callable[[str], None] | None]:
    """A line on stderr that says how far loading is; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    units = sorted((unit.name for unit in plan.units), key=len, reverse=True)
    seen: set[str] = set()
    parameters = 0
    shown_at = 0.0

    def progress(name: str) -> None:
        nonlocal parameters, shown_at
        parameters += 1
        # The longest name first: a unit may hold the name of another one.
        seen.add(next((one for one in units if name.startswith(f"{one}.")), ""))
        now = time.monotonic()
        if now - shown_at > 0.1:
            shown_at = now
            _overwrite(f"loading {len(seen)}/{len(units)} units, {parameters} tensors: {name}")

    try:
        yield progress
    finally:
        _overwrite("")


def _overwrite(text: str) -> None:
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r{text[:width]:<{width}}\r")
    sys.stderr.flush()
