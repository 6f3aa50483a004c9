"""The page of TT516."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT516",
    seen="""
        `save_quantized`, or `trimtab run --save-quantized`, names a folder that is there already,
        or the folder with `.partial` behind its name; or the model is placed in 16 or 32 bits.
        """,
    why="""
        Saving overwrites nothing. The checkpoint grows in `DIR.partial`, which becomes `DIR` when
        it is whole, and is removed when saving fails; a process that was killed leaves it. What
        is not quantized is in the checkpoint that was loaded, as it would be saved.
        """,
    versions="""
        All.
        """,
    fix="""
        Name a folder that does not exist, and delete `DIR.partial` if nobody is writing it any
        more. Ask for a quant, such as `nf4`.
        """,
    library="trimtab",
)
