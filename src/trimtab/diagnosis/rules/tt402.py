"""The page of TT402."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT402",
    seen="""
        A size was given that is none, or a small number without a unit.
        """,
    why="""
        A size is a number with a unit: `6GiB` is 6 x 2^30 bytes, `6GB` is 6 x 10^9, `512MiB`,
        `0.5GiB`, or bytes as a whole number. Negative numbers and other words are refused; and
        `8`, which would be 8 bytes: a text without a unit is of 1048576 bytes at least, or 0.
        """,
    versions="""
        All.
        """,
    fix="""
        Write it so, without a sign: `--gpu 6GiB`.
        """,
    library="the command",
    not_helping="""
        `6G`, which some programs take as the one and some as the other.
        """,
)
