"""What an error or a text says, by the codes in it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import safetensors.torch
import torch

import tiny
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
    assert one.what.startswith("The disk ran full while the files of the disk tier were made")


def test_codes_in_a_text_once_the_surest_first() -> None:
    found = explain("TT502, then TT201 and [TT401], TT502 again; TT999 and TT5021 are none")
    assert [(one.code, one.confidence) for one in found] == [
        ("TT401", "certain"),
        ("TT502", "likely"),
        ("TT201", "likely"),
    ]


@pytest.mark.parametrize("text", ["", "KeyError: 22", "RuntimeError: CUDA error", "ATT401x"])
def test_no_match(text: str) -> None:
    assert explain(text) == []
    assert explain(RuntimeError(text)) == []


PACKAGES = "/venv/lib/python3.11/site-packages"
BALANCED = f"""Traceback (most recent call last):
  File "run.py", line 1, in <module>
  File "{PACKAGES}/peft/peft_model.py", line 1, in load_adapter
  File "{PACKAGES}/accelerate/utils/modeling.py", line 1, in get_balanced_memory
TypeError: unhashable type: 'set'
"""


def test_versions_weigh() -> None:
    def sure(text: str, version: str | None) -> tuple[str, str, bool]:
        (one,) = explain(text, {"peft": version}.get)
        return one.code, one.confidence, "is not known in that version" in one.why

    assert sure(BALANCED, None) == ("TT217", "certain", False)
    assert sure(BALANCED, "0.18.1") == ("TT217", "certain", False)
    assert sure(BALANCED, "0.21.2") == ("TT217", "likely", True)
    assert sure(f"peft==0.18.1\n{BALANCED}", "0.21.2") == ("TT217", "certain", False)
    assert sure(f"peft==0.20.0\n{BALANCED}", "0.18.1") == ("TT217", "likely", True)


@pytest.mark.parametrize(
    ("frames", "raised", "codes"),
    [
        (
            "peft/tuners/lora/layer.py:forward",
            "RuntimeError: Expected all tensors to be on the same device, but got mat2 is on cpu",
            [("TT220", "likely")],
        ),
        (
            "transformers/modeling_utils.py:caching_allocator_warmup",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.",
            [("TT405", "certain")],
        ),
        (
            "transformers/models/llama/modeling_llama.py:forward",
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.",
            [("TT404", "likely")],
        ),
        ("mine/model.py:forward", "torch.OutOfMemoryError: CUDA out of memory.", []),
    ],
)
def test_what_needs_a_gpu_to_be_met(frames: str, raised: str, codes: list[tuple[str, str]]) -> None:
    file, _, function = frames.partition(":")
    head = "Traceback (most recent call last):\n"
    text = f'{head}  File "{PACKAGES}/{file}", line 1, in {function}\n{raised}\n'
    assert [(one.code, one.confidence) for one in explain(text)] == codes


def test_an_exception_of_another_library() -> None:
    def fail() -> None:
        raise AssertionError("N must be divisible by block_n")

    with pytest.raises(AssertionError) as caught:
        fail()
    (one,) = explain(caught.value)
    assert (one.code, one.confidence, one.severity) == ("TT513", "certain", "error")
    assert [found.code for found in explain(AssertionError("N must be divisible by block_n"))] == [
        "TT513"
    ]


def test_the_last_exception_of_a_chain_comes_first() -> None:
    cause = "Traceback (most recent call last):\nAssertionError: N must be divisible by block_n\n"
    between = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert [one.code for one in explain(cause + between + BALANCED, {}.get)] == ["TT217", "TT513"]


@pytest.mark.parametrize(
    ("warning", "code"),
    [
        ("UserWarning: Found missing adapter keys while loading the checkpoint: ['a']", "TT303"),
        ("so far no modules could be assigned to the following devices due to", "TT221"),
    ],
)
def test_what_a_log_warns_of(warning: str, code: str) -> None:
    assert [(one.code, one.confidence) for one in explain(f"a log\n{warning}\nmore")] == [
        (code, "likely")
    ]
    assert [one.code for one in explain(f"{warning}\n{BALANCED}", {}.get)] == ["TT217", code]


def test_a_message_alone_is_less_sure() -> None:
    message = "Some modules are dispatched on the CPU or the disk."
    assert [one.confidence for one in explain(f"ValueError: {message}")] == ["likely"]
    assert [one.confidence for one in explain(f"it says {message}")] == ["possible"]


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


def _merges(at: Path) -> None:
    folder = tiny.checkpoint("llama")
    tiny.reference(folder, "nf4", tiny.adapter(folder)).merge_adapter()


def _lacks_tensors(at: Path) -> None:
    folder = tiny.writable(tiny.adapter(tiny.checkpoint("llama")), at)
    tiny.rewrite(folder, lambda tensors: tensors.pop(min(tensors)))
    tiny.reference(tiny.checkpoint("llama"), adapters=folder)


def _no_room(at: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # a card that is told of, and too small
        patch.setattr(accelerate.utils.modeling, "is_mps_available", lambda: True)
        accelerate.infer_auto_device_map(tiny.MODELS["llama"](), {"mps": 10, "cpu": 10**9})


def _wrong_key(at: Path) -> None:
    model = tiny.MODELS["llama"]()
    accelerate.utils.modeling.check_device_map(model, {"": "cpu", "transformer.h.0": "disk"})


@pytest.mark.parametrize(
    ("code", "run"),
    [("TT309", _merges), ("TT303", _lacks_tensors), ("TT221", _no_room), ("TT201", _wrong_key)],
)
@pytest.mark.filterwarnings("default")
def test_what_the_stock_stack_warns_of(
    code: str,
    run: Callable[[Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In its own words: it is run, and computes something else than it was asked to."""
    caplog.set_level("INFO")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(tmp_path)
    log = "\n".join([*(str(one.message) for one in told), *caplog.messages])
    assert code in [one.code for one in explain(f"a log\n{log}\nmore")]
