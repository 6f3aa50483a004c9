"""The page of TT603."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT603",
    seen="""
        A prompt needs a part that the plan left out, a vision or audio tower mostly, and there
        is no room to bring it in.
        """,
    why="""
        The plan was made for some modalities, `text` by default. Towers that these do not need
        are idle: they rest in RAM or on the disk. Where there are spare bytes they are brought
        in all the same; here there are too few.
        """,
    versions="""
        All.
        """,
    fix="""
        Plan with what the prompts hold, `modalities=("text", "image")`. The room is counted
        then. Or give a larger budget.
        """,
    library="the plan",
    not_helping="""
        Calling the tower by itself: it needs the same room.
        """,
)
