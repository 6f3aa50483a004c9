"""Which tensors of a checkpoint become which parameters, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny
from trimtab.errors import FormatFault
from trimtab.keys import Origin
from unmerged import opened

NAMES = ["llama", "llama-tied", "gemma3-vlm", "gemma4", "qwen3-moe", "gpt2"]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_goes_there_and_back(name: str) -> None:
    it = opened(tiny.checkpoint(name))
    model = tiny.reference(tiny.checkpoint(name))
    stock = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for key in it.tensors:
        origin = it.keys.of_key(key)
        assert origin is not None
        assert key in origin.keys
        made = it.keys.parameters(origin, it.read)
        assert set(made) == set(origin.names)
        assert all(torch.equal(one, stock[name]) for name, one in made.items())
        back = it.keys.tensors(origin, made)
        assert set(back) == set(origin.keys)
        assert all(torch.equal(one, it.tensors[key]) for key, one in back.items())
        assert all(it.keys.of_name(name) is origin for name in origin.names)


def test_a_tensor_that_becomes_a_parameter_as_it_is() -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    it = opened(tiny.checkpoint("llama"))
    assert it.keys.of_key(key) == Origin(key, (key,), (key,))
    assert it.keys.of_key("nothing") is None
    assert it.keys.of_name("nothing") is None


def test_experts_are_taken_together() -> None:
    it = opened(tiny.checkpoint("qwen3-moe"))
    origin = it.keys.of_key("model.layers.0.mlp.experts.3.up_proj.weight")
    assert origin is not None
    assert origin.names == ("model.layers.0.mlp.experts.gate_up_proj",)
    assert [key.split(".")[5:7] for key in origin.keys] == [
        [str(number), one] for number in range(4) for one in ("gate_proj", "up_proj")
    ]


def test_the_key_of_a_parameter_that_is_not_stored() -> None:
    it = opened(tiny.checkpoint("llama-tied"))
    assert it.keys.of_name("lm_head.weight") is None
    assert it.keys.key_for("lm_head.weight") == "lm_head.weight"


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tensors = dict(opened(folder).tensors)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name.removeprefix("model.")] = tensors[name].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    keys = opened(folder).keys
    with pytest.raises(FormatFault, match="several tensors of") as caught:
        keys.of_name(name)
    assert caught.value.code == "TT514"
    assert keys.of_name("model.layers.1.self_attn.q_proj.weight") is not None
