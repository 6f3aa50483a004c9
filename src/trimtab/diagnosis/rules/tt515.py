"""The page of TT515."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT515",
    seen="""
        A model that was loaded with a 4-bit or 8-bit configuration takes as much memory as without
        it. There is no error.
        """,
    why="""
        With `llm_int8_enable_fp32_cpu_offload` transformers leaves every module that the map puts
        on `cpu` or `disk` unquantized. With `{"": "cpu"}` that is all of them; with `disk` in the
        map, bitsandbytes quantizes none either.
        """,
    versions="""
        Met with transformers 5.24 and bitsandbytes 0.49 and 0.50.
        """,
    fix="""
        `trimtab.load(MODEL, quant="nf4", device_map=...)` quantizes every layer wherever it rests.
        Otherwise leave the flag out: the map is then refused, which is the truth (TT219).
        """,
    library="transformers",
    not_helping="""
        `load_in_4bit` in place of `load_in_8bit`.
        """,
    foreign=True,
)
