"""A Gemma 4 of two million parameters with every peculiarity of the large ones.

Sliding and full attention, keys and values shared by the last half of the layers, wider MLPs
there, per-layer embeddings, a head tied to the embedding, a vision and an audio tower. The towers
are random: they are there to be placed, not to see.
"""

import torch
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    GenerationConfig,
)

from demo_training.tokens import ID, VOCABULARY

HIDDEN = 128
PATTERN = ["sliding_attention"] * 3 + ["full_attention"]
# Near 1/sqrt(HIDDEN): each linear then roughly keeps the scale of what it is given.
SPREAD = 0.09


def build_model(seed: int) -> Gemma4ForConditionalGeneration:
    """The untrained model, in float32."""
    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(_config())
    for layer in model.model.language_model.layers:
        # Gemma 4 does not scale its attention logits: it has learned small norms. So must we start.
        attention = layer.self_attn
        torch.nn.init.constant_(attention.q_norm.weight, attention.head_dim**-0.5)
    model.generation_config = GenerationConfig(
        bos_token_id=ID["<bos>"],
        eos_token_id=[ID["<turn|>"], ID["<eos>"]],
        pad_token_id=ID["<pad>"],
        do_sample=False,
        max_new_tokens=16,
    )
    return model


def _config() -> Gemma4Config:
    return Gemma4Config(
        text_config=_text(),
        vision_config=_vision(),
        audio_config=_audio(),
        boi_token_id=ID["<|image>"],
        image_token_id=ID["<|image|>"],
        eoi_token_id=ID["<image|>"],
        boa_token_id=ID["<|audio>"],
        audio_token_id=ID["<|audio|>"],
        eoa_token_index=ID["<audio|>"],
        video_token_id=ID["<|video|>"],
        initializer_range=SPREAD,
        tie_word_embeddings=True,
        dtype="float32",
    )


def _text() -> Gemma4TextConfig:
    # All widths are multiples of 64, the block of the 4-bit formats.
    return Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=HIDDEN,
        hidden_size_per_layer_input=64,
        intermediate_size=256,
        use_double_wide_mlp=True,
        num_hidden_layers=2 * len(PATTERN),
        num_kv_shared_layers=len(PATTERN),
        layer_types=2 * PATTERN,
        sliding_window=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        max_position_embeddings=512,
        final_logit_softcapping=30.0,
        initializer_range=SPREAD,
        bos_token_id=ID["<bos>"],
        eos_token_id=ID["<eos>"],
        pad_token_id=ID["<pad>"],
    )


def _vision() -> Gemma4VisionConfig:
    return Gemma4VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        patch_size=16,
        pooling_kernel_size=3,
        position_embedding_size=64,
        use_clipped_linears=True,
        initializer_range=SPREAD,
    )


def _audio() -> Gemma4AudioConfig:
    # The first channel count is also the number of mel bins that the projection expects.
    return Gemma4AudioConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        subsampling_conv_channels=[32, 8],
        output_proj_dims=128,
        use_clipped_linears=True,
        initializer_range=SPREAD,
    )
