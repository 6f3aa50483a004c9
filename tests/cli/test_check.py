"""`trimtab check` and `trimtab explain`: findings and their exit codes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import tiny
from trimtab.cli import main
from trimtab.diagnosis import page

FIELDS = {"code", "title", "confidence", "what", "why", "fix"}


def test_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.checkpoint("llama")
    asked = ["check", str(base), "--adapter", str(tiny.adapter(base)), "--context", "64"]
    assert main(asked) == 0
    assert capsys.readouterr() == ("nothing was found that would go wrong\n", "")
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "findings": []}


def test_problems_are_exit_4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    file = tmp_path / "map.json"
    file.write_text('{"transformer": 0}')
    asked = ["check", str(base), "--device-map", str(file), "--cpu", "1KiB"]
    assert main([*asked, "--json"]) == 4
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [one["code"] for one in findings] == ["TT201", "TT401"]
    assert all(set(one) >= FIELDS for one in findings)
    assert main(asked) == 4
    said = capsys.readouterr()
    assert said.err == ""
    for one in findings:
        assert f"error: {one['what']} [{one['code']}]\n" in said.out
        assert f"fix: {one['fix']}\n" in said.out


def test_no_such_model_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "./nowhere", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "TT105"


def test_explain_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tt401"]) == 0
    assert capsys.readouterr() == (page("TT401") + "\n", "")
    assert main(["explain", "TT401", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert set(found) >= FIELDS
    assert found["code"] == "TT401"


def test_explain_a_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("error: no room [TT403]\nsee: TT401\n"))
    assert main(["explain", "-", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [one["code"] for one in findings] == ["TT403", "TT401"]
    assert main(["explain", "nothing known"]) == 0
    assert capsys.readouterr().out == "nothing in that text is known here\n"
