"""The page of TT202."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT202",
    seen="""
        The device map covers some of the model, and a parameter is covered by none of its keys.
        """,
    why="""
        Each parameter goes where the most specific key that covers it says. A map without the
        key `""` must cover all of them: embeddings, every layer, the last norm, the head, and
        in a multimodal model the towers and what projects from them. A buffer, such as Gemma
        4's `layer_scalar`, needs no key: it goes with its module.
        """,
    versions="""
        All. Stock, the same map fails with a message that a parameter has no device, a buffer
        included.
        """,
    fix="""
        Name the module, or add `"": 0` for everything that is not named; more specific keys
        still win.
        """,
    library="trimtab",
    not_helping="""
        A key for each parameter: the module's name covers them all.
        """,
    signs=(
        Sign(
            r"does not give any device for the following parameters: (?!base_model\.model\.)"
            r"|doesn't have any device set",
            ("ValueError",),
        ),
    ),
)
