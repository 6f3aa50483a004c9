"""The page of TT204."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT204",
    seen="""
        The device map puts a module on a second GPU, the disk folder cannot be used, or
        arguments contradict a finished plan.
        """,
    why="""
        A placement runs on one GPU, the first one that torch sees. What does not fit there
        rests in RAM or on the disk and is brought in for each forward. A plan is carried out as
        it is; arguments that would change it come too late.
        """,
    versions="""
        All.
        """,
    fix="""
        Map the module to `0`, `cpu` or `disk`; `CUDA_VISIBLE_DEVICES` decides which GPU is the
        first. For a model that accelerate has spread over several GPUs use `trimtab.attach`.
        For a disk folder that cannot be used, name one in which you may write. For a plan, make
        it again with the arguments.
        """,
    library="trimtab",
    not_helping="""
        Renumbering the GPUs in the map: `1` is the second one that torch sees, whatever else it
        is called.
        """,
)
