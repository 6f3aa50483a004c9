"""The page of TT504."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT504",
    seen="""
        `model.safetensors.index.json` names tensors that its shards do not hold.
        """,
    why="""
        Index and shards are of different versions: one was updated and the other was not, or a
        tool rewrote a shard.
        """,
    versions="""
        All.
        """,
    fix="""
        Download the model again into an empty folder.
        """,
    library="the files",
    not_helping="""
        Removing the names from the index: the tensors are needed.
        """,
)
