from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from trimtab.errors import EnvironmentFault, FormatFault
from trimtab.quantize import quantization_config, resolve_quant

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("asked", "stored", "found"),
    [
        ("auto", None, "none"),
        ("nf4-dq", None, "nf4-dq"),
        ("auto", FOUR, "nf4"),
        ("nf4", FOUR, "nf4"),
        ("auto", {**FOUR, "bnb_4bit_use_double_quant": True}, "nf4-dq"),
        ("auto", {**FOUR, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        ("auto", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ],
)
def test_the_format_is_resolved(asked: str, stored: dict[str, Any] | None, found: str) -> None:
    assert resolve_quant(asked, stored) == found


@pytest.mark.parametrize(
    ("asked", "stored", "said"),
    [
        ("q4", None, "the storage format 'q4' is not supported"),
        ("int8", FOUR, "the checkpoint is stored in nf4, and cannot be loaded as int8"),
        ("none", FOUR, "the checkpoint is stored in nf4, and cannot be loaded as none"),
        (
            "auto",
            {"quant_method": "gptq", "bits": 4},
            "the checkpoint is stored in a format that is not supported: gptq",
        ),
        (
            "auto",
            {**FOUR, "bnb_4bit_quant_storage": "bfloat16"},
            "the checkpoint is stored in a format that is not supported: "
            "bitsandbytes nf4 packed as bfloat16",
        ),
    ],
)
def test_a_format_that_cannot_be(asked: str, stored: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(FormatFault) as caught:
        resolve_quant(asked, stored)
    assert (caught.value.code, caught.value.what) == ("TT509", said)


def test_the_config_for_transformers() -> None:
    assert quantization_config("none", "bfloat16") is None
    double = quantization_config("fp4-dq", "float16")
    assert double is not None
    assert double.load_in_4bit
    assert double.bnb_4bit_quant_type == "fp4"
    assert double.bnb_4bit_use_double_quant
    assert double.bnb_4bit_compute_dtype is torch.float16
    eight = quantization_config("int8", "bfloat16")
    assert eight is not None
    assert eight.load_in_8bit


def test_the_line_that_installs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        quantization_config("nf4", "bfloat16")
    assert (caught.value.code, caught.value.fix) == ("TT101", "pip install bitsandbytes")
