"""The page of TT510."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT510",
    seen="""
        transformers cannot build the model from its config, or the config names no class.
        """,
    why="""
        Mostly the config was written by a newer transformers, with values that this one does
        not know: a Gemma 4 config of 5.24 fails in 5.5 with `KeyError: 'axial'`. Or
        `architectures` is missing.
        """,
    versions="""
        A config that is newer than the installed transformers; it has `transformers_version`.
        """,
    fix="""
        `pip install -U transformers`. If `architectures` is missing, add it: `"architectures":
        ["LlamaForCausalLM"]`.
        """,
    library="transformers",
    not_helping="""
        Editing `transformers_version`.
        """,
)
