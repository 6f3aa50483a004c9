"""The page of TT218."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT218",
    seen="""
        `We need an `offload_dir` to dispatch this model`, or `Please provide an `offload_folder``.
        """,
    why="""
        The device map, or the plan that PEFT or accelerate made for lack of memory, puts modules on
        the disk, and no folder was named for them. From `PeftModel.from_pretrained` it means that
        PEFT plans the placement anew, and finds less room than the first plan did, since it counts
        the base twice.
        """,
    versions="""
        All.
        """,
    fix="""
        If the disk was meant, name a folder of its own, empty, for each model: one that is used
        twice computes with the first model's weights. If not: with an adapter, `trimtab.load` or
        `trimtab.attach` keep the first placement; without one, put the modules on `cpu`.
        """,
    library="peft",
    not_helping="""
        The folder of another model, or of the base.
        """,
    foreign=True,
    signs=(
        Sign(
            r"We need an `offload_dir` to dispatch this model"
            r"|[Pp]lease (provide|pass along) an `offload_folder`",
            ("ValueError",),
            through=r"^(accelerate|transformers|peft)/",
        ),
    ),
)
