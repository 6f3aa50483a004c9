"""docs/adapters.md: each kind of adapter, on each format, wherever its layers are."""

from __future__ import annotations

import pytest

import make_adapter_table as table  # of scripts/
from kinds import FORMATS, ROWS, STATES, Row, cell, is_right, known_kinds, rows

TEXT = table.TARGET.read_text(encoding="utf-8")
IS_OURS = table.made_with(TEXT) == table.versions()
"""Whether the page was made with the versions that are installed: other ones differ in cells."""


def test_no_kind_of_peft_is_without_a_row() -> None:
    assert known_kinds() - {row.kind for row in ROWS} == set()


def test_no_cell_of_the_page_is_empty_or_wrong() -> None:
    cells = table.stored(TEXT, FORMATS)
    assert len(cells) == 12 * len({name for name, _, _ in cells})
    assert [key for key, one in cells.items() if not is_right(one)] == []
    if IS_OURS:
        assert {name for name, _, _ in cells} == {row.name for row in rows()}


def test_the_page_is_what_render_makes_of_its_cells() -> None:
    cells = table.stored(TEXT, FORMATS)
    kinds = {row.name: row.kind for row in ROWS}
    names = [(name, kinds[name]) for name in dict.fromkeys(name for name, _, _ in cells)]
    made = table.render(cells, names, FORMATS)
    if IS_OURS:
        assert made == TEXT
    else:
        assert made.splitlines()[-len(names) :] == TEXT.splitlines()[-len(names) :]


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_equal_to_the_stock_stack_or_refused(row: Row, quant: str) -> None:
    found = {(row.name, quant, state): cell(row, quant, state) for state in STATES}
    assert {key: one for key, one in found.items() if not is_right(one)} == {}
    if IS_OURS:
        page = table.stored(TEXT, FORMATS)
        assert found == {key: page[key] for key in found}, "run scripts/make_adapter_table.py"
