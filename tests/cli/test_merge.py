"""`trimtab merge`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tiny
from trimtab.cli import main
from trimtab.merge import merge


def test_it_writes_what_the_function_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny.checkpoint("llama")
    first, second = tiny.adapter(base), tiny.adapter(base, seed=2)
    out = tmp_path / "out"
    asked = [str(base), str(first), str(second), "-o", str(out), "--json"]
    assert main(["merge", *asked, "--weight", "1", "--weight", "0.5"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == "wrote model.safetensors\n"
    done = merge(base, [first, second], tmp_path / "direct", weights=[1, 0.5])
    assert found == {**done.to_dict(), "schema_version": 1, "folder": str(out)}
    assert found["adapters"][1] == {"source": str(second), "weight": 0.5}
    here, there = (load_file(one / "model.safetensors") for one in (out, done.folder))
    assert all(here[key].equal(there[key]) for key in there)


@pytest.mark.filterwarnings("ignore:Model:UserWarning")  # of PEFT, as the adapter is made
def test_a_line_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.checkpoint("llama-tied")
    adapter = tiny.adapter(base, targets=["embed_tokens"])
    assert main(["merge", str(base), str(adapter), "-o", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: ")
    assert lines[0].endswith("2 of 57 tensors changed or added")
    assert lines[1].startswith("lm_head.weight and model.embed_tokens.weight were one tensor")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.checkpoint("llama")
    asked = ["merge", str(base), str(tiny.adapter(base)), "-o", str(tmp_path)]
    (tmp_path / "mine").write_text("")
    assert main(asked) == 1
    assert "is there already and not empty [TT318]" in capsys.readouterr().err
    assert main([*asked, "--weight", "1", "--weight", "2"]) == 2
    assert main(asked[:-2]) == 2
