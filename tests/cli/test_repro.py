"""`trimtab repro`, as a user calls it: one honest run, and what its scripts do when run alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny
from trimtab.cli import main
from trimtab.repro.report import Report
from trimtab.repro.subject import describe

FAILING = ["split-adapter", "split-adapter-same-map"]


@dataclass(frozen=True)
class Run:
    status: int
    told: dict[str, Any]
    markdown: str
    files: list[str]

    def cell(self, case: str) -> dict[str, Any]:
        return next(one for one in self.told["cells"] if one["case"] == case)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model from nothing but a config.json and an adapter's config."""
    folder = tmp_path_factory.mktemp("repro")
    base = tiny.checkpoint("llama")
    for name, source in (("my-model", base), ("my-lora", tiny.adapter(base))):
        config = "config.json" if source == base else "adapter_config.json"
        (folder / name).mkdir()
        (folder / name / config).write_bytes((source / config).read_bytes())
    out = folder / "report.md"
    asked = [str(folder / "my-model"), "--adapter", str(folder / "my-lora"), "--tiny"]
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *given, **how: lines.append(str(given[0])))
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        status = main(["repro", *asked, "--quant", "none", "--json", "-o", str(out)])
    files = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())
    return Run(status, json.loads(lines[-1]), out.read_text(encoding="utf-8"), files)


def test_the_matrix(honest: Run) -> None:
    assert honest.status == 0
    assert honest.told["schema_version"] == 1
    outcomes = {one["case"]: one["outcome"] for one in honest.told["cells"]}
    assert outcomes == {
        "whole": "works",
        "split": "equal",
        "split-adapter": "failed",
        "split-adapter-same-map": "failed",
        "trimtab-load": "equal",
    }
    assert honest.told["trimtab_works"]
    assert honest.cell("split")["parameters"]["Parameter meta"] > 0
    assert honest.cell("trimtab-load")["rests"]["disk"] > 0
    assert all(honest.cell(case)["codes"] for case in FAILING)


def test_the_markdown_tells_nothing_of_this_machine(honest: Run) -> None:
    text = honest.markdown
    assert text.startswith("# Adapter on a split base: my-model\n")
    assert not re.search(r"(?<![\w.:\"/<-])/(home|root|tmp|work|usr|var)\b", text)
    assert sys.prefix not in text
    assert str(Path.home()) not in text
    assert text.count("\n## ") == len(FAILING)
    for case in FAILING:
        assert honest.cell(case)["script"] in text
        assert f"`trimtab explain {honest.cell(case)['codes'][0]}`" in text


def test_nothing_is_left_beside_the_users_files(honest: Run) -> None:
    assert honest.files == ["my-lora/adapter_config.json", "my-model/config.json", "report.md"]


@pytest.mark.parametrize("case", FAILING)
def test_a_script_fails_alone_as_the_matrix_says(honest: Run, case: str, tmp_path: Path) -> None:
    cell = honest.cell(case)
    file = tmp_path / f"{case}.py"
    file.write_text(cell["script"])
    done = subprocess.run(
        [sys.executable, file.name],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = re.findall(r"^(\w+(?:\.\w+)*): (.*)$", done.stderr, re.MULTILINE)[-1]
    failure = cell["failure"]
    assert last[0].rpartition(".")[2] == failure["exception"]
    assert last[1].startswith(failure["message"].removesuffix(" [...]")[:60])
    assert cell["verdict"].startswith(f"{failure['exception']}: {last[1][:20]}")
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


# ------------------------------------------------------------------------------ without running


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine is asked; it answers with a report without cells."""
    given: dict[str, Any] = {}

    def pretend(model: str, adapter: str, device_map: Any, **options: Any) -> Report:
        given.update(options, model=model, adapter=adapter, device_map=device_map)
        return Report(describe(model, tiny=True, quant="none"), (), (), 1)

    monkeypatch.setattr("trimtab.repro.reproduce.reproduce", pretend)
    monkeypatch.setattr(Report, "markdown", lambda self: "the report\n")
    monkeypatch.setattr(Report, "ours", given.setdefault("ours", True))
    return given


def test_options(asked: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base, file = str(tiny.checkpoint("llama")), tmp_path / "map.json"
    file.write_text('{"": 0, "lm_head": "cpu"}')
    options = ["--adapter", "lora", "--device-map", str(file), "--quant", "int8", "--limit", "9"]
    more = ["--against", "peft==0.18.1,transformers==5.1.0", "-o", str(tmp_path / "out.md")]
    assert main(["repro", base, *options, *more]) == 0
    assert capsys.readouterr().out == "the report\n"
    assert (tmp_path / "out.md").read_text() == "the report\n"
    assert (asked["model"], asked["adapter"]) == (base, "lora")
    assert asked["device_map"] == {"": 0, "lm_head": "cpu"}
    assert (asked["quant"], asked["tiny"], asked["limit"]) == ("int8", False, 9)
    assert asked["against"] == {"peft": "0.18.1", "transformers": "5.1.0"}


def test_our_own_case_failing_is_exit_1(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "ours", False)
    assert main(["repro", str(tiny.checkpoint("llama")), "--tiny"]) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "an adapter is needed, but for a --tiny model"),
        (["--tiny", "--against", "numpy==1"], "'numpy' is not one of torch"),
        (["--tiny", "--limit", "0"], "--limit"),
        (["--tiny", "--quant", "int3"], "int3"),
        (["--tiny", "-o", "nowhere/report.md"], "there is no folder nowhere"),
        (["--tiny", "--device-map", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_usage(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["repro", str(tiny.checkpoint("llama")), *options]) == 2
    assert said in capsys.readouterr().err
    assert "model" not in asked


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repro", "./nowhere", "--tiny"]) == 1
    assert "[TT105]" in capsys.readouterr().err
