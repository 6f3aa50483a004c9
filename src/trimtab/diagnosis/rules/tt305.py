"""The page of TT305."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT305",
    seen="""
        `adapter_config.json` names another base model than the one given.
        """,
    why="""
        An adapter is a difference to the weights it was trained on. On others of the same shape
        it loads without an error and changes the outputs to something that nobody trained: on
        an instruct model's base model, on another version, on another size with the same width.
        The last part of both names is compared, without what quantizers append (`-bnb-4bit` and
        the like). A local path proves nothing and gives a note.
        """,
    versions="""
        All. PEFT does not compare the names.
        """,
    fix="""
        Use the base that the error names. If both are the same weights under two names, say so
        with `allow_other_base`.
        """,
    library="the adapter",
    not_helping="""
        Editing the name in the config: the next reader will believe it.
        """,
)
