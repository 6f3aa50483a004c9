"""The page of TT509."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT509",
    seen="""
        The storage format asked for is not known, or the checkpoint is stored in one that is
        not supported, or in another one than asked for, or in one that its config does not tell.
        """,
    why="""
        Supported are 16 and 32 bits, bitsandbytes' NF4 and FP4, with and without double
        quantization, and int8. A checkpoint that is stored quantized stays in its format:
        quantizing again would round twice. So do the dtypes of its other weights.
        """,
    versions="""
        bitsandbytes from 0.49.2.
        """,
    fix="""
        Leave `--quant` at `auto` for a quantized checkpoint. For GPTQ, AWQ and the like start
        from the 16-bit checkpoint of the same model: trimtab quantizes while it loads.
        """,
    library="trimtab",
    not_helping="""
        Removing `quantization_config` from the config: the packed bytes stay packed.
        """,
)
