"""The page of TT303."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT303",
    seen="""
        Tensors of the adapter's file match no module of the model. The error counts them and
        names three.
        """,
    why="""
        The adapter was trained on another model, or on another class of the same model, whose
        names differ by more than a prefix. Changes of prefix alone, such as
        `language_model.model.layers` to `model.language_model.layers`, are found and mapped. Or
        the file holds more than its config targets.
        """,
    versions="""
        All. PEFT loads such an adapter without an error; up to the newest version, keys that
        match nothing are not even reported, and what is missing gives a warning. The bare base
        answers.
        """,
    fix="""
        Check that the adapter belongs to this model and that its config was saved with these
        weights. `allow_unused` loads the rest without these tensors, and names them.
        """,
    library="the adapter",
    not_helping="""
        Renaming the adapter. `strict=False` and its like are what PEFT does anyway.
        """,
    references=("huggingface/peft#1932", "huggingface/peft#2566"),
    said=(r"Found missing adapter keys while loading the checkpoint",),
)
