"""`trimtab run`, and `plan --save` before it: the answer, who gives it, and on what plan."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from placing import refused
from situations.situation import edit, lora
from trimtab.cli import main
from trimtab.plan import Plan

TOKENS = 6
OPTIONS = ["--context", "64", "--quant", "nf4"]


@pytest.fixture
def lean(base: Path) -> list[str]:
    """Options of the smallest budget that the model with an adapter fits: layers are streamed."""
    told = refused(base, {"sql": tiny.adapter(base)}, cpu=1, disk="1GiB")
    return ["--cpu", str(told["smallest"]), "--disk", "1GiB", *OPTIONS]


def run(capsys: pytest.CaptureFixture[str], *arguments: object, noted: str = "") -> dict[str, Any]:
    assert main(["run", *map(str, arguments), "--json", "--max-new-tokens", str(TOKENS)]) == 0
    said = capsys.readouterr()
    assert said.err == noted
    found: dict[str, Any] = json.loads(said.out)
    return found


def expected(base: Path, adapter: Path | None, text: str) -> list[int]:
    """What the stock model answers, all of it in memory."""
    model = tiny.reference(base, "nf4", adapter)
    inputs = tiny.tokenizer()(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return [int(one) for one in tokens[0, inputs["input_ids"].shape[1] :]]


def test_tokens_are_those_of_the_resident_model(
    base: Path, lean: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tiny.adapter(base)
    asked = [base, "--adapter", f"sql={adapter}", *lean, "--raw", "--prompt", "select"]
    found = run(capsys, *asked)
    assert list(found) == ["schema_version", "text", "tokens", "adapter", "report"]
    assert found["adapter"] == "sql"
    assert found["tokens"] == expected(base, adapter, "select")
    assert found["text"] == tiny.tokenizer().decode(found["tokens"], skip_special_tokens=True)
    assert found["report"]["bytes_per_token"] > 0
    assert found["report"]["adapters"]["sql"]["modules"] == 42
    bare = run(capsys, *asked, "--use", "base")
    assert bare["adapter"] is None
    assert bare["tokens"] == expected(base, None, "select") != found["tokens"]


def test_the_text_alone_is_on_stdout(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [base, *OPTIONS, "--prompt", "hello"]
    found = run(capsys, *asked)
    assert main(["run", *map(str, asked), "--max-new-tokens", str(TOKENS)]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (found["text"] + "\n", "")


def test_a_prompt_has_the_chat_template(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "<bos>[user]hello[assistant]"
    asked = [base, *OPTIONS]
    templated = run(capsys, *asked, "--prompt", "hello")
    raw = run(capsys, *asked, "--prompt", said, "--raw")
    assert templated["tokens"] == raw["tokens"]


@pytest.mark.parametrize("prompt", [["--prompt", "-"], []])
def test_a_prompt_from_stdin(
    base: Path,
    prompt: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    piped = run(capsys, base, *OPTIONS, *prompt)
    assert piped["tokens"] == run(capsys, base, *OPTIONS, "--prompt", "hello")["tokens"]


def test_several_adapters(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tiny.adapter(base), tiny.adapter(base, seed=2)
    asked = [base, *OPTIONS, "--adapter", f"a={first}", "--adapter", f"b={second}"]
    asked += ["--prompt", "x", "--raw"]
    assert run(capsys, *asked)["tokens"] == expected(base, first, "x")
    found = run(capsys, *asked, "--use", "b")
    assert (found["adapter"], found["tokens"]) == ("b", expected(base, second, "x"))


def test_a_name_that_is_not_loaded(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", str(base), *OPTIONS, "--prompt", "x", "--use", "sql"]
    assert main(asked) == 1
    assert "no adapter named 'sql' is loaded; loaded: none [TT311]" in capsys.readouterr().err


def test_an_answer_has_what_is_left_of_the_context(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", str(base), "--context", "16", "--prompt", "hello", "--raw", "--json"]
    assert main(asked) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 11
    assert main([*asked[:-4], "--prompt", "x" * 16, "--raw"]) == 1
    assert "the prompt has 16 tokens, and 16 are planned for [TT606]" in capsys.readouterr().err


def test_more_than_the_context(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", str(base), "--context", "16", "--prompt", "x", "--max-new-tokens", "16"]
    assert main(asked) == 1
    assert "[TT606]" in capsys.readouterr().err


def test_a_saved_plan_is_carried_out(
    base: Path, lean: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tiny.adapter(base)
    file = tmp_path / "plan.json"
    asked = [str(base), "--adapter", f"sql={adapter}", *lean]
    assert main(["plan", *asked, "--save", str(file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned == json.loads(file.read_text())
    assert planned["schema_version"] == 1
    assert {"units", "totals", "forecast"} <= set(planned)
    assert Plan.load(file).of_mode("streamed")
    direct = run(capsys, *asked, "--prompt", "hello")
    saved = run(capsys, base, "--plan", file, "--prompt", "hello")
    assert saved == direct


def test_a_plan_of_another_checkpoint(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main(["plan", str(base), "--save", str(file), "--json"]) == 0
    capsys.readouterr()
    other = str(tiny.checkpoint("qwen3"))
    assert main(["run", other, "--plan", str(file), "--prompt", "x"]) == 1
    assert "[TT205]" in capsys.readouterr().err


def test_an_adapter_of_another_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edit(lora(tmp_path), base_model_name_or_path="somebody/another-model")
    model = tiny.writable(base, tmp_path)
    asked = [str(model), *OPTIONS, "--adapter", str(folder), "--prompt", "x"]
    noted = f"note: {folder} was made for somebody/another-model, the base is {model}\n"
    run(capsys, *asked, "--allow-other-base", noted=noted)


def test_an_adapter_with_tensors_that_match_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stray(tensors: dict[str, Any]) -> None:
        key = next(iter(tensors))
        tensors[key.replace("layers.0", "layers.99")] = tensors[key]

    folder = tiny.rewrite(tiny.writable(tiny.adapter(base), tmp_path), stray)
    asked = [str(base), *OPTIONS, "--adapter", str(folder), "--prompt", "x"]
    assert main(["run", *asked]) == 1
    assert "[TT303]" in capsys.readouterr().err
    key = "base_model.model.model.layers.99.mlp.down_proj.lora_A.weight"
    noted = f"note: 1 tensors of {folder} match nothing and are left out: {key}\n"
    run(capsys, *asked, "--allow-unused", noted=noted)


def test_the_quantized_base_is_saved(
    base: Path, lean: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = [str(base), *lean, "--save-quantized", str(out)]
    assert main(["run", *asked]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: ")
    assert said.out.endswith(" of tensors in nf4\n")
    assert said.err == "wrote model.safetensors\n"
    assert main(["run", *asked]) == 1
    assert f"{out} is there already and not empty [TT516]" in capsys.readouterr().err

    # Saved in passing, the answer is the same; and so it is from what was saved.
    passing = ["run", *asked[:-1], str(tmp_path / "two"), "--prompt", "hello", "--json"]
    assert main([*passing, "--max-new-tokens", str(TOKENS)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["saved"]["folder"] == str(tmp_path / "two")
    assert found["saved"]["files"] == ["model.safetensors"]
    again = run(capsys, out, "--context", 64, "--prompt", "hello")
    assert again["tokens"] == found["tokens"]
    assert main(["run", *asked[:-1], str(tmp_path / "three"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["tokens"], found["adapter"]) == (None, [], None)
