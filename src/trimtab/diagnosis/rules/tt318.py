"""The page of TT318."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT318",
    seen="""
        `trimtab merge` names a folder that is there already, or the folder with `.partial`
        behind its name.
        """,
    why="""
        A merge overwrites nothing. It grows in `DIR.partial`, which becomes `DIR` when it is
        whole; one that was interrupted leaves `DIR.partial`, and the same merge goes on there.
        Another base, another adapter, another weight or another version of PEFT, transformers
        or torch is another merge, whose files would not belong together.
        """,
    versions="""
        All.
        """,
    fix="""
        Name a folder that does not exist. Delete `DIR.partial` if what was begun there is no
        longer wanted.
        """,
    library="trimtab",
)
