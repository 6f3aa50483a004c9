"""The page of TT602."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT602",
    seen="""
        A parked weight was replaced by another parameter.
        """,
    why="""
        Loading with `assign=True`, resizing the vocabulary, or setting `module.weight` puts a
        new parameter where the parked one was. The new one would compute, the old one would be
        streamed for nothing.
        """,
    versions="""
        All.
        """,
    fix="""
        Resize or replace before loading, and save the result as a checkpoint; or keep the unit
        resident.
        """,
    library="trimtab",
    not_helping="""
        Replacing it inside a forward: the check is made there as well.
        """,
)
