"""`trimtab bench`: a table, or an object with the same figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from trimtab.cli import main

MAP = {"": "cpu", "model.layers.1": "disk", "model.layers.3": "disk"}


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    file = tmp_path / "map.json"
    file.write_text(json.dumps(MAP))
    sizes = ["--cpu", "2GiB", "--disk", "1GiB", "--context", "64", "--quant", "nf4"]
    folder = tiny.checkpoint("llama")
    return ["bench", str(folder), *sizes, "--device-map", str(file), "--prompt-tokens", "8"]


def test_an_object(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--new-tokens", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert found["share"] == pytest.approx(found["decode"] / found["floor"])
    assert found["load_seconds"] > 0


def test_a_table(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--new-tokens", "4"]) == 0
    said = capsys.readouterr().out
    for row in ("decode", "forecast", "prefill", "share of the floor", "a CPU runs"):
        assert row in said
