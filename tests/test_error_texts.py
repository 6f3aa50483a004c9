"""The words of every error are written down."""

from __future__ import annotations

from error_texts import TARGET, texts
from trimtab.diagnosis.registry import codes, rule


def test_they_are_as_they_are_written_down() -> None:
    written = TARGET.read_text(encoding="utf-8").splitlines()
    assert texts() == written, "if that is what they are to say: python tests/error_texts.py"


def test_no_code_is_without_words() -> None:
    told = "\n".join(texts())
    own = {code for code in codes() if not rule(code).foreign}
    # Notes in the words of a plan or a fit; and what `taken` is given.
    elsewhere = {"TT210", "TT316", "TT318"}
    assert {code for code in own if f" {code} what: " not in told} == elsewhere
