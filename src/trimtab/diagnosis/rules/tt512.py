"""The page of TT512."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT512",
    seen="""
        `Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'`, or the same
        with `Int8Params`.
        """,
    why="""
        transformers 5 marks each loaded parameter with `_is_hf_initialized`. When accelerate moves
        a quantized parameter it makes a new one and hands it every attribute of the old one as an
        argument, this mark too; bitsandbytes does not know it.
        """,
    versions="""
        Met with accelerate 1.12 and 1.13 and transformers 5; not with accelerate 1.15.
        """,
    fix="""
        `pip install -U accelerate bitsandbytes`. `trimtab.load` makes no use of that code, on any
        version.
        """,
    library="accelerate",
    not_helping="""
        Deleting the attribute from the parameters before the call: each load sets it again.
        """,
    foreign=True,
    signs=(Sign(r"got an unexpected keyword argument '_is_hf_initialized'", ("TypeError",)),),
    affected={"accelerate": ("", "1.15")},
)
