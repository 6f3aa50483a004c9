"""The page of TT608."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT608",
    seen="""
        `... does not support an attention implementation through
        torch.nn.functional.scaled_dot_product_attention yet`, or the same for Flash Attention, or
        an unknown `attn_implementation`.
        """,
    why="""
        `attn_implementation` is applied to every part of a model. A tower may lack what the
        language model has: Gemma 4's audio tower has no `sdpa`.
        """,
    versions="""
        Gemma 4's audio tower: met with transformers 5.24, not with 5.5.4. Other models: as their
        class says.
        """,
    fix="""
        Leave `attn_implementation` out, which takes what each part has, or give one for each part:
        `attn_implementation={"text_config": "sdpa", "audio_config": "eager"}`.
        """,
    library="transformers",
    not_helping="""
        Another dtype, or another version of torch.
        """,
    foreign=True,
    signs=(
        Sign(
            r"does not support an attention implementation through torch"
            r"|does not support Flash Attention|Specified `attn_implementation=.*is not supported",
            ("ValueError",),
        ),
    ),
)
