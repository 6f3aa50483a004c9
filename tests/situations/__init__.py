"""For each code of trimtab a situation that shows it, and its near twin that does not.

Each is one function of a folder of its own and of whether things are wrong there: the twins differ
in that alone. It raises a fault, or returns findings. `from situations import SITUATIONS`.
"""

from __future__ import annotations

# Each keeps its situations as it is imported: in the order of codes, so not in that of names.
# isort: off
from situations import environment, maps, adapters, memory, checkpoints, running  # noqa: F401

# isort: on
from situations.silent import SILENT
from situations.situation import SITUATIONS, Situation

__all__ = ["SILENT", "SITUATIONS", "Situation"]
