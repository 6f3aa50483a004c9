"""The scripts: what they import, what they copy, how they name things."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from trimtab.repro.cases import STORED, Case, Subject, Tiny
from trimtab.repro.script import literal, script

STOCK = {"torch", "peft", "transformers", "huggingface_hub"}

SPLIT = {"model.layers.0": "cpu", "model.layers.1": "disk"}
LOCAL = Subject(
    shown="my-model",
    model=str(Path("models/my-model").resolve()),
    adapter=str(Path("models/my-lora").resolve()),
    model_class="LlamaForCausalLM",
    dtype="bfloat16",
    here="cpu",
    device_map=SPLIT,
    quants=("nf4-dq", "nf4"),
)
HUB = dataclasses.replace(LOCAL, model="owner/model", adapter="owner/lora")
TINY = dataclasses.replace(
    LOCAL, model="", adapter="", tiny=Tiny({"num_hidden_layers": 2}, {"peft_type": "LORA"})
)
GPU = dataclasses.replace(HUB, here=0, device_map={"": 0, "model.vision_tower": "cpu"})
EVERY = [
    (subject, case, quant)
    for subject in (LOCAL, HUB, TINY, GPU)
    for case in Case
    for quant in ("none", "int8", "nf4-dq", STORED)
]


def imported(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


def test_they_need_the_stock_stack_alone() -> None:
    import sys

    for subject, case, quant in EVERY:
        needed = imported(script(subject, case, quant)) - sys.stdlib_module_names
        assert needed <= STOCK | ({"trimtab"} if case is Case.TRIMTAB else set())


def test_no_name_is_missing_or_unused(tmp_path: Path) -> None:
    ruff = shutil.which("ruff")
    for number, (subject, case, quant) in enumerate(EVERY):
        text = script(subject, case, quant)
        compile(text, case.value, "exec")
        assert "\n\n\n\n" not in text
        assert max(map(len, text.splitlines())) <= 100
        (tmp_path / f"{case.value}-{number}.py").write_text(text)
    if ruff:
        subprocess.run([ruff, "check", "--isolated", "--select=F,E7", str(tmp_path)], check=True)


def test_no_folder_of_this_machine_is_in_them() -> None:
    for subject, case, quant in EVERY:
        assert str(Path.cwd()) not in script(subject, case, quant)


def test_folders_are_arguments_and_hub_names_are_written() -> None:
    text = script(LOCAL, Case.ADAPTER, "none")
    assert "MODEL = os.path.abspath(sys.argv[1])\nADAPTER = os.path.abspath(sys.argv[2])\n" in text
    assert "Run it as: python split-adapter.py MODEL ADAPTER" in text
    assert 'MODEL = "owner/model"\nADAPTER = "owner/lora"\n' in script(HUB, Case.ADAPTER, "none")
    mixed = dataclasses.replace(HUB, adapter=LOCAL.adapter)
    assert "ADAPTER = os.path.abspath(sys.argv[1])\n" in script(mixed, Case.ADAPTER, "none")


@pytest.mark.parametrize("case", [Case.SPLIT, Case.ADAPTER, Case.SAME_MAP])
def test_a_base_on_the_disk_is_copied(case: Case) -> None:
    local, hub = script(LOCAL, case, "none"), script(HUB, case, "none")
    assert 'shutil.copytree(MODEL, "model")' in local
    assert 'shutil.copytree(snapshot_download(MODEL), "model")' in hub
    assert 'from_pretrained(\n    "model",\n' in local
    assert 'offload_folder="offload"' in local


def test_what_is_not_written_to_is_not_copied() -> None:
    for subject, case in [(LOCAL, Case.WHOLE), (LOCAL, Case.TRIMTAB), (GPU, Case.ADAPTER)]:
        text = script(subject, case, "none")
        assert "copytree" not in text
        assert "offload_folder" not in text


def test_the_cases_differ_in_how_the_adapter_comes() -> None:
    assert "PeftModel" not in script(HUB, Case.SPLIT, "none")
    assert "PeftModel.from_pretrained(model, ADAPTER)\n" in script(GPU, Case.ADAPTER, "none")
    assert "(model, ADAPTER, device_map=MAP)\n" in script(GPU, Case.SAME_MAP, "none")
    whole = script(GPU, Case.WHOLE, "none")
    assert 'device_map={"": 0}' in whole
    assert whole.count("\nanswer(model)\n") == 2
    assert "MAP" not in whole


def test_formats() -> None:
    text = script(GPU, Case.ADAPTER, "nf4-dq")
    assert "bnb_4bit_use_double_quant=True" in text
    assert "llm_int8_enable_fp32_cpu_offload=True" in text
    assert "support_avx512bf16_for_cpu" not in text, "only a CPU repacks"
    assert "bnb_4bit_use_double_quant=False" in script(GPU, Case.ADAPTER, "nf4")
    assert "llm_int8" not in script(GPU, Case.WHOLE, "nf4")
    for quant in ("nf4", STORED):
        assert "support_avx512bf16_for_cpu" in script(HUB, Case.WHOLE, quant)
    assert "load_in_8bit=True" in script(GPU, Case.WHOLE, "int8")
    for quant in ("none", STORED):
        assert "BitsAndBytesConfig" not in script(GPU, Case.WHOLE, quant)
    assert 'quant="auto"' in script(GPU, Case.TRIMTAB, STORED)


def test_literals() -> None:
    assert literal({"a": ["b", None, 1e-06], 'x"y': True}) == (
        '{"a": ["b", None, 1e-06], "x\\"y": True}'
    )
    told = {"name": {"word " * 5 + str(number): "x" * 20 for number in range(3)}, "n": [1, 2]}
    text = literal(told)
    assert ast.literal_eval(text) == told
    assert max(map(len, text.splitlines())) <= 96
    assert text.splitlines()[1] == '    "name": {'
