"""The page of TT205."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT205",
    seen="""
        A plan is refused, since the checkpoint is another one now than the one it was made for.
        """,
    why="""
        A plan holds bytes for each unit. They are right for one config and one set of tensors,
        which the plan knows by a fingerprint of the config and of each tensor's name, shape and
        dtype. The checkpoint was updated, resized or quantized since, or the path leads to
        another model.
        """,
    versions="""
        All. The versions of the libraries are not part of the fingerprint.
        """,
    fix="""
        Make the plan again; it takes seconds.
        """,
    library="trimtab",
    not_helping="""
        Editing the fingerprint in the saved plan: the bytes would be wrong.
        """,
)
