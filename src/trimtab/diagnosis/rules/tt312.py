"""The page of TT312."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT312",
    seen="""
        The config targets modules, or promises tensors, that the adapter's file does not hold.
        """,
    why="""
        The file was cut when it was saved or merged from parts, or the config is of another run
        with more targets. PEFT would make these layers and leave them untrained.
        """,
    versions="""
        All. PEFT warns about missing keys in `from_pretrained` and says nothing in
        `load_adapter`.
        """,
    fix="""
        Restore the config that was saved with the file, or save the adapter again.
        """,
    library="the adapter",
    not_helping="""
        Ignoring the warning: a DoRA magnitude that is missing is not neutral.
        """,
    references=("huggingface/peft#2118",),
)
