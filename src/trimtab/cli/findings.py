"""Findings, for people and as objects."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from trimtab.cli.result import print_json

if TYPE_CHECKING:
    from trimtab.diagnosis import Finding


def show(findings: Sequence[Finding], *, as_json: bool, none: str, **further: Any) -> None:
    """Prints them; `none` is said where there are none, `further` are fields of the object."""
    if as_json:
        print_json({"findings": [one.to_dict() for one in findings], **further})
    else:
        tell(findings, none=none)


def tell(findings: Sequence[Finding], *, none: str, file: TextIO | None = None) -> None:
    """Prints them for people, on stdout or into `file`."""
    out = file or sys.stdout
    if not findings:
        print(none, file=out)
    for number, one in enumerate(findings):
        sure = "" if one.confidence == "certain" else f" ({one.confidence})"
        if number:
            print(file=out)
        print(f"{one.severity}: {one.what} [{one.code}]{sure}", file=out)
        for name, said in (("why", one.why), ("fix", one.fix)):
            if said:
                print(f"{name}: {said}", file=out)
