"""The page of TT606."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT606",
    seen="""
        Prompt and answer together are longer than the context that the plan counted.
        """,
    why="""
        The KV cache of the whole context is part of the plan. A longer text would take memory
        that the plan has given to layers.
        """,
    versions="""
        All.
        """,
    fix="""
        Plan with `--context` at least as long as the error says, or ask for fewer new tokens.
        """,
    library="the plan",
    not_helping="""
        `use_cache=False`: the activations of a longer prompt are counted for the planned
        context as well.
        """,
)
