"""The page of TT316."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT316",
    seen="""
        A note of `trimtab check`, of a report or of `attach`: the adapter fits after a part of
        it was mapped, skipped or dropped.
        """,
    why="""
        None of this is an error:

        - Modules that the adapter knows under another prefix are mapped: class names change
          between versions of transformers.
        - Modules that the targets match, and that the file has no tensors for, are left alone:
          the towers of a multimodal model, mostly.
        - Tensors of the base in the file are dropped if they equal the base's (TT310 if they do
          not).
        - Config fields that a newer PEFT wrote, and that change nothing, are left out.
        - A base's name that is a local path cannot be compared.
        """,
    versions="""
        All.
        """,
    fix="""
        Read whether it says what you expect. Every tensor of the file is accounted for.
        """,
    library="trimtab",
)
