"""Each tensor of an adapter's file, against the model's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tiny
from trimtab.adapters import load_tensors, read_adapter
from trimtab.apply import fit_model, load_onto
from trimtab.errors import AdapterFault
from trimtab.proof import account, check_injected, same


@pytest.fixture
def loaded() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    folder = tiny.checkpoint("llama")
    header = read_adapter(tiny.adapter(folder, targets=["q_proj"]))
    decided = fit_model(tiny.reference(folder), header)
    model, _ = load_onto(tiny.reference(folder), header, "it")
    return model, decided, load_tensors(header)


def test_what_is_said_of_an_adapter_that_arrived(loaded: Any) -> None:
    model, decided, given = loaded
    applied = account(model, decided, given, "it")
    assert applied.tensors == 12
    assert applied.modules == tuple(f"model.layers.{n}.self_attn.q_proj" for n in range(6))
    assert applied.nbytes == sum(one.nbytes for one in given.values())
    assert applied.notes == ()


@pytest.mark.parametrize("change", ["values", "shape", "name"])
def test_a_tensor_that_did_not_arrive(loaded: Any, change: str) -> None:
    model, decided, given = loaded
    key = sorted(given)[3]
    one = given.pop(key)
    if change == "name":
        given[key + "_"] = one
    else:
        given[key] = one + 1 if change == "values" else one[:-1]
    with pytest.raises(AdapterFault, match="1 of the 12 tensors") as caught:
        account(model, decided, given, "it")
    assert caught.value.code == "TT303"
    assert caught.value.parts["unused"] == (key + "_" if change == "name" else key,)


def test_a_tensor_that_the_file_lacks(loaded: Any) -> None:
    model, decided, given = loaded
    key = sorted(given)[0]
    del given[key]
    with pytest.raises(AdapterFault, match="lacks 1 tensors") as caught:
        check_injected(model, decided, given, "it")
    assert caught.value.code == "TT312"


def test_a_tensor_of_another_size(loaded: Any) -> None:
    model, decided, given = loaded
    key = sorted(given)[0]
    given[key] = given[key][:-1]
    with pytest.raises(AdapterFault, match=r"is \[7, 128\], the model needs \[8, 128\]") as caught:
        check_injected(model, decided, given, "it")
    assert caught.value.code == "TT306"


def test_a_lora_without_strength_changes_nothing(loaded: Any) -> None:
    model, decided, given = loaded
    config = {**decided.header.config, "lora_alpha": 0}
    still = dataclasses.replace(decided, header=dataclasses.replace(decided.header, config=config))
    (note,) = account(model, still, given, "it").notes
    assert "changes nothing" in note


def test_tensors_are_the_same_in_the_models_dtype() -> None:
    one = torch.tensor([1.0, 1.001])
    assert same(one, one.clone())
    assert same(one.bfloat16(), one)
    assert not same(one, one.bfloat16())
    assert not same(one, one[:1])
