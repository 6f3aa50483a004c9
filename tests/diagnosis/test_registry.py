"""Each code has a title, a page, and a place where it is raised."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import trimtab
from trimtab.diagnosis.registry import CODE, FAMILIES, codes, rule
from trimtab.errors import TITLES

SOURCE = Path(trimtab.__file__).parent
RULES = SOURCE / "diagnosis" / "rules"
HEADINGS = [
    "What is seen",
    "Why it happens",
    "Which versions",
    "What to do",
    "What does not help",
    "Whose it is",
    "References",
]


@functools.cache
def used_codes() -> set[str]:
    """Codes that the source names as strings of their own, apart from titles and pages."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "errors.py" or RULES in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if CODE.fullmatch(node.value) else set()
    return found


def test_each_code_has_one_title_and_one_page() -> None:
    assert list(TITLES) == sorted(TITLES)
    assert len(set(TITLES.values())) == len(TITLES)
    assert codes() == tuple(TITLES)
    assert all(title[0] == title[0].lower() or title[0:4] == "PEFT" for title in TITLES.values())
    assert all(code[:3] in FAMILIES for code in codes())


def test_each_code_that_is_raised_has_a_page() -> None:
    assert used_codes() - set(codes()) == set()


def test_each_page_is_of_a_code_that_is_raised_or_foreign() -> None:
    idle = [code for code in codes() if code not in used_codes() and not rule(code).foreign]
    assert idle == []


@pytest.mark.parametrize("code", codes())
def test_a_page_says_all_that_it_must(code: str) -> None:
    told = rule(code)
    assert told.code == code
    assert told is rule(code.lower())
    assert all((told.seen, told.why, told.versions, told.fix, told.library))
    assert "\n\n" not in told.seen
    assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", one) for one in told.references)
    headings = re.findall(r"^### (.*)$", told.markdown(), re.MULTILINE)
    assert headings == [one for one in HEADINGS if one in headings]
    assert told.markdown().count("```") % 2 == 0
    mentioned = set(CODE.findall(told.markdown()))
    assert mentioned <= set(codes())


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(LookupError, match="there is no page 'TT700'; codes go from TT101 to TT6"):
        rule("TT700")
