"""Commands where a GPU runs: each in a process of its own, as its user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from placing import refused

pytestmark = pytest.mark.gpu

OPTIONS = ["--context", "64", "--quant", "nf4"]
TOKENS = 12


def said(*arguments: object) -> str:
    """What a command prints; it ends well and has nothing to complain of."""
    command = [sys.executable, "-m", "trimtab", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def told(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return found


@pytest.fixture
def lean(base: Path) -> list[str]:
    """Options of the smallest budget that the model with an adapter fits: layers are streamed."""
    told = refused(base, {"sql": tiny.adapter(base)}, gpu=1, cpu="1GiB")
    assert told["tier"] == "gpu:0"
    return ["--gpu", str(told["smallest"]), "--cpu", "1GiB", *OPTIONS]


@pytest.mark.skipif(not tiny.HAS_GEMMA4, reason="this transformers has no Gemma 4")
def test_the_demo() -> None:
    found = told("demo", "--count", "3")
    assert found["plan"]["budget"]["runs"] == "gpu:0"
    modes = {unit["mode"] for unit in found["plan"]["units"]}
    assert modes == {"resident", "streamed", "looked up", "idle"}
    assert len(found["answers"]) == 3
    assert all(one["right"] and one["same"] for one in found["answers"])
    tiers = {tier["tier"]: tier for tier in found["report"]["tiers"]}
    for name in ("gpu:0", "cpu"):
        tier = tiers[name]
        assert 0 < tier["measured"] <= tier["planned"] <= found["plan"]["totals"][name]
    assert (tiers["disk"]["measured"], tiers["disk"]["planned"]) == (0, 0)
    assert "every answer is the all-resident model's" in " ".join(said("demo").split())


def test_an_answer_is_that_of_the_resident_model(base: Path, lean: list[str]) -> None:
    adapter = tiny.adapter(base)
    asked = [base, "--adapter", f"sql={adapter}", "--raw", "--prompt", "select"]
    more = ["--max-new-tokens", TOKENS]
    found = told("run", *asked, *lean, *more)
    everything = told("run", *asked, *OPTIONS, *more)
    assert (found["adapter"], everything["adapter"]) == ("sql", "sql")
    assert found["tokens"] == everything["tokens"]
    assert len(found["tokens"]) == TOKENS
    assert found["report"]["bytes_per_token"] > 0 == everything["report"]["bytes_per_token"]
    assert found["text"] == tiny.tokenizer().decode(found["tokens"], skip_special_tokens=True)


def test_bench_captures_its_steps(base: Path, lean: list[str]) -> None:
    sizes = ["--prompt-tokens", "8", "--new-tokens", "16"]
    found = told("bench", base, "--adapter", f"sql={tiny.adapter(base)}", *lean, *sizes)
    assert found["steps"]["replayed"] > 16
    assert found["share"] == pytest.approx(found["decode"] / found["floor"])
    assert found["link_gbps"] > 0
    assert found["load_seconds"] > 0


def test_a_plan_without_sizes_is_of_what_is_free(base: Path) -> None:
    found = told("plan", base, *OPTIONS)
    assert found["budget"]["runs"] == "gpu:0"
    assert {unit["mode"] for unit in found["units"]} == {"resident"}
    assert found["forecast"]["basis"].endswith("of small kernels, as on an H200")


def test_doctor_measures_it() -> None:
    (gpu, *_) = told("doctor", "--measure")["gpus"]
    assert gpu["name"] in said("doctor", "--measure")
