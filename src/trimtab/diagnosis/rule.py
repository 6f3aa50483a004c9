"""The form of a rule: a code's page, under fixed headings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.diagnosis.sign import Sign
from trimtab.errors import TITLES

_BREAK = re.compile(r"(?<=\S)\n(?: {2})?(?=[^\s-])")
"""A line break inside a paragraph or a list's item, not one between two of them."""


@dataclass(frozen=True)
class Rule:
    """What is known of one fault. The texts are Markdown; the source's indentation is taken off.

    `seen` is what a user sees, `why` the cause, `versions` which versions have it, `fix` what to
    do, `not_helping` what is often advised and changes nothing, `library` whose the fault is,
    `references` issues as `owner/name#number`. A `foreign` fault is never raised by trimtab, only
    recognised in what other libraries raise, by its `signs`, or warn of, by what is `said` in a log
    (regular expressions); it is in the versions of `affected`:
    package -> (from this one, before that one), either "" for no bound.
    """

    code: str
    seen: str
    why: str
    versions: str
    fix: str
    library: str
    not_helping: str = ""
    references: tuple[str, ...] = ()
    foreign: bool = False
    signs: tuple[Sign, ...] = ()
    said: tuple[str, ...] = ()
    affected: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if isinstance(value, str):
                object.__setattr__(self, one.name, inspect.cleandoc(value))

    @property
    def title(self) -> str:
        return TITLES[self.code]

    def markdown(self) -> str:
        """The page: a heading with code and title, and a section for each text that there is."""
        sections = (
            ("What is seen", self.seen),
            ("Why it happens", self.why),
            ("Which versions", self.versions),
            ("What to do", self.fix),
            ("What does not help", self.not_helping),
            ("Whose it is", self.library),
            ("References", "\n".join(f"- {one}" for one in self.references)),
        )
        told = [f"### {heading}\n\n{text}" for heading, text in sections if text]
        return "\n\n".join([f"## {self.code}: {self.title}", *told]) + "\n"


def unwrapped(text: str) -> str:
    """A rule's text with a line for each paragraph and item; blocks of code stay as they are."""
    parts = text.split("```")
    return "```".join(
        _BREAK.sub(" ", part) if number % 2 == 0 else part for number, part in enumerate(parts)
    )
