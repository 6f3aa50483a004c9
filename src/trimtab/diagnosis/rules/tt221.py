"""The page of TT221."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT221",
    seen="""
        After `PeftModel.from_pretrained` on a split base everything is on the GPU, out of memory or
        not, or everything runs on the CPU and is slow. There is no error; there may be a warning
        that `no modules could be assigned` to a device.
        """,
    why="""
        PEFT takes the base's hooks off and makes a plan of its own, from what is free now. The base
        that is there already is counted as used, and once more as what is to be placed. With a
        roomy GPU all of it is moved there, towers and offloaded layers included; with little room,
        none of it. A model card's advice to use `device_map={"": 0}` works since a base on one
        device is not placed a second time.
        """,
    versions="""
        Met with PEFT 0.19 and 0.21, transformers 5.5 and 5.24, accelerate 1.13 and 1.15.
        """,
    fix="""
        Place once: `trimtab.load(MODEL, adapters={...}, device_map=...)`, or `trimtab.attach(model,
        ADAPTER)` for a base that is placed already.
        """,
    library="peft",
    not_helping="""
        The base's own map, given to PEFT: names have changed, and it matches nothing. `max_memory`
        changes which of the two happens.
        """,
    foreign=True,
    said=(r"no modules could be assigned to the following devices",),
)
