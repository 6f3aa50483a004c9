"""Results: on stdout, as an object with `schema_version` or for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab.plan import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import Console


def print_json(found: Mapping[str, Any]) -> None:
    """One line of JSON, plain ASCII, `schema_version` first."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **found}), file=sys.stdout, flush=True)


def console() -> Console:
    """stdout for people: colours on a terminal only, 80 columns elsewhere."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
