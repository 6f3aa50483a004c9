"""The result as Markdown and as an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.memory import format_size
from trimtab.repro.cases import Case, Subject, words
from trimtab.repro.matrix import Cell, Stack
from trimtab.repro.script import literal


@dataclass(frozen=True)
class Report:
    """What was reproduced on which stacks, and every cell of the matrix."""

    subject: Subject
    stacks: Sequence[Stack]
    cells: Sequence[Cell]
    limit: float

    @property
    def ours(self) -> bool:
        """Whether trimtab's own row is as it should be, on the installed stack."""
        own = [one for one in self.cells if one.case is Case.TRIMTAB]
        return all(one.fine for one in own if one.stack == self.stacks[0].name)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; folders are left out."""
        subject = {
            key: value
            for key, value in asdict(self.subject).items()
            if key not in ("model", "adapter", "shown")
        }
        return {
            "model": self.subject.shown,
            "subject": subject,
            "limit": self.limit,
            "stacks": [{"name": one.name, "versions": dict(one.versions)} for one in self.stacks],
            "cells": [one.to_dict() for one in self.cells],
            "trimtab_works": self.ours,
        }

    def markdown(self) -> str:
        """The matrix, the versions, and a section for each case that is not as it should be."""
        parts = [
            self._heading(),
            self._matrix(),
            *self._remarks(),
            self._versions(),
            self._map(),
            *(self._section(group) for group in self._failing()),
        ]
        return "\n\n".join(parts) + "\n"

    def _heading(self) -> str:
        subject = self.subject
        what = f"A tiny random {subject.model_class}, made from the config of {subject.shown}"
        what = what if subject.tiny else f"{subject.shown}, a {subject.model_class}"
        here = f"GPU {subject.here}" if isinstance(subject.here, int) else "the CPU"
        return (
            f"# Adapter on a split base: {subject.shown}\n\n"
            f"{what}, in {subject.dtype}; {here} runs. Each case ran in a process of its own"
            " and is compared, tokens and logits, with the same stack and format all on one device."
        )

    def _matrix(self) -> str:
        columns = list(dict.fromkeys((one.stack, one.quant) for one in self.cells))
        several = len(self.stacks) > 1
        names = [words(quant) + (f"; {stack}" if several else "") for stack, quant in columns]
        rows = [["case", *names], ["---"] * (len(names) + 1)]
        for case in Case:
            found = {(one.stack, one.quant): one for one in self.cells if one.case is case}
            rows.append([case.title, *(_cell(found[column]) for column in columns)])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _remarks(self) -> Iterator[str]:
        if self.subject.notes:
            yield "\n".join(f"- {one}" for one in self.subject.notes)

    def _versions(self) -> str:
        packages = list(dict.fromkeys(name for one in self.stacks for name in one.versions))
        rows = [["version", *(one.name for one in self.stacks)], ["---"] * (len(self.stacks) + 1)]
        rows += [
            [name, *(one.versions.get(name, "not there") for one in self.stacks)]
            for name in packages
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _map(self) -> str:
        return f"The map:\n\n```python\n{literal(self.subject.device_map)}\n```"

    def _failing(self) -> list[list[Cell]]:
        """Cells that are not as they should be; those of a row that say the same together."""
        groups: dict[tuple[Case, str], list[Cell]] = {}
        for one in self.cells:
            if not one.fine:
                groups.setdefault((one.case, one.verdict), []).append(one)
        order = list(Case)
        return sorted(groups.values(), key=lambda group: order.index(group[0].case))

    def _section(self, group: Sequence[Cell]) -> str:
        first = group[0]
        title = first.case.title[0].upper() + first.case.title[1:]
        lines = [f"## {title}", f"{self._where(group)}: {first.verdict}."]
        if first.codes:
            pages = ", ".join(f"`trimtab explain {code}`" for code in first.codes)
            lines.append(f"What is known of it: {pages}.")
        if first.library:
            lines.append(f"It likely belongs to {first.library}. {first.why}")
        if first.failure:
            lines.append(f"```\n{first.failure.trace}\n```")
        folders = " ".join(self._folders())
        run = f"python {first.case.value}.py {folders}".strip()
        lines.append(f"`{first.case.value}.py`, run as `{run}`:")
        lines.append(f"```python\n{first.script}```")
        return "\n\n".join(lines)

    def _where(self, group: Sequence[Cell]) -> str:
        """The columns: `With nf4-dq and nf4 on ...; with nf4 on ...`."""
        quants: dict[str, list[str]] = {}
        for one in group:
            quants.setdefault(one.stack, []).append(words(one.quant))
        told = []
        for stack, found in quants.items():
            on = f" on {stack}" if len(self.stacks) > 1 else ""
            told.append(f"with {' and '.join(found)}{on}")
        text = "; ".join(told)
        return text[0].upper() + text[1:]

    def _folders(self) -> list[str]:
        named = {self.subject.model: "MODEL", self.subject.adapter: "ADAPTER"}
        return [named[one] for one in self.subject.arguments]


def _cell(cell: Cell) -> str:
    held = "; ".join(
        f"{format_size(nbytes)} on {tier}" for tier, nbytes in cell.rests.items() if nbytes
    )
    said = f"{cell.verdict} ({held})" if held else cell.verdict
    return said.replace("|", "\\|").replace("\n", " ")
