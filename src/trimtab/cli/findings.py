"""Findings, for people and as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.cli.result import print_json

if TYPE_CHECKING:
    from trimtab.diagnosis import Finding


def show(findings: Sequence[Finding], *, as_json: bool, none: str) -> None:
    """Prints them; `none` is said where there are none."""
    if as_json:
        print_json({"findings": [one.to_dict() for one in findings]})
        return
    if not findings:
        print(none)
    for number, one in enumerate(findings):
        sure = "" if one.confidence == "certain" else f" ({one.confidence})"
        print(("\n" if number else "") + f"{one.severity}: {one.what} [{one.code}]{sure}")
        for name, said in (("why", one.why), ("fix", one.fix)):
            if said:
                print(f"{name}: {said}")
