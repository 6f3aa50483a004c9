"""The page of TT102."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT102",
    seen="""
        `trimtab check` names an installed package, its version and the oldest version that will
        do; or transformers says that `the version of PEFT you are using is not compatible`.
        """,
    why="""
        transformers 5 changed how weights are converted while they load, and PEFT, accelerate
        and bitsandbytes changed with it. Nothing older is tested. Some models need more: Gemma
        4 came with transformers 5.5.
        """,
    versions="""
        Supported from transformers 5.1.0, PEFT 0.18.1, accelerate 1.12.0 and bitsandbytes
        0.49.2. There are no upper limits.
        """,
    fix="""
        `pip install -U transformers peft accelerate bitsandbytes`: together, since each expects
        its siblings to be about as old as itself.
        """,
    library="the environment",
    not_helping="""
        Upgrading one of them alone, or `--no-deps`.
        """,
    signs=(
        Sign(
            r"version of \w+ you are using is not compatible, please use a version"
            r"|is required for a normal functioning of this module, but found",
            ("ValueError", "ImportError"),
            through=r"^(transformers|peft|accelerate)/",
            alone=False,
        ),
    ),
)
