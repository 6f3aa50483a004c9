"""Models of other architectures, for situations and their tracebacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import nn

import tiny  # of tests/
from architectures import BOS, EOS, PAD, VOCABULARY

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_attention_heads": 4}
SPECIAL: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
USUAL: dict[str, Any] = {
    **SIZES,
    **SPECIAL,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _made(kind: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**sizes)
        return getattr(transformers, f"{kind}{head}")(config)

    return make


FURTHER: Mapping[str, Callable[[], nn.Module]] = {
    "mistral": _made("Mistral", **USUAL),
    "qwen2": _made("Qwen2", **USUAL, tie_word_embeddings=True),
    "phi3": _made("Phi3", **USUAL),
    "mixtral": _made("Mixtral", **USUAL, num_local_experts=4),
    "neox": _made("GPTNeoX", **SIZES, **SPECIAL, intermediate_size=256, num_hidden_layers=4),
    "opt": _made(
        "OPT", **SIZES, **SPECIAL, ffn_dim=256, num_hidden_layers=4, word_embed_proj_dim=128
    ),
    "gemma2": _made("Gemma2", **USUAL, head_dim=32, tie_word_embeddings=False),
    "olmo2": _made("Olmo2", **USUAL),
    "starcoder2": _made("Starcoder2", **USUAL),
    "falcon": _made(
        "Falcon", **SIZES, **SPECIAL, num_hidden_layers=4, new_decoder_architecture=True
    ),
    "t5": _made(
        "T5",
        "ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=PAD,
    ),
}
TARGETS: Mapping[str, list[str]] = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "opt": ["q_proj", "v_proj", "fc1", "fc2"],
    "falcon": ["query_key_value", "dense"],
    "starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "t5": ["q", "v", "wo"],
}


def add_models() -> None:
    """Makes `tiny` know these models; only the process that makes tracebacks does that."""
    tiny.MODELS.update(FURTHER)  # type: ignore[attr-defined]
    tiny.TARGETS.update(TARGETS)  # type: ignore[attr-defined]
