"""docs/codes.md is what the rules say."""

from __future__ import annotations

import make_code_pages  # of scripts/
from trimtab.diagnosis.registry import codes


def test_the_file_is_up_to_date() -> None:
    text = make_code_pages.TARGET.read_text(encoding="utf-8")
    assert text == make_code_pages.render(), "run python scripts/make_code_pages.py"


def test_every_code_is_listed_and_has_an_anchor() -> None:
    text = make_code_pages.render()
    for code in codes():
        assert text.count(f"](#{code.lower()})") == 1
        assert text.count(f'<a id="{code.lower()}"></a>') == 1
