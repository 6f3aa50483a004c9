"""The page of TT604."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT604",
    seen="""
        A backward pass reaches the output of a streamed layer.
        """,
    why="""
        trimtab is for inference. The backward pass needs the layer's weights again, and they
        have left the device: the gradients would be garbage, in silence.
        """,
    versions="""
        All.
        """,
    fix="""
        Put the calls under `torch.no_grad()`. For training use a model that is resident.
        """,
    library="the program",
    not_helping="""
        `retain_graph=True`.
        """,
)
