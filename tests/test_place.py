"""The matrix: format x placement x kind of adapter, to the last bit the all-resident model's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import tiny
from placing import AWAY, placed

QUANTS = ("none", "nf4", "nf4-dq", "int8")
KINDS = ("lora", "dora")
TEXT_ONLY = ("llama", "qwen3", "gemma3")


class Outputs(NamedTuple):
    logits: torch.Tensor
    base: torch.Tensor
    tokens: torch.Tensor


def run(model: Any, inputs: dict[str, torch.Tensor]) -> Outputs:
    with torch.no_grad():
        logits = model(**inputs).logits
        with model.disable_adapter():
            base = model(**inputs).logits
    return Outputs(logits, base, tiny.tokens(model, inputs))


@functools.cache
def reference(name: str, quant: str, kind: str, device: str) -> Outputs:
    folder = tiny.checkpoint(name)
    adapter = tiny.adapter(folder, kind)
    inputs = tiny.inputs(folder, device=device)
    if stock_cannot(quant, kind, device):
        with placed(folder, quant, (), {"a": adapter}, device) as resident:
            return run(resident.model, inputs)
    return run(tiny.reference(folder, quant, {"a": adapter}, device=device), inputs)


def stock_cannot(quant: str, kind: str, device: str) -> bool:
    """On a CPU the stock stack's DoRA loses the scales of an int8 weight."""
    return quant == "int8" and kind == "dora" and device == "cpu"


def check(name: str, quant: str, where: str, kind: str, device: str, tier: str = "") -> None:
    folder = tiny.checkpoint(name)
    wanted = reference(name, quant, kind, device)
    adapters: dict[str, Path] = {"a": tiny.adapter(folder, kind)}
    with placed(folder, quant, AWAY[where], adapters, device, tier) as placement:
        found = run(placement.model, tiny.inputs(folder, device=device))
        modes = {unit.mode for unit in placement.plan.units}
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.base, wanted.base)
    assert torch.equal(found.tokens, wanted.tokens)
    assert not torch.equal(found.logits, found.base)
    assert modes > {"resident"} or where == "resident"


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", AWAY)
@pytest.mark.parametrize("quant", QUANTS)
def test_gemma4_equals_the_resident_model(quant: str, where: str, kind: str, device: str) -> None:
    check("gemma4", quant, where, kind, device)


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["half", "all"])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", TEXT_ONLY)
def test_text_models_equal_the_resident_model(
    name: str, quant: str, where: str, kind: str, device: str
) -> None:
    check(name, quant, where, kind, device)


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("name", TEXT_ONLY)
def test_an_all_resident_plan_equals_the_stock_model(name: str, device: str) -> None:
    check(name, "nf4", "resident", "lora", device)


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_an_untied_table_is_looked_up(device: str) -> None:
    check("llama", "nf4", "table", "lora", device)


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_scales_rest_as_short_as_the_weights_they_come_from(
    quant: str, stored: torch.dtype, device: str
) -> None:
    """Also where the checkpoint has more digits than are computed in."""
    folder = tiny.checkpoint("llama", dtype=stored)
    given = tiny.inputs(folder, device=device)
    for dtype in ("bfloat16", "float16", "float32"):
        with placed(folder, quant, AWAY["all"], device=device, dtype=dtype) as placement:
            unit = placement.plan.of_mode("streamed")[0]
            slab = placement._rooms.slabs[unit.name]
            assert slab.layout.nbytes == unit.moving_bytes
            assert slab.layout.room <= placement.plan.slot_bytes
            assert (slab.layout.short is None) == (dtype == "float32")
            found = tiny.logits(placement.model, given)
        with placed(folder, quant, (), device=device, dtype=dtype) as resident:
            assert torch.equal(tiny.logits(resident.model, given), found)


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_scales_of_what_is_kept_in_float32_have_its_digits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ["o_proj"]
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", kept)
    folder = tiny.checkpoint("llama", dtype=torch.float32)
    given = tiny.inputs(folder, device=device)
    options: dict[str, Any] = {"device": device, "dtype": "bfloat16"}
    with placed(folder, "nf4", AWAY["all"], **options) as placement:
        unit = placement.plan.of_mode("streamed")[0]
        spans = placement._rooms.slabs[unit.name].layout.spans
        rests = {name.split(".")[-2]: span["absmax"].stored for name, span in spans.items()}
        found = tiny.logits(placement.model, given)
    assert rests.pop("o_proj") is torch.float32
    assert set(rests.values()) == {torch.bfloat16}
    with placed(folder, "nf4", (), **options) as resident:
        assert torch.equal(tiny.logits(resident.model, given), found)


@pytest.mark.gpu
@pytest.mark.parametrize("quant", QUANTS)
def test_the_disk_streams_to_a_gpu(quant: str) -> None:
    check("gemma4", quant, "half", "lora", "cuda", "disk")


@pytest.mark.parametrize("where", ["resident", "half"])
def test_int8_with_dora_on_a_cpu_is_near_the_16_bit_model(where: str) -> None:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder, "dora")}
    inputs = tiny.inputs(folder)
    exact = run(tiny.reference(folder, "none", adapters), inputs).logits
    with placed(folder, "int8", AWAY[where], adapters) as placement:
        found = run(placement.model, inputs).logits
    # Measured: 0.116, where the logits deviate by 3; with the scales lost it is above 3.
    assert (found - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3-vlm"])
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_checkpoints_whose_keys_differ_from_module_names(name: str, quant: str) -> None:
    """Case 8: stock raises KeyError for these on a disk with an adapter."""
    check(name, quant, "all", "lora", "cpu")
