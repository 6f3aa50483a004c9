"""The page of TT101."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT101",
    seen="""
        Planning or loading stops before anything is loaded and names the package.
        """,
    why="""
        Quantized formats need bitsandbytes, which is an extra of trimtab and not part of its
        core. Some models need packages of their own, for their images or their tokenizer;
        transformers names them when it loads such a model.
        """,
    versions="""
        All. bitsandbytes is supported from 0.49.2.
        """,
    fix="""
        Install the package that the error names; for quantized formats `pip install
        bitsandbytes`. Use the Python that runs trimtab: `python -m pip install ...`.
        """,
    library="the environment",
    not_helping="""
        Installing it into another environment. `--quant none` needs no bitsandbytes, but four
        times the bytes of NF4.
        """,
    signs=(
        Sign(
            r"FlashAttention\d? has been toggled on, but it cannot be used"
            r"|requires? (the latest version of )?`?(bitsandbytes|accelerate)\b"
            r"|Using `bitsandbytes`",
            ("ImportError", "ModuleNotFoundError", "PackageNotFoundError", "ValueError"),
            through=r"^(transformers|peft|accelerate)/",
        ),
    ),
)
