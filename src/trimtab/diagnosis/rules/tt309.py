"""The page of TT309."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT309",
    seen="""
        `merge_adapter`, `merge_and_unload` or a layer's `merge` is called on a placed model, or
        `trimtab merge` is given a quantized base. From PEFT: `Merge lora module to 4-bit linear may
        get different generations due to rounding errors`, or `Cannot merge ia3 layers when the
        model is loaded in 4-bit mode`.
        """,
    why="""
        Merging writes into the base's weights. A quantized base would be decoded, changed and
        rounded again: twice rounded, it answers differently from base and adapter, and
        unmerging does not bring the old weights back. On weights that are parked the sum would
        be lost. It is refused before the first layer is changed.
        """,
    versions="""
        All. PEFT by itself merges into 4-bit and 8-bit layers, and warns of rounding errors.
        """,
    fix="""
        Run base and adapter side by side: that is exact. For a merged checkpoint: `trimtab
        merge`, which adds the adapter to the 16-bit base, shard by shard; quantize the result
        afterwards.
        """,
    library="trimtab",
    not_helping="""
        Unmerging and merging again.
        """,
    references=("huggingface/peft#2321",),
    signs=(
        Sign(
            r"Cannot merge \w+ layers when the model is (loaded in [48]-bit mode|gptq quantized)",
            ("ValueError",),
            through=r"^peft/",
        ),
    ),
    said=(r"\b[Mm]erge \w+ module to [48]-bit linear may get different generations",),
)
