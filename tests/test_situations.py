"""Each code is shown by a situation, in the words that are written there, and not by its twin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny
from situations import SILENT, SITUATIONS, Situation
from trimtab.diagnosis import explain
from trimtab.diagnosis.registry import rule
from trimtab.errors import TITLES, TrimtabError

TRACEBACKS = Path(__file__).parent / "diagnosis" / "tracebacks"

TWINS = {
    "TT211": "unrelated/torch-meta-item",
    "TT212": "unrelated/torch-meta-module",
    "TT213": "seen/TT202-map-lacks-a-norm",
    "TT214": "seen/TT202-map-lacks-a-norm",
    "TT215": "unrelated/key-of-text",
    "TT216": "unrelated/key",
    "TT217": "unrelated/set-in-set",
    "TT218": "seen/TT213-catch-all",
    "TT219": "seen/TT103-no-gpu",
    "TT220": "unrelated/torch-mixed-devices",
    "TT317": "unrelated/torch-dtype",
    "TT405": "seen/TT404-forward",
    "TT511": "unrelated/torch-attribute",
    "TT512": "seen/TT307-unknown-field",
    "TT513": "unrelated/assertion",
    "TT608": "seen/TT101-flash-attention",
}
"""Faults of others: the traceback that was made of each, and a near one of something else."""


def told(one: Situation, at: Path, wrong: bool) -> list[tuple[str, str]]:
    """The codes that came of it, and what they say."""
    try:
        found = [(each.code, each.what) for each in one.run(at, wrong) or ()]
    except TrimtabError as fault:
        found = [(fault.code, fault.what)]
    said = []
    for code, what in found:
        for place, name in ((at, "DIR"), (tiny.checkpoint("llama"), "BASE")):
            what = what.replace(str(place), name)
        what = re.sub(r"\d+(\.\d\d)? ([KMG]i)?B\b", "SIZE", what)
        said.append((code, re.sub(r"\b[0-9a-f]{16}\b", "FINGERPRINT", what)))
    return said


@pytest.mark.parametrize("one", SITUATIONS, ids=lambda one: f"{one.code}{one.run.__name__}")
def test_a_situation_and_its_twin(one: Situation, tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.mkdir()
    right.mkdir()
    assert (one.code, one.says) in told(one, wrong, wrong=True)
    assert one.code not in {code for code, _ in told(one, right, wrong=False)}


@pytest.mark.parametrize("code", SILENT)
def test_a_silent_fault_of_others_is_one(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (True, False):
        at = tmp_path / str(wrong)
        at.mkdir()
        monkeypatch.chdir(at)
        assert SILENT[code](at, wrong) is wrong


@pytest.mark.parametrize("code", TWINS)
def test_a_traceback_and_its_twin(code: str) -> None:
    def named(pattern: str) -> list[str]:
        """The first code that is told of each."""
        files = sorted(TRACEBACKS.glob(f"{pattern}-5.*.txt"))
        assert files
        said = [explain(one.read_text(encoding="utf-8"), lambda _: None) for one in files]
        return [found[0].code if found else "" for found in said]

    assert set(named(f"seen/{code}-*")) == {code}
    assert code not in named(TWINS[code])


def test_every_code_has_a_situation_and_a_twin() -> None:
    own = {code for code in TITLES if not rule(code).foreign}
    assert {one.code for one in SITUATIONS} >= own
    assert {one.code for one in SITUATIONS} | set(SILENT) | set(TWINS) == set(TITLES)
