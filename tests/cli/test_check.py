"""`trimtab check` and `trimtab explain`: findings and their exit codes."""

from __future__ import annotations

import inspect
import io
import json
import shlex
import sys
from pathlib import Path

import pytest

import tiny
from trimtab.cli import main
from trimtab.cli.options import Planning
from trimtab.diagnosis import check, page

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


def faulty(tmp_path: Path, **given: object) -> list[str]:
    file = tmp_path / "map.json"
    file.write_text(json.dumps(given))
    base = tiny.checkpoint("llama")
    asked = ["check", str(base), "--device-map", str(file), "--fix", "--cpu", "1GiB"]
    return [*asked, "--adapter", f"sums={tiny.adapter(base)}", "--context", "64"]


def test_a_corrected_map_can_be_saved_and_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = faulty(tmp_path, transformer="cpu", lm_head="meta")
    assert main(asked) == 4
    said = capsys.readouterr()
    assert json.loads(said.out) == {"": "cpu"}
    assert said.err.startswith("error: the device map's key 'transformer' matches no module")
    assert "\nchanged: 'transformer': read as 'model'\n" in said.err
    assert "no map mends" not in said.err
    told, command = said.err.rstrip("\n").splitlines()[-2:]
    assert told == "saved as fixed.json, this runs it:"
    # The command, as it is told.
    (tmp_path / "fixed.json").write_text(said.out)
    words = shlex.split(command)
    assert words[:2] == ["trimtab", "run"]
    assert words[-2:] == ["--context", "64"]
    words = [str(tmp_path / one) if one == "fixed.json" else one for one in words[1:]]
    assert main([*words, "--prompt", "hi", "--max-new-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapter"] == "sums"


def test_a_corrected_map_is_a_field_of_the_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = faulty(tmp_path, transformer=1)
    asked[-3] = "sums=./nowhere"
    assert main([*asked, "--json"]) == 4
    told = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in told["findings"]] == ["TT301", "TT204", "TT201"]
    assert told["fix"] == {
        "device_map": {"": "cpu"},
        "command": f"trimtab run {tiny.checkpoint('llama')} --device-map fixed.json "
        "--adapter sums=./nowhere --cpu 1GiB --context 64",
        "changes": [
            "'transformer': read as 'model'",
            "'transformer': mapped to cpu, since 1 is a second GPU",
            "lm_head.weight: mapped to cpu, since no key covers it",
        ],
        "left": [told["findings"][0]],
    }


def test_what_no_map_mends_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"transformer": "cpu"}')
    asked = ["check", str(tiny.checkpoint("llama")), "--device-map", str(file), "--fix"]
    assert main([*asked, "--cpu", "1KiB"]) == 4
    assert "\nno map mends: as the device map places it, the model does not fit" in (
        capsys.readouterr().err
    )
    asked[1] = str(tmp_path)
    assert main(asked) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("no map can be made: the names of the model are not known\n")
    assert main([*asked, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["fix"] is None


def test_a_right_map_comes_out_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = faulty(tmp_path, **{"": "cpu"})
    assert main(asked[:-4]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"": "cpu"}
    assert said.err.startswith("nothing was found that would go wrong\nsaved as fixed.json")


def test_there_must_be_a_map_to_correct(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "./nowhere", "--fix"]) == 2
    assert "there is no --device-map to correct" in capsys.readouterr().err


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


def test_every_option_is_an_argument() -> None:
    told = Planning(model="m", gpu="6GiB").arguments()
    assert set(told) <= set(inspect.signature(check).parameters)
    assert check(**told | {"model": "./nowhere"})[0].code == "TT105"
