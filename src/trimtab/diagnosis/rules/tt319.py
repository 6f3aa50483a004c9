"""The page of TT319."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT319",
    seen="""
        After `hotswap_adapter` on a model with offloaded layers the answers are those of neither
        adapter. There is no error.
        """,
    why="""
        Only resident layers are swapped: the adapter's tensors of offloaded layers are on `meta`,
        and their bytes lie with accelerate.
        """,
    versions="""
        Met with transformers 5.24, PEFT 0.21.2 and accelerate 1.15.
        """,
    fix="""
        `placed.add_adapter` and `set_adapter` of a model that `trimtab.load` has placed: adapters
        are resident there, so that a swap changes all of them.
        """,
    library="peft",
    not_helping="""
        Calling it twice.
        """,
    foreign=True,
)
