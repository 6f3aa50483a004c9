"""The page of TT217."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT217",
    seen="""
        `TypeError: unhashable type: 'set'` in `get_balanced_memory`, from
        `PeftModel.from_pretrained` on a base that is split over devices.
        """,
    why="""
        transformers 5 keeps the classes that must not be split in a set. PEFT hands it to
        accelerate, which takes anything that is no list for the name of one class.
        """,
    versions="""
        PEFT 0.18.1 with transformers 5; mended by PEFT 0.19.
        """,
    fix="""
        `pip install -U peft`. The second placement that follows has faults of its own:
        `trimtab.load` and `trimtab.attach` make none.
        """,
    library="peft",
    not_helping="""
        `max_memory`: the balanced plan is made all the same.
        """,
    foreign=True,
    signs=(
        Sign(
            r"unhashable type: 'set'",
            ("TypeError",),
            through=r"^accelerate/.*:get_balanced_memory$",
            alone=False,
        ),
    ),
    affected={"peft": ("", "0.19")},
)
