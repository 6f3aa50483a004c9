"""The page of TT506."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT506",
    seen="""
        A tensor of the checkpoint has another shape than its config asks for.
        """,
    why="""
        Config and weights are of different models or versions; mostly the vocabulary was
        resized and the old config was kept.
        """,
    versions="""
        All.
        """,
    fix="""
        Take the config that belongs to the weights. For a resized vocabulary set `vocab_size`
        to the number of rows that the error names.
        """,
    library="the files",
    not_helping="""
        `ignore_mismatched_sizes=True`: the tensor is left at random values.
        """,
    signs=(
        Sign(
            r"You set `ignore_mismatched_sizes` to `False`",
            ("RuntimeError",),
            innermost=r"^transformers/",
            through=r"^transformers/modeling_utils\.py:from_pretrained$",
            alone=False,
        ),
    ),
)
