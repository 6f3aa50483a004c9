"""The page of TT310."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT310",
    seen="""
        The adapter's file has its own values for tensors of the base.
        """,
    why="""
        It was trained with `bias="all"` or `"lora_only"`, or its targets include an embedding,
        in which case PEFT saves the whole table too. To put these values in would change the
        base for every other adapter, and with none: PEFT has one bias and one table for all of
        them. If they equal the base's they are dropped, with a note.
        """,
    versions="""
        All. PEFT overwrites the base with them.
        """,
    fix="""
        Merge the adapter into a copy of the base (`trimtab merge`). When training again:
        `modules_to_save` for modules that are trained whole, `save_embedding_layers=False` when
        saving, if the table was not trained.
        """,
    library="the adapter",
    not_helping="""
        `disable_adapter`: the base stays overwritten.
        """,
)
