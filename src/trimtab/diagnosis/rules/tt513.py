"""The page of TT513."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT513",
    seen="""
        `AssertionError: N must be divisible by block_n` in the first forward of a 4-bit model on a
        CPU. Or trimtab refuses to attach an adapter to a base that has run.
        """,
    why="""
        On a CPU with AVX512-BF16 bitsandbytes repacks each 4-bit weight in place at the first
        forward, and can do so only if the number of rows is a multiple of 32. The repacking has
        further faults: what `state_dict` gives afterwards is not what was loaded.
        """,
    versions="""
        bitsandbytes 0.49 and 0.50, on CPUs with AVX512-BF16 only.
        """,
    fix="""
        Before the first forward:

        ```python
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        ```

        trimtab does that by itself. A base that has run is loaded again; the adapter is attached
        before its first forward.
        """,
    library="bitsandbytes",
    not_helping="""
        Another dtype; padding the inputs: it is the weight's rows that count.
        """,
    foreign=True,
    signs=(Sign(r"N must be divisible by block_n", ("AssertionError",)),),
)
