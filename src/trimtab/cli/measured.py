"""Planned against measured memory, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from trimtab.memory import format_size

if TYPE_CHECKING:
    from trimtab.report import Report


def measured(report: Report) -> Table:
    """A row for each tier that is used, then for each adapter what it changes."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("", "planned", "measured"):
        table.add_column(column, justify="right" if column else "left")
    for one in report.tiers:
        if one.planned or one.measured:
            table.add_row(one.tier, format_size(one.planned), format_size(one.measured))
    if report.pageable:
        table.add_row("not pinned", "", format_size(report.pageable))
    for name, applied in report.adapters.items():
        rests = ", rests in RAM" if name in report.resting else ""
        table.add_row(f"adapter {name}", "", f"{applied['modules']} modules changed{rests}")
    return table
