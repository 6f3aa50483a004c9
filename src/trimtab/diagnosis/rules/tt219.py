"""The page of TT219."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT219",
    seen="""
        `Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to
        fit the quantized model`.
        """,
    why="""
        transformers does not quantize what a map puts on `cpu` or `disk`, and refuses such a map
        unless it is told to keep these modules unquantized. `device_map="auto"` makes such a map
        when the GPU has too little free memory.
        """,
    versions="""
        All.
        """,
    fix="""
        `trimtab.load(MODEL, quant="nf4", device_map=...)` quantizes every layer, wherever it rests,
        and streams the quantized bytes. `trimtab plan MODEL --quant nf4 --gpu 6GiB` says what fits.
        """,
    library="transformers",
    not_helping="""
        `llm_int8_enable_fp32_cpu_offload=True`: the modules stay in 16 or 32 bits, four times the
        bytes or more; with `disk` in the map, or with `{"": "cpu"}`, nothing is quantized at all.
        """,
    foreign=True,
    signs=(Sign(r"Some modules are dispatched on the CPU or the disk", ("ValueError",)),),
)
