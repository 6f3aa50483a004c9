"""The page of TT308."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT308",
    seen="""
        The adapter was saved with an `init_lora_weights` such as `pissa`, `olora`, `corda` or
        `loftq`.
        """,
    why="""
        These kinds start from a decomposition of the base's weights and subtract it from the
        base. PEFT does that again when it loads the adapter: it reads each base weight and
        rewrites it. A weight that is parked cannot be rewritten, and on a quantized base the
        result is rounded a second time.
        """,
    versions="""
        All.
        """,
    fix="""
        Convert it where it was trained: `save_pretrained(folder,
        path_initial_model_for_weight_conversion=...)` makes a plain LoRA for the unchanged
        base.
        """,
    library="peft",
    not_helping="""
        Setting `init_lora_weights` to `true` in the config: the adapter was trained on the
        rewritten base.
        """,
)
