"""The page of TT317."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT317",
    seen="""
        With an adapter other than LoRA on a 4-bit or 8-bit base: two matrices of different dtype,
        or of shapes that do not fit, such as `16384x1`. trimtab sends a token through one layer of
        each sort when it loads the adapter, and says it then.
        """,
    why="""
        Some of PEFT's methods have no code of their own for quantized layers: they read the packed
        bytes of a 4-bit weight as if it were the matrix, or multiply in 32 bits what the next layer
        takes in 16. A quantized layer cannot be trained whole (`modules_to_save`) either: PEFT
        copies the packed one. UniLoRA rounds its scales to whole numbers there, and does nothing.
        """,
    versions="""
        Met with PEFT 0.18.1 to 0.21.2: HRA, LoKr, LoHa, DEFT and PEANuT on 4-bit layers; IA3,
        RandLora, RoAd, OSF and others on both; VeRA and BOFT in 0.18. `docs/adapters.md` has all.
        """,
    fix="""
        Use the adapter on a 16-bit base (`--quant none`, streamed if it does not fit), or train a
        LoRA.
        """,
    library="peft",
    not_helping="""
        Another `compute_dtype` alone: the packed weight stays packed.
        """,
    foreign=True,
    signs=(
        Sign(
            r"to have the same dtype",
            ("RuntimeError",),
            through=r"^peft/tuners/tuners_utils\.py:forward$",
            alone=False,
            confidence="likely",
        ),
        Sign(r"size mismatch for base_model\.\S+\.hada_\w+\.", ("RuntimeError",)),
        Sign(
            r"mat1 and mat2|shape '.*' is invalid",
            ("RuntimeError",),
            through=r"^peft/tuners/(ia3|randlora|road|vera|loha|lokr|hra|lycoris_utils)\b",
            alone=False,
            confidence="likely",
        ),
    ),
)
