"""The page of TT207."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT207",
    seen="""
        `trimtab.attach` is given a model that transformers and accelerate have not placed.
        """,
    why="""
        `attach` keeps a placement that is there, with its hooks and its map. A model without
        one needs no such care, or is not ready for an adapter: parameters on `meta` that no
        hook brings in have no bytes.
        """,
    versions="""
        All.
        """,
    fix="""
        If the whole model is on one device, `PeftModel.from_pretrained` will do. If it is not
        loaded yet, use `trimtab.load`, or load it with a `device_map`.
        """,
    library="the program",
    not_helping="""
        Setting `hf_device_map` by hand: it describes hooks and does not make them.
        """,
)
