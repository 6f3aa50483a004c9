"""The page of TT213."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT213",
    seen="""
        `weight is on the meta device, we need a `value` to put in on cpu`, while a base is loaded
        with a device map.
        """,
    why="""
        The map has the key `""` for everything, and a more specific key that puts a module on the
        disk. accelerate treats the catch-all as covering that module too, and wants to bring in a
        weight that is on the disk. The same comes of two tied weights, a table and the head, of
        which one is on the disk and the other is not.
        """,
    versions="""
        Met with transformers 5.1 to 5.24 and accelerate 1.12 to 1.15.
        """,
    fix="""
        Name every module instead of the key `""`, and tied ones alike: `trimtab check MODEL
        --device-map map.json --fix` writes such a map. trimtab takes the most specific key:
        `trimtab.load(MODEL, device_map=...)` obeys the map as it is.
        """,
    library="accelerate",
    not_helping="""
        Another `offload_folder`; `offload_state_dict`.
        """,
    foreign=True,
    signs=(
        Sign(
            r"is on the meta device, we need a `value` to put in",
            ("ValueError",),
            through=r"^accelerate/",
        ),
    ),
)
