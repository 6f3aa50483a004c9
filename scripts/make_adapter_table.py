"""Writes docs/adapters.md, what each kind of adapter does: `python scripts/make_adapter_table.py`.

The cells are computed by tests/kinds.py, on tiny models, on the CPU, in about a minute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "adapters.md"
PACKAGES = ("transformers", "peft", "bitsandbytes")

HEAD = """# Adapters

What comes of each kind of adapter that PEFT has, by the format of the base and by where the layers
that it changes are: **resident** on the device that runs, **streamed** to it for each forward, or
in an **idle** tower, brought in when a prompt has an image. The table is made by a test, with
{versions}: `python scripts/make_adapter_table.py`.

- **=** the logits equal those of the all-resident model of the stock stack, to the last bit.
- **TT310** and the like: refused, with that code, when the adapter is loaded
  ([what it says](codes.md)). **\\*** the stock stack fails as well, with a traceback, when it loads
  the adapter or in the first forward.

An adapter that cannot reach into a tower (tables, heads, prompts) is, under *idle*, on the language
model, and an image goes through the tower.

"""

Cells = Mapping[tuple[str, str, str], str]
"""By the names of the row, the format and the state."""


def versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def render(cells: Cells, rows: list[tuple[str, str]], formats: Mapping[str, str]) -> str:
    """The page; `rows` are names and PEFT's names of the kinds, `formats` ids and names."""
    said = ", ".join(f"{name} {number}" for name, number in versions().items())
    states = ("resident", "streamed", "idle")
    head = ["kind", "`peft_type`", *(f"{f} {s}" for f in formats.values() for s in states)]
    lines = [_line(head), _line(["---"] * len(head))]
    for name, kind in rows:
        found = [cells[name, one, state] for one in formats for state in states]
        lines.append(_line([name, kind, *map(_shown, found)]))
    return HEAD.format(versions=said) + "\n".join(lines) + "\n"


def stored(text: str, formats: Mapping[str, str]) -> dict[tuple[str, str, str], str]:
    """The cells of a page, as `render` got them."""
    cells = {}
    for line in text.splitlines():
        if not line.startswith("| ") or line.startswith(("| kind", "| ---")):
            continue
        name, _, *found = (one.strip() for one in line.strip("|").split("|"))
        names = [(f, s) for f in formats for s in ("resident", "streamed", "idle")]
        for (one, state), cell in zip(names, found, strict=True):
            cells[name, one, state] = cell.replace("\\*", "*").replace("=", "equal")
    return cells


def made_with(text: str) -> dict[str, str]:
    """The versions that a page names."""
    return {name: re.search(rf"{name} ([\d.]+\d)", text)[1] for name in PACKAGES}  # type: ignore[index]


def compute(
    cell: Callable[..., str], rows: tuple[object, ...], formats: Mapping[str, str]
) -> Cells:
    return {
        (row.name, one, state): cell(row, one, state)  # type: ignore[attr-defined]
        for one in formats
        for row in rows
        for state in ("resident", "streamed", "idle")
    }


def _shown(cell: str) -> str:
    return cell.replace("*", "\\*").replace("equal", "=")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401  quiet libraries
    import kinds

    found = kinds.rows()
    cells = compute(kinds.cell, found, kinds.FORMATS)
    faults = {key: cell for key, cell in cells.items() if not kinds.is_right(cell)}
    if faults:
        sys.exit("\n".join(f"{', '.join(key)}: {cell}" for key, cell in faults.items()))
    names = [(row.name, row.kind) for row in found]
    TARGET.write_text(render(cells, names, kinds.FORMATS), encoding="utf-8")
    print(f"{len(cells)} cells in {TARGET.name}")


if __name__ == "__main__":
    main()
