"""The page of TT406."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT406",
    seen="""
        A call, or a weighted combination, needs several adapters at once, and together they are
        larger than the adapter memory that was planned.
        """,
    why="""
        With `--adapter-memory` (`adapter_memory=...`) the adapters on the GPU stay within that
        many bytes, and the least recently used ones rest in host memory. What one call applies
        must be there together: the adapters of a mixed batch, or several active ones.
        """,
    versions="""
        All.
        """,
    fix="""
        Plan with an adapter memory that holds the largest set that is used at once, or put fewer
        different adapters into one batch. One adapter alone is never refused.
        """,
    library="trimtab",
)
