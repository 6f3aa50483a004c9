"""Keys of an adapter's file, taken apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.adapters import AdapterHeader, AdapterTensor
from trimtab.filekeys import FileKey, key_here, repeated, split_key, tied_keys

B = "base_model.model."
TIES = (("lm_head.weight", "model.embed.weight"),)


def header(kind: str, *keys: str, **config: object) -> AdapterHeader:
    tensors = {key: AdapterTensor(key, "float32", (1,)) for key in keys}
    return AdapterHeader("me/it", Path(), Path("x"), {"peft_type": kind, **config}, tensors)


@pytest.mark.parametrize(
    ("kind", "key", "path", "rest"),
    [
        ("LORA", B + "m.0.q.lora_A.weight", "m.0.q", "lora_A.weight"),
        ("LORA", "m.0.q.lora_A.weight", "m.0.q", "lora_A.weight"),
        ("LORA", B + "m.0.q.lora_magnitude_vector", "m.0.q", "lora_magnitude_vector.weight"),
        ("LORA", B + "m.embed.lora_embedding_A", "m.embed", "lora_embedding_A"),
        ("LORA", B + "m.x.base_layer.lora_A.weight", "m.x", "base_layer.lora_A.weight"),
        ("LORA", B + "m.embed.token_adapter.trainable_tokens_delta", "m.embed",
         "token_adapter.trainable_tokens_delta"),
        ("LORA", B + "lm_head.weight", "lm_head", "weight"),
        ("LORA", B + "something", "", "something"),
        ("LOHA", B + "m.q.hada_w1_a", "m.q", "hada_w1_a"),
        ("VERA", "base_model.vera_A", "", "base_model.vera_A"),
        ("FROD", "base_model.frod_V.mlp_up", "", "base_model.frod_V.mlp_up"),
        ("PREFIX_TUNING", "prompt_embeddings", "", "prompt_embeddings"),
        ("ADAPTION_PROMPT", B + "m.attn.adaption_gate", "m.attn", "adaption_gate"),
    ],
)  # fmt: skip
def test_what_belongs_to_which_module(kind: str, key: str, path: str, rest: str) -> None:
    assert split_key(header(kind, key), key) == FileKey(key, path, rest)


def test_what_it_is_called_here() -> None:
    assert key_here(FileKey("k", "old.q", "lora_A.weight"), {"old.q": "new.q"}) == (
        "base_model.model.new.q.lora_A.weight"
    )
    assert key_here(FileKey("base_model.vera_A", "", "x"), {}) == "base_model.vera_A"


def test_what_is_repeated_for_a_tied_module() -> None:
    keys = [B + f"{one}.trainable_tokens_delta" for one in ("lm_head", "model.embed", "other")]
    it = header("TRAINABLE_TOKENS", *keys)
    found = [split_key(it, key) for key in keys]
    mapping = {one.path: one.path for one in found}
    used = [one for one in found if one.path == "model.embed"]
    assert repeated(it, found, used, mapping, TIES) == [found[0]]
    assert repeated(it, found, used, mapping, ()) == []
    assert repeated(header("LORA", *keys), found, used, mapping, TIES) == []


def test_base_tensors_may_be_of_a_tied_module_if_the_config_says_so() -> None:
    key = B + "lm_head.weight"
    assert tied_keys(header("LORA", key)) == []
    assert tied_keys(header("LORA", key, ensure_weight_tying=True)) == [
        FileKey(key, "lm_head", "weight")
    ]
