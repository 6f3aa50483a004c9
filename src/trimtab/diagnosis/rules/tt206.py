"""The page of TT206."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT206",
    seen="""
        A disk folder was given that another placement is using.
        """,
    why="""
        A placement owns its folder: it writes one file for each unit there and removes them
        when it is closed. Two in one folder would overwrite each other's files; in the stock
        stack an offload folder that is used twice makes the second model compute with the first
        one's weights, without an error.
        """,
    versions="""
        All.
        """,
    fix="""
        Close the other placement, or give each one a folder of its own. Without `disk_folder`
        each gets a temporary one.
        """,
    library="trimtab",
    not_helping="""
        Deleting `trimtab.lock`: the lock is the operating system's and goes when the process
        ends, however it ends.
        """,
)
