"""Situations of TT1: packages, GPUs, models that are not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from situations.situation import CARD, NO_GPU, base, edit, looked_at, shows
from trimtab import quantize, rooms
from trimtab.checkpoint import open_checkpoint
from trimtab.diagnosis import Finding, check
from trimtab.diagnosis.doctor import examine
from trimtab.diagnosis.versions import check_versions


@shows("TT101", "the format nf4 needs the package bitsandbytes, which is not installed")
def _quantizer(at: Path, wrong: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(importlib.util, "find_spec", lambda name: None)
        quantize.require_bitsandbytes("nf4")


@shows("TT101", "the package peft is not installed")
def _package(at: Path, wrong: bool) -> list[Finding]:
    there = {"transformers": "5.1.0", "accelerate": "1.12.0", "peft": "0.18.1"}
    return check_versions("llama", {**there, **({"peft": None} if wrong else {})}.get)


@shows("TT102", "peft 0.17.9 is installed, and trimtab needs at least 0.18.1")
def _old_package(at: Path, wrong: bool) -> list[Finding]:
    peft = "0.17.9" if wrong else "0.18.1"
    there = {"transformers": "5.1.0", "accelerate": "1.12.0", "peft": peft}
    return check_versions("llama", there.get)


@shows("TT103", "the device map names GPU 0, and this plan runs on the CPU")
def _gpu(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"": 0}, NO_GPU if wrong else CARD)


@shows("TT103", "the plan runs on gpu:0, and torch sees 0 CUDA devices")
def _gpu_of_a_plan(at: Path, wrong: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0 if wrong else 8)
        rooms.device_of("gpu:0")


@shows("TT103", "the plan runs on gpu:7, and trimtab runs on the first GPU")
def _another_gpu_of_a_plan(at: Path, wrong: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        rooms.device_of("gpu:7" if wrong else "gpu:0")


@shows(
    "TT104",
    f"DIR/base is a Gemma9ForCausalLM, which transformers {transformers.__version__} does not have",
)
def _class(at: Path, wrong: bool) -> list[Finding]:
    named = "Gemma9ForCausalLM" if wrong else "LlamaForCausalLM"
    return check(edit(base(at), architectures=[named]), hardware=CARD)


@shows("TT105", "there is no folder DIR/bose")
def _model(at: Path, wrong: bool) -> list[Finding]:
    base(at)
    return check(at / ("bose" if wrong else "base"), hardware=CARD)


@shows("TT105", "DIR/base/config.json is a file, not a model")
def _model_file(at: Path, wrong: bool) -> None:
    open_checkpoint(base(at) / ("config.json" if wrong else ""))


@shows("TT106", "torch does not work: OSError: libcudart.so.13: cannot open shared object file")
def _torch(at: Path, wrong: bool) -> Sequence[Finding]:
    said = "failed: OSError: libcudart.so.13: cannot open shared object file"
    return examine(True, ask=lambda words: said if wrong else '{"RAM": "9.9 GB/s"}').findings
