"""The page of TT314."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT314",
    seen="""
        The adapter is of a kind that trimtab does not support, or repeats layers
        (`layer_replication`).
        """,
    why="""
        These kinds add models or layers to the base: X-LoRA runs the model twice, layer
        replication makes a deeper one. A plan counts the layers that the checkpoint has.
        """,
    versions="""
        All.
        """,
    fix="""
        Load it with PEFT alone on a model that fits the device, or use an adapter of another
        kind.
        """,
    library="trimtab",
    not_helping="""
        Changing `peft_type` in the config.
        """,
)
