"""The page of TT607."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT607",
    seen="""
        The model was asked for something it cannot do as it is placed: a modality that it does
        not have, a call that needs more slots than there are.
        """,
    why="""
        The arguments and the model do not belong together. A text model takes no images,
        whatever the plan is given.
        """,
    versions="""
        All.
        """,
    fix="""
        The error names what the model takes. Units that call each other in an order of their
        own need a larger ring: report it with the name of the model.
        """,
    library="the program",
    not_helping="""
        A larger budget.
        """,
)
