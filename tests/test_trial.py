"""Adapters that do not compute on quantized layers are refused when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from placing import AWAY, placed
from residents import is_parked
from tiny import adapter, checkpoint, inputs, logits, reference
from trimtab.adapters import read_adapter
from trimtab.apply import load_onto
from trimtab.errors import AdapterFault
from trimtab.trial import brought_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of odd kinds


def refused(model: Any, folder: Path) -> AdapterFault:
    with pytest.raises(AdapterFault) as caught:
        load_onto(model, read_adapter(folder))
    assert caught.value.code == "TT317"
    return caught.value


@pytest.mark.parametrize(
    ("kind", "quant", "said"),
    [
        ("HRA", "nf4", "mat1 and mat2"),  # its layers raise
        ("IA3", "int8", "its layers give torch.float32, and the model computes in torch.bfloat16"),
        ("LoHa", "nf4", "is [128, 8], the model needs [8192, 8]"),  # PEFT made other weights
        ("OSF", "nf4", "effective_rank"),  # PEFT refused to make them
    ],
)
def test_the_reason_is_said_and_the_model_is_as_it_was(kind: str, quant: str, said: str) -> None:
    folder, given = checkpoint("llama-biased"), inputs(checkpoint("llama-biased"))
    options = {"feedforward_modules": ["down_proj"]} if kind == "IA3" else {}
    base = reference(folder, quant)
    before, names = logits(base, given), [name for name, _ in base.named_modules()]
    fault = refused(base, adapter(folder, kind, targets=["o_proj", "down_proj"], **options))
    assert said in fault.why
    assert f"({kind.upper()}) does not compute on quantized layers" in fault.what
    assert [name for name, _ in base.named_modules()] == names
    assert torch.equal(logits(base, given), before)


def test_the_same_adapter_runs_in_16_bits() -> None:
    folder = checkpoint("llama-biased")
    model, applied = load_onto(reference(folder), read_adapter(adapter(folder, "LoHa")))
    assert len(applied.modules) == 28
    assert not torch.equal(logits(model, inputs(folder)), logits(reference(folder), inputs(folder)))


def test_a_quantized_layer_that_was_trained_whole() -> None:
    folder = checkpoint("llama")
    fault = refused(reference(folder, "nf4"), adapter(folder, modules_to_save=["0.mlp.up_proj"]))
    assert "model.layers.0.mlp.up_proj" in fault.what
    assert "trained whole" in fault.why


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_a_kind_that_peft_does_not_mix_is_not_put_down_to_the_format(quant: str) -> None:
    folder = checkpoint("llama")
    model, _ = load_onto(reference(folder, quant), read_adapter(adapter(folder)), "a")
    with pytest.raises(AdapterFault) as caught:
        load_onto(model, read_adapter(adapter(folder, "LoHa")), "b")
    assert caught.value.code == "TT315"


def test_layers_that_are_not_quantized_are_not_tried() -> None:
    folder = checkpoint("llama")
    path = adapter(folder, "LNTuning", targets=["input_layernorm"])
    assert load_onto(reference(folder, "nf4"), read_adapter(path))[1].tensors == 6


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_parked_layer_has_its_weights_while_it_is_tried(quant: str) -> None:
    folder = checkpoint("llama-biased")
    kind, options = {"int8": ("HRA", {}), "nf4": ("C3A", {"block_size": 64})}[quant]
    path, given = adapter(folder, kind, **options), inputs(folder)
    with placed(folder, quant, AWAY["all"]) as found:
        found.add_adapter("it", read_adapter(path))
        assert is_parked(found)
        expected = logits(reference(folder, quant, path), given)
        assert torch.equal(logits(found.model, given), expected)


def test_a_layer_of_a_parked_unit_is_brought_in_by_name() -> None:
    folder = checkpoint("llama")
    stock = reference(folder, "nf4").model.layers[2].mlp.up_proj
    with placed(folder, "nf4", AWAY["all"]) as found:
        layer = found.model.model.layers[2].mlp.up_proj
        with brought_in(found.model, "model.layers.2.mlp.up_proj"):
            assert not is_parked(found)
            assert torch.equal(layer.weight, stock.weight)
        assert is_parked(found)
