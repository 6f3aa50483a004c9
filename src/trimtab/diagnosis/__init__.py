"""Counsel: what is wrong, why, and what to do; before anything is loaded, and after it failed."""

from __future__ import annotations

# Bound here and now, not on demand: `check` and `explain` are also names of files, and importing
# such a file on demand would put the module in the place of the function.
from trimtab.diagnosis.check import check
from trimtab.diagnosis.explain import explain, page
from trimtab.diagnosis.finding import Finding
from trimtab.diagnosis.repair import Repair, repair

__all__ = ["Finding", "Repair", "check", "explain", "page", "repair"]
