"""The page of TT311."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT311",
    seen="""
        An adapter is asked for under a name that none has, or one is added under a name that is
        taken or cannot be used, or the base has adapter layers of its own.
        """,
    why="""
        Names are those given at loading: `--adapter NAME=PATH` or the keys of `adapters`. PEFT
        uses the name as a key of its modules, so it has no dots.
        """,
    versions="""
        All.
        """,
    fix="""
        Use a name that the error lists, another one for a further adapter, or `remove_adapter`
        first. Give the base without adapter layers.
        """,
    library="the program",
    not_helping="""
        Adding it a second time under the same name to reload it: remove it first.
        """,
    signs=(
        Sign(
            r"^Adapter (with name )?\S+ (not found|does not exist|already exists)"
            r"|infer with non-existing adapter",
            ("ValueError",),
            through=r"^(peft/|transformers/integrations/peft)",
            alone=False,
        ),
    ),
)
