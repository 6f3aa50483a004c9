"""The page of TT104."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT104",
    seen="""
        transformers has no class of the name that the model's config asks for.
        """,
    why="""
        Either the model is newer than the installed transformers, or its class lies in the
        model's own repository (`auto_map` in its config). trimtab runs no code from a model's
        repository: a plan must be made from facts, and such code may do anything while it
        loads.
        """,
    versions="""
        Gemma 4 needs transformers 5.5; each model says in its `config.json` which
        `transformers_version` wrote it.
        """,
    fix="""
        `pip install -U transformers`. If the class is in the model's repository, look for a
        checkpoint of the model in the form that transformers has a class for; names often end
        in `-hf`.
        """,
    library="the model",
    not_helping="""
        `trust_remote_code=True`: there is no such option here.
        """,
    signs=(
        Sign(
            r"but Transformers does not recognize this architecture|has no attribute '\w+For\w+'",
            ("ValueError", "AttributeError"),
            through=r"^transformers/models/auto/",
        ),
        Sign(
            r"contains custom code which must be executed to correctly load the model",
            ("ValueError",),
            through=r"^transformers/",
        ),
    ),
)
