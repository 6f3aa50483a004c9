"""The page of TT319."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT319",
    seen="""
        After `hotswap_adapter` on a model with offloaded layers the answers are those of neither
        adapter. There is no error.
        """,
    why="""
        Only resident layers are swapped: the adapter's tensors of offloaded layers are on `meta`,
        and their bytes lie with accelerate.
        """,
    versions="""
        Met with transformers 5.24, PEFT 0.21.2 and accelerate 1.15. With PEFT 0.18 and 0.19 the
        next forward fails: `new() received an invalid combination of arguments - got (Tensor,
        requires_grad=bool)`, from accelerate's hook.
        """,
    fix="""
        `placed.add_adapter` and `set_adapter` of a model that `trimtab.load` has placed: adapters
        are resident there, so that a swap changes all of them.
        """,
    library="peft",
    not_helping="""
        Calling it twice.
        """,
    foreign=True,
    signs=(
        Sign(
            r"new\(\) received an invalid combination of arguments"
            r" - got \(Tensor, requires_grad=bool\)",
            ("TypeError",),
            through=r"^accelerate/hooks\.py:pre_forward$",
            alone=False,
            confidence="likely",
        ),
    ),
)
