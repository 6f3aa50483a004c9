"""Tiny configs: few, narrow layers, and the same architecture."""

from __future__ import annotations

import pytest
import transformers

import tiny
from trimtab.repro.shrink import shrink, spread


def test_layers_are_spread_evenly() -> None:
    assert spread(32, 4) == (0, 10, 21, 31)
    assert spread(3, 4) == (0, 1, 2)


def test_wanted_layers_are_among_them() -> None:
    assert spread(32, 4, [7]) == (0, 7, 21, 31)
    assert spread(32, 4, [0, 1, 2, 3]) == (0, 1, 2, 3)
    assert spread(32, 4, [5, 5, 6, 7, 8, 9]) == (5, 6, 7, 8)


def test_a_llama() -> None:
    config = transformers.LlamaConfig(num_key_value_heads=8, eos_token_id=31999).to_dict()
    before = dict(config)
    made = shrink(config)
    assert config == before
    told = made.config
    assert made.source == (0, 10, 21, 31)
    assert told["num_hidden_layers"] == 4
    # Heads keep their size: 4096 over 32 heads.
    assert (told["num_attention_heads"], told["num_key_value_heads"]) == (2, 1)
    assert told["head_dim"] == 128
    assert (told["hidden_size"], told["intermediate_size"]) == (128, 256)
    assert told["vocab_size"] == 256
    assert (told["bos_token_id"], told["eos_token_id"]) == (1, 240)


def test_width_where_the_size_of_a_head_is_not_said() -> None:
    told = shrink(transformers.GPT2Config().to_dict()).config
    assert (told["n_layer"], told["n_head"], told["n_embd"]) == (4, 2, 128)
    assert told["bos_token_id"] == told["eos_token_id"] == 240


def test_experts() -> None:
    told = shrink(transformers.Qwen3MoeConfig().to_dict()).config
    assert told.get("num_experts", told.get("num_local_experts")) == 4
    assert told["num_experts_per_tok"] == 2
    assert told["moe_intermediate_size"] == 64


def test_kinds_of_layers_are_in_both_halves() -> None:
    made = shrink(transformers.Gemma3TextConfig(num_hidden_layers=26).to_dict())
    kinds = ["sliding_attention", "full_attention"]
    assert set(made.config["layer_types"][:2]) == set(made.config["layer_types"][2:]) == set(kinds)


def test_towers_keep_their_width_and_meet_the_language_model() -> None:
    config = transformers.Qwen2VLConfig().to_dict()
    config["vision_config"]["hidden_size"] = config["text_config"]["hidden_size"]
    made = shrink(config).config
    assert made["vision_config"]["depth"] == 2
    assert made["vision_config"]["embed_dim"] == config["vision_config"]["embed_dim"]


def test_a_small_model_keeps_its_layers() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=3).to_dict()
    assert shrink(config).source == (0, 1, 2)


@pytest.mark.skipif(not tiny.HAS_GEMMA4, reason="this transformers has no Gemma 4")
def test_gemma4_shares_keys_and_values() -> None:
    text = transformers.Gemma4TextConfig(num_hidden_layers=30, num_kv_shared_layers=10)
    made = shrink(transformers.Gemma4Config(text_config=text).to_dict())
    told = made.config["text_config"]
    assert told["num_hidden_layers"] == 8
    assert told["num_kv_shared_layers"] == 4
    assert set(told["layer_types"][:4]) == set(told["layer_types"][4:])
    assert told["layer_types"][-1] == "full_attention"
    config = transformers.Gemma4Config.from_dict(made.config).get_text_config()
    assert config.num_hidden_layers == 8
