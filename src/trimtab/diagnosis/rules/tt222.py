"""The page of TT222."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT222",
    seen="""
        A model with layers on the disk answers with noise, or like another model. There is no
        error.
        """,
    why="""
        accelerate writes a file for each offloaded weight, named like the weight, and takes a file
        that is there for its own. A second model in the same folder computes with the first one's
        weights; a second adapter on the same base overwrites the first one's.
        """,
    versions="""
        Met with transformers 5.24, PEFT 0.21.2 and accelerate 1.15.
        """,
    fix="""
        An empty folder for each model, removed afterwards. trimtab locks its folder and refuses one
        that is in use (TT206).
        """,
    library="accelerate",
    not_helping="""
        Loading again into the same folder.
        """,
    foreign=True,
)
