"""Runs PEFT adapters on quantized models that do not fit the GPU.

Example:
    >>> import trimtab
    >>> adapters = {"sql": "./sql-lora"}
    >>> with trimtab.load("google/gemma-3-4b-it", adapters=adapters, gpu="4GiB") as placed:
    ...     placed.generate("How many users signed up in May?", adapter="sql")
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.api import load, plan
    from trimtab.attach import attach
    from trimtab.diagnosis.check import check
    from trimtab.diagnosis.explain import explain
    from trimtab.diagnosis.finding import Finding
    from trimtab.errors import TrimtabError
    from trimtab.merge import merge
    from trimtab.placement import Placement
    from trimtab.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Finding",
    "Placement",
    "Plan",
    "TrimtabError",
    "__version__",
    "attach",
    "check",
    "explain",
    "load",
    "merge",
    "plan",
]

_HOMES = {
    "Finding": "trimtab.diagnosis",
    "Placement": "trimtab.placement",
    "Plan": "trimtab.plan",
    "TrimtabError": "trimtab.errors",
    "attach": "trimtab.attach",
    "check": "trimtab.diagnosis",
    "explain": "trimtab.diagnosis",
    "load": "trimtab.api",
    "merge": "trimtab.merge",
    "plan": "trimtab.api",
}


def __getattr__(name: str) -> object:
    # On demand, since they import torch, and `trimtab --help` must not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `trimtab.plan` the function when the file of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
