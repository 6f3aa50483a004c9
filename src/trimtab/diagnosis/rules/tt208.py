"""The page of TT208."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT208",
    seen="""
        A model, or a part of it, is called after its placement was closed.
        """,
    why="""
        Closing frees the slabs in which the weights rest. What is left of the model are
        stand-ins without bytes.
        """,
    versions="""
        All.
        """,
    fix="""
        Make the calls inside the `with`, or keep the placement open and close it at the end.
        """,
    library="the program",
    not_helping="""
        Keeping a reference to `placed.model`: it keeps the modules, not the weights.
        """,
)
