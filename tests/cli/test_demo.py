"""`trimtab demo`: on less memory than the model takes, and its answers checked."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence

import pytest

import tiny
from trimtab.cli import demo, main
from trimtab.placement import Placement

NEEDS_GEMMA4 = pytest.mark.skipif(not tiny.HAS_GEMMA4, reason="this transformers has no Gemma 4")


@NEEDS_GEMMA4
def test_the_gemma4_demo_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--count", "2"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "▓ streamed" in said.out
    assert "every answer is the all-resident model's" in " ".join(said.out.split())


@NEEDS_GEMMA4
def test_the_gemma4_demo_as_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--count", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    modes = {unit["mode"] for unit in found["plan"]["units"]}
    assert modes == {"resident", "streamed", "looked up", "idle"}
    assert all(one["mode"] == "idle" for one in found["plan"]["units"] if one["kind"] == "tower")
    assert len(found["answers"]) == 3
    assert all(one["right"] and one["same"] for one in found["answers"])
    assert all(one["base"] != one["adapter"] for one in found["answers"])
    for tier in found["report"]["tiers"]:
        assert 0 < tier["measured"] <= tier["planned"] <= found["plan"]["totals"][tier["tier"]]


@NEEDS_GEMMA4
def test_a_gemma4_answer_that_differs_is_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = demo.ask

    def differently(placed: Placement, questions: Sequence[str]) -> list[tuple[str, str]]:
        answers = ask(placed, questions)
        return [("?", "?")] if placed.plan.of_mode("streamed") else answers

    monkeypatch.setattr(demo, "ask", differently)
    assert main(["demo", "--count", "1"]) == 1
    said = capsys.readouterr()
    assert "DIFFERS" in said.out
    assert "1 of 1 answers differ" in said.out


def test_without_bitsandbytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert main(["demo"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "error: the demo needs the package bitsandbytes, which is not installed [TT101]",
        'fix: pip install "trimtab[demo]"',
        "see: trimtab explain TT101",
    ]
