"""What `check` and `explain` answer with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.errors import TITLES, TrimtabError

Severity = Literal["error", "warning", "note"]
Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found, under the code whose page says more.

    An `error` would fail or compute something else, a `warning` may, a `note` says what was
    understood and adapted. `title` is the code's.

    Example:
        >>> Finding("TT204", "the device map puts 'lm_head' on GPU 1").title
        'the device map asks for something that cannot be placed'
    """

    code: str
    what: str
    why: str = ""
    fix: str = ""
    severity: Severity = "error"
    confidence: Confidence = "certain"
    title: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", TITLES[self.code])

    @classmethod
    def from_error(cls, error: TrimtabError) -> Finding:
        """The finding that says what an error says."""
        return cls(error.code, error.what, error.why, error.fix)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return dataclasses.asdict(self)
