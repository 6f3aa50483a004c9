"""The rules by code: each is imported when it is asked for."""

from __future__ import annotations

import functools
import pkgutil
import re
from importlib import import_module
from typing import Final

from trimtab.diagnosis import rules
from trimtab.diagnosis.rule import Rule

FAMILIES: Final = {
    "TT1": "environment",
    "TT2": "device maps and placement",
    "TT3": "adapters",
    "TT4": "memory",
    "TT5": "formats and checkpoints",
    "TT6": "running",
}

CODE: Final = re.compile(r"\bTT\d{3}\b")


@functools.cache
def codes() -> tuple[str, ...]:
    """Every code that has a page, ascending."""
    names = (one.name.upper() for one in pkgutil.iter_modules(rules.__path__))
    return tuple(sorted(name for name in names if CODE.fullmatch(name)))


def rule(code: str) -> Rule:
    """The rule of a code, in upper or lower case.

    Raises:
        LookupError: there is no such code.

    Example:
        >>> rule("tt201").library
        'trimtab'
    """
    wanted = code.strip().upper()
    if wanted not in codes():
        raise LookupError(f"there is no page {code!r}; codes go from {codes()[0]} to {codes()[-1]}")
    found: Rule = import_module(f"{rules.__name__}.{wanted.lower()}").RULE
    return found
