"""What an error or a text says, by the codes in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trimtab.diagnosis import Finding, explain, page
from trimtab.errors import AdapterFault, MemoryFault


def test_an_error_of_ours() -> None:
    error = MemoryFault("TT403", "the disk of /x is full", fix="free space")
    assert explain(error) == [Finding("TT403", "the disk of /x is full", fix="free space")]


def test_an_error_of_ours_behind_another() -> None:
    ours = AdapterFault("TT301", "no adapter")
    with pytest.raises(ValueError, match="while") as caught:
        raise ValueError("while loading") from ours
    assert explain(caught.value) == [Finding.from_error(ours)]


def test_causes_that_go_in_circles_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert explain(one) == []


def test_the_printed_error_of_ours() -> None:
    text = str(MemoryFault("TT403", "the disk of /x is full", fix="free space"))
    (one,) = explain(f"a log\n{text}\nmore of the log")
    assert (one.code, one.confidence) == ("TT403", "certain")
    assert one.what == "The disk ran full while the files of the disk tier were made."


def test_codes_in_a_text_in_their_order_and_once() -> None:
    found = explain("TT502 and then [TT401], TT502 again; TT999 and TT5021 are none")
    assert [(one.code, one.confidence) for one in found] == [
        ("TT502", "likely"),
        ("TT401", "certain"),
    ]


@pytest.mark.parametrize("text", ["", "KeyError: 22", "RuntimeError: CUDA error", "ATT401x"])
def test_no_match(text: str) -> None:
    assert explain(text) == []
    assert explain(RuntimeError(text)) == []


def test_texts_have_a_line_a_paragraph() -> None:
    (one,) = explain("TT210")
    assert one.confidence == "certain"
    assert one.why.splitlines()[0] == "None of this is an error:"
    items = one.why.splitlines()[2:]
    assert len(items) == 5
    assert all(item.startswith("- ") and item.endswith(".") for item in items)


def test_a_page() -> None:
    told = page("tt403")
    assert told.startswith("## TT403: the disk is full\n\n### What is seen\n\nThe disk ran full")
    with pytest.raises(LookupError, match="there is no page 'TT999'"):
        page("TT999")


def test_explaining_imports_no_torch() -> None:
    code = (
        "import sys, trimtab; assert trimtab.explain('TT204'); "
        "print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_way_back_of_a_rewritten_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program on the page of TT507 gives the base's own tensors."""
    base = {"model.norm.weight": torch.ones(2), "model.layers.0.q_proj.weight": torch.eye(2)}
    rewritten = {
        "base_model.model.model.norm.weight": base["model.norm.weight"],
        "base_model.model.model.layers.0.q_proj.base_layer.weight": torch.eye(2),
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight": torch.zeros(1, 2),
    }
    (tmp_path / "my-model").mkdir()
    safetensors.torch.save_file(rewritten, tmp_path / "my-model" / "model.safetensors")
    program = page("TT507").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    restored = safetensors.torch.load_file("restored.safetensors")
    assert set(restored) == set(base)
    assert all(torch.equal(restored[name], base[name]) for name in base)
