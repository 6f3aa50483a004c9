"""Sizes, tiers and budgets."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trimtab.errors import MemoryFault

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int | None) -> int | None:
    """Bytes of a size such as `6GiB` (6 x 2^30), `6GB` (6e9), `512MiB` or a whole number.

    Raises:
        MemoryFault: TT402, if the text is not a size, or a number below 2^20 with no unit: `8`,
            where 8 GiB was meant.

    Example:
        >>> parse_size("6GiB")
        6442450944
    """
    if text is None:
        return None
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    factor = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or factor is None:
        raise MemoryFault(
            "TT402",
            f"{text!r} is not a size",
            fix="write a number and a unit, such as 6GiB, 6GB or 512MiB",
        )
    nbytes = math.floor(float(found.group(1)) * factor)
    if not found.group(2) and 0 < nbytes < MiB:
        raise MemoryFault(
            "TT402",
            f"{text!r} has no unit, and would be {nbytes} bytes",
            fix="write the unit, such as 6GiB, 6GB or 512MiB",
        )
    return nbytes


def format_size(nbytes: int, *, up: bool = False) -> str:
    """A size for people, in binary units with two decimals: `1.05 GiB`.

    Args:
        up: no less than it is, for a size to ask for.
    """
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit:
            shown = math.ceil(nbytes * 100 / unit) / 100 if up else nbytes / unit
            return f"{shown:.2f} {name}"
    return f"{nbytes} B"


def align(nbytes: int, to: int) -> int:
    """`nbytes`, rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Budget:
    """Bytes that a placement may use on each tier.

    Without a GPU, `runs` is `cpu`, `gpu` is 0 and `cpu` is the budget of the device that runs.
    """

    runs: str
    gpu: int
    cpu: int
    disk: int

    @property
    def running(self) -> int:
        """Bytes on the device that runs."""
        return self.cpu if self.runs == "cpu" else self.gpu
