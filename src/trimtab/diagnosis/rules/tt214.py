"""The page of TT214."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT214",
    seen="""
        `The device_map provided does not give any device for the following parameters:
        base_model.model...`, from `PeftModel.from_pretrained` or `load_adapter`.
        """,
    why="""
        In the PEFT model every module has another name: `base_model.model.` stands before it, and
        an adapted layer's own weight is in `base_layer`. The map has the names of the base.
        """,
    versions="""
        Met with PEFT 0.21.2 and a map with `cpu` and `disk`. On a GPU the same call passes, and
        silently moves to the GPU what the map had put elsewhere.
        """,
    fix="""
        Do not give PEFT a map: `trimtab.load(MODEL, adapters={...}, device_map=...)` or
        `trimtab.attach(model, ADAPTER)` keep the base's.
        """,
    library="peft",
    not_helping="""
        The prefix `base_model.model.` before each key: it works only while no decoder layer is on
        `cpu` or `disk`.
        """,
    foreign=True,
    signs=(
        Sign(
            r"does not give any device for the following parameters: base_model\.model\.",
            ("ValueError",),
        ),
    ),
)
