"""Faults of others that nobody tells: the stock stack does something else, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import failing_situations as failing  # of scripts/
import tiny
from situations.situation import llama

Silent = Callable[[Path, bool], bool]

SILENT: dict[str, Silent] = {}
"""Whether the stock stack, run in a folder of its own, does something else than it was asked."""


def silent(code: str) -> Callable[[Silent], Silent]:
    def keep(run: Silent) -> Silent:
        SILENT[code] = run
        return run

    return keep


def differs(model: Any, wanted: Any) -> bool:
    given = tiny.inputs(llama())
    return not torch.equal(tiny.logits(model, given), tiny.logits(wanted, given))


def with_a_layer_on_disk(model: Any, folder: Path) -> Any:
    from accelerate import dispatch_model

    prefix = "base_model.model." if hasattr(model, "peft_config") else ""
    places = {prefix + name: one for name, one in failing.split("llama", "model.layers.2").items()}
    how = {"main_device": "cpu", "offload_dir": str(folder), "force_hooks": True}
    return dispatch_model(model, places, **how)


@silent("TT221")
def _planned_again(at: Path, wrong: bool) -> bool:
    """PEFT's own plan, made for a card that is told of and not there; it is not carried out."""
    import accelerate.utils.modeling
    import peft

    model = failing.base("llama")
    if wrong:
        model.hf_device_map = failing.split("llama", "model.layers.2")
    carried_out: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.utils.modeling, "is_mps_available", lambda: True)
        patch.setattr(
            "peft.peft_model.dispatch_model",
            lambda model, device_map, **how: carried_out.append(device_map),
        )
        room = {"mps": 10**9, "cpu": 10**9}
        peft.PeftModel.from_pretrained(
            model, failing.lora("llama"), device_map="sequential", max_memory=room
        )
    return any("mps" in one.values() for one in carried_out)


@silent("TT222")
def _folder_twice(at: Path, wrong: bool) -> bool:
    one, other = llama(), tiny.checkpoint("llama", seed=1)
    with_a_layer_on_disk(tiny.reference(one), at / "one")
    model = with_a_layer_on_disk(tiny.reference(other), at / ("one" if wrong else "other"))
    return differs(model, tiny.reference(other))


@silent("TT319")
def _swapped(at: Path, wrong: bool) -> bool:
    from peft.utils.hotswap import hotswap_adapter

    one, other = tiny.adapter(llama()), tiny.adapter(llama(), seed=2)
    model = tiny.reference(llama(), adapters=one)
    if wrong:
        with_a_layer_on_disk(model, at / "offload")
    hotswap_adapter(model, str(other), adapter_name="default", torch_device="cpu")
    try:
        return differs(model, tiny.reference(llama(), adapters=other))
    except TypeError:  # not silent, before PEFT 0.21
        return True


@silent("TT515")
def _quantizes_nothing(at: Path, wrong: bool) -> bool:
    config = tiny.quantization_config("nf4")
    config.llm_int8_enable_fp32_cpu_offload = wrong
    model = transformers.LlamaForCausalLM.from_pretrained(
        llama(), quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    kinds = {type(one).__name__ for one in model.modules()}
    return "Linear4bit" not in kinds
