"""The page of TT315."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT315",
    seen="""
        PEFT raised an error while it made the adapter's layers or filled them. The error's
        "why" has PEFT's own words.
        """,
    why="""
        A kind of adapter that does not suit the base's format (LoHa, LoKr and HRA on 4-bit
        weights, a bitsandbytes layer among the `modules_to_save`), a config that contradicts
        itself, or a mixture with adapters that are loaded already.
        """,
    versions="""
        As PEFT's own: the same adapter fails on the same model with everything on one device.
        """,
    fix="""
        Try the adapter with PEFT alone on the model in 16 bits. If it works there, use `--quant
        none`; if not, the adapter or PEFT is at fault.
        """,
    library="peft",
    not_helping="""
        `low_cpu_mem_usage=True`: several kinds fail only with it, and it rounds the adapter to
        16 bits.
        """,
)
