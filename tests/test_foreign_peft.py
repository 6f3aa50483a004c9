"""What is asked of PEFT's layers, for kinds of adapters that keep their weights differently."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from placing import placed
from trimtab.activity import AdapterLayers
from trimtab.foreign_peft import adapter_memory, adapter_weights


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {}),
        ("lora", {"trainable_token_indices": {"embed_tokens": [3, 4]}}),
        ("lora", {"modules_to_save": ["norm"]}),
        ("Vera", {"targets": ["q_proj"]}),
        ("IA3", {"targets": ["k_proj"], "feedforward_modules": []}),
    ],
)
def test_where_an_adapters_weights_lie(kind: str, options: dict[str, Any]) -> None:
    folder = tiny.checkpoint("llama")
    with placed(folder, "none", (), {"a": tiny.adapter(folder, kind, **options)}) as placement:
        layers = AdapterLayers(placement.model.get_base_model()).now()
        before = adapter_memory(layers)
        assert list(before) == ["a"]
        assert len(before["a"]) > 0
        assert adapter_memory(layers) == before
        for weights in adapter_weights(layers, "a"):
            held = weights.data
            weights.data = held.clone()
            assert adapter_memory(layers) != before
            weights.data = held
