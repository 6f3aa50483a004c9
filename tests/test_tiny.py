"""The test models themselves: equal from call to call, and not degenerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from tiny import MODELS, adapter, checkpoint, inputs, logits, reference, tokenizer, tokens


@pytest.mark.parametrize("name", MODELS)
def test_tokens_vary_and_an_adapter_changes_them(name: str) -> None:
    folder = checkpoint(name)
    given = inputs(folder, batch=3, padded=True)
    bare = tokens(reference(folder), given)
    adapted = tokens(reference(folder, adapters=adapter(folder)), given)
    assert len(bare.unique()) >= 4
    assert (bare != adapted).float().mean() > 0.5


@pytest.mark.parametrize("quant", tiny.QUANTS)
def test_formats_are_close_to_16_bits_and_differ(quant: str) -> None:
    folder = checkpoint("llama")
    given = inputs(folder)
    plain, quantized = logits(reference(folder), given), logits(reference(folder, quant), given)
    error = (plain - quantized).norm() / plain.norm()
    assert torch.equal(plain, quantized) == (quant == "none")
    assert error < 0.7


@pytest.mark.parametrize("name", ["gemma3-vlm", "gemma4"])
def test_an_image_changes_what_follows(name: str) -> None:
    folder = checkpoint(name)
    model = reference(folder)
    given = inputs(folder, modalities=("text", "image"))
    other = given | {"pixel_values": given["pixel_values"].flip(-1)}
    assert not torch.equal(logits(model, given)[:, -1], logits(model, other)[:, -1])


def test_audio_changes_what_follows() -> None:
    folder = checkpoint("gemma4")
    model = reference(folder)
    given = inputs(folder, modalities=("text", "audio"))
    other = given | {"input_features": given["input_features"].flip(-1)}
    assert not torch.equal(logits(model, given)[:, -1], logits(model, other)[:, -1])


def test_gemma4_has_what_the_large_ones_have() -> None:
    names = set(load_file(checkpoint("gemma4") / "model.safetensors"))
    assert "model.language_model.embed_tokens_per_layer.weight" in names
    assert "model.vision_tower.patch_embedder.position_embedding_table" in names
    assert any(name.startswith("model.audio_tower.") for name in names)
    assert "lm_head.weight" not in names


def test_shards_hold_the_same_model() -> None:
    whole, parts = checkpoint("llama"), checkpoint("llama", shards=3)
    files = sorted(parts.glob("model-*.safetensors"))
    assert len(files) >= 3
    joined = {name: one for file in files for name, one in load_file(file).items()}
    expected = load_file(whole / "model.safetensors")
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)


def test_equal_arguments_give_equal_bytes() -> None:
    first = checkpoint("llama", seed=5)
    before = (first / "model.safetensors").read_bytes()
    tiny._checkpoint.cache_clear()
    again = checkpoint("llama", seed=5)
    assert again == first
    assert (again / "model.safetensors").read_bytes() == before


def test_no_tensor_of_an_adapter_is_zero(tmp_path: Path) -> None:
    for kind in ("lora", "dora"):
        saved = load_file(adapter(checkpoint("llama"), kind) / "adapter_model.safetensors")
        assert len(saved) == 6 * 7 * (3 if kind == "dora" else 2)
        assert all(bool(one.all()) for one in saved.values())


def test_tokenizer_gives_text_back() -> None:
    words = tokenizer()
    assert words.decode(words("Say: hi (2 x)").input_ids) == "Say: hi (2 x)"
    chat = [{"role": "user", "content": "hi"}]
    text = words.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<bos>[user]hi[assistant]"
