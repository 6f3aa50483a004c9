"""The models of `tiny`, untrained. All widths are multiples of 64, the block of 4-bit formats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

VOCABULARY = 256
PAD, BOS, EOS, IMAGE, BEGIN_IMAGE, END_IMAGE, AUDIO, BEGIN_AUDIO, END_AUDIO, VIDEO = range(10)
FIRST_WORD = 10
"""Token ids from here on mean nothing special."""

HIDDEN = 128
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _llama(tied: bool = False, biased: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {**_TEXT, "tie_word_embeddings": tied}
    if biased:  # and its heads are as wide as the model, which adaption prompts need
        options |= {"attention_bias": True, "mlp_bias": True}
        options |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**options))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_TEXT, tie_word_embeddings=False))


def _qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    sizes = {**_TEXT, "num_hidden_layers": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **options, tie_word_embeddings=False))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": HIDDEN, "n_layer": 4, "n_head": 2, "n_positions": 128}
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **special))


def _gemma3_text() -> dict[str, Any]:
    pattern = ["sliding_attention", "sliding_attention", "full_attention"]
    return {**_TEXT, "sliding_window": 8, "layer_types": 2 * pattern, "query_pre_attn_scalar": 64}


def _gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**_gemma3_text()))


def _gemma3_vlm() -> nn.Module:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=_gemma3_text(),
        vision_config={**_VISION, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN_IMAGE,
        eoi_token_index=END_IMAGE,
        pad_token_id=PAD,
    )
    return Gemma3ForConditionalGeneration(config)


def _gemma4() -> nn.Module:
    """8 layers, the last 4 reuse keys and values; sliding and full attention; both towers."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = {
        **_TEXT,
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 4,
        "layer_types": 2 * (["sliding_attention"] * 3 + ["full_attention"]),
        "sliding_window": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCABULARY,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    }
    vision = {
        **_VISION,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "patch_size": 8,
        "pooling_kernel_size": 3,
        "position_embedding_size": 16,
        "use_clipped_linears": True,
    }
    audio = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [32, 8],
        "output_proj_dims": 128,
        "use_clipped_linears": True,
    }
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        boi_token_id=BEGIN_IMAGE,
        image_token_id=IMAGE,
        eoi_token_id=END_IMAGE,
        boa_token_id=BEGIN_AUDIO,
        audio_token_id=AUDIO,
        eoa_token_index=END_AUDIO,
        eoa_token_id=END_AUDIO,
        video_token_id=VIDEO,
        tie_word_embeddings=True,
    )
    model = Gemma4ForConditionalGeneration(config)
    for name, module in model.named_modules():
        # Gemma 4 does not scale its attention logits: a trained one has small norms instead.
        if name.endswith(("q_norm", "k_norm")) and getattr(module, "weight", None) is not None:
            nn.init.constant_(module.weight, 0.4)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama-tied": functools.partial(_llama, tied=True),
    "llama-biased": functools.partial(_llama, biased=True),
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma3-vlm": _gemma3_vlm,
    "gemma4": _gemma4,
    "qwen3-moe": _qwen3_moe,
    "gpt2": _gpt2,
}
