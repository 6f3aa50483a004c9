"""The page of TT321."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT321",
    seen="""
        `swap_adapter` was asked to put an adapter into the place of a loaded one, and was refused
        before a weight was changed.
        """,
    why="""
        In place only values change, and for a LoRA the rank and the scaling. An adapter of another
        kind, on other modules, or with a setting that changes what its layers compute needs layers
        of its own.
        """,
    versions="""
        All. PEFT's `hotswap_adapter` takes LoRA only; it sets weights that the new file lacks to
        zero, and reaches no layer that is offloaded.
        """,
    fix="""
        `remove_adapter`, then `add_adapter` under the same name: it takes longer, and captured
        decode steps are captured again. Or load it under another name.
        """,
    library="trimtab",
)
