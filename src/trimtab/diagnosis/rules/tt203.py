"""The page of TT203."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT203",
    seen="""
        A value of the device map, or the map itself, is nothing that a model can be put on.
        """,
    why="""
        Values are `0`, `cuda`, `cuda:0` or `gpu:0` for the GPU, `cpu` and `disk`. The words
        `auto`, `balanced` and `sequential` ask accelerate to make a map; here the plan does
        that, from the budget, if no map is given.
        """,
    versions="""
        All.
        """,
    fix="""
        Use one of these values. Instead of `auto`, leave the map out.
        """,
    library="trimtab",
    not_helping="""
        `meta`: it is where accelerate hides what it has offloaded, not a place that bytes can
        be put.
        """,
)
