"""The page of TT505."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT505",
    seen="""
        After loading, parameters of the model have no weights; or before it, a weight that is
        stored quantized lacks a part, such as its `absmax`.
        """,
    why="""
        The checkpoint was written by another version of transformers, whose names or parts
        differ, or it is of another class than its config says. transformers fills the gaps with
        random numbers and warns; a Gemma 3 with vision that 5.24 has saved gets a random vision
        tower in 5.1.
        """,
    versions="""
        A checkpoint that was written by a newer transformers than the one that loads it; any
        incomplete checkpoint.
        """,
    fix="""
        `pip install -U transformers`, at least to the `transformers_version` in `config.json`.
        If that changes nothing, download the checkpoint again.
        """,
    library="the files",
    not_helping="""
        Ignoring the warning of the stock stack: it means that a part of the model is noise.
        """,
)
