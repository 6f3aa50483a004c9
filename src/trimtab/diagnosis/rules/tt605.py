"""The page of TT605."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT605",
    seen="""
        `copy.deepcopy`, `pickle` or something that uses them is applied to a placed model.
        """,
    why="""
        The copy's layers would be brought in from the slabs of the original, and two models
        would share slots that one of them frees.
        """,
    versions="""
        All.
        """,
    fix="""
        Load the checkpoint a second time, or save the adapter with `save_pretrained`. To use a
        model from several threads no copy is needed: one placement has one lock.
        """,
    library="the program",
    not_helping="""
        `copy.copy` of single layers: they share the parked weights.
        """,
)
