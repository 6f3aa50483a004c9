"""By what a fault is recognised in what other libraries raise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from trimtab.diagnosis.finding import Confidence
from trimtab.diagnosis.traceback import Raised

LEVELS: Final[tuple[Confidence, ...]] = ("certain", "likely", "possible")
"""From the surest down."""


@dataclass(frozen=True)
class Sign:
    """An exception by which a fault shows: all that is given must hold.

    `message` is a regular expression that is found in the message, `types` the names that the
    exception's type may have, `through` an expression that is found in one of the frames, written
    `library/file.py:function`, `innermost` one for the last frame inside a library. With
    `alone=False` the message says too little by itself, where a text has no frames.

    Example:
        >>> Sign("unhashable type: 'set'", ("TypeError",), innermost="get_balanced_memory$")
    """

    message: str
    types: tuple[str, ...] = ()
    through: str = ""
    innermost: str = ""
    alone: bool = True
    confidence: Confidence = "certain"

    def weigh(self, raised: Raised) -> Confidence | None:
        """How sure it is that the exception shows the fault; None: it does not.

        A step less sure without any frame, and two where the head of the traceback is cut off and
        may have held the frame that is missing.
        """
        if self.types and raised.type and raised.type not in self.types:
            return None
        if not re.search(self.message, raised.message):
            return None
        if not raised.frames:
            asked = 2 if not raised.type else 1
            return lowered(self.confidence, asked) if self.alone else None
        if self._frames_match(raised):
            return self.confidence
        return None if raised.whole or not self.alone else lowered(self.confidence, 2)

    def _frames_match(self, raised: Raised) -> bool:
        if self.innermost:
            last = raised.innermost
            if last is None or not re.search(self.innermost, str(last)):
                return False
        return not self.through or any(re.search(self.through, str(one)) for one in raised.frames)


def lowered(confidence: Confidence, steps: int) -> Confidence:
    """The level that many steps below; `possible` is the lowest."""
    return LEVELS[min(LEVELS.index(confidence) + steps, len(LEVELS) - 1)]
