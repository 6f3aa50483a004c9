"""The page of TT209."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT209",
    seen="""
        Loading stops, since the `forward` or `generate` of a module is replaced already.
        """,
    why="""
        trimtab brings a unit in by a wrapper around its `forward`, and so do accelerate's
        hooks. Two such wrappers would move the same weights twice.
        """,
    versions="""
        All.
        """,
    fix="""
        Load the model fresh with `trimtab.load`. For a model that accelerate has placed, use
        `trimtab.attach`, which leaves its hooks alone. Other libraries that replace `forward`
        should do so after loading.
        """,
    library="trimtab",
    not_helping="""
        Removing the hooks by hand: what they have offloaded may be left on `meta`, without
        bytes.
        """,
)
