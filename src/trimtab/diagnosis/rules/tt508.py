"""The page of TT508."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT508",
    seen="""
        A weight arrived from the loader in another format, shape or dtype than the plan
        counted, or its scales have more digits than the dtype that the plan takes them for
        quantized from.
        """,
    why="""
        The plan was made with other versions of transformers or bitsandbytes, or a quantizer
        leaves a module out that the outline did not expect (`llm_int8_skip_modules`). Or a
        stored checkpoint's config is not true of its file: `bnb_4bit_quant_type` or
        `bnb_4bit_use_double_quant`, which the file says itself; or `quantized_from`, since
        scales are weights, and have their digits.
        """,
    versions="""
        All. If plan and loading use the same versions, it is a fault of trimtab.
        """,
    fix="""
        Make the plan again with the installed versions. If it happens with a fresh plan, report
        it with the name of the weight and the versions. Where the error says how a weight is
        stored, correct the `quantization_config` in config.json. For scales with more digits,
        quantize the model again from its 16-bit checkpoint, or take `quantized_from` out of the
        `quantization_config`.
        """,
    library="trimtab",
    not_helping="""
        Another `--quant`, unless the error names the format.
        """,
)
