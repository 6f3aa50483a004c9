"""The page of TT514."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT514",
    seen="""
        `trimtab merge` refuses a base, and names a parameter.
        """,
    why="""
        transformers renames a checkpoint's tensors when it loads them, and puts some together:
        the experts of a mixture, the parts of a fused projection. For a merge each of them has
        to be found, and what comes of it put back. This is tried on the tensors themselves:
        taken apart again, they must be what they were, to the last bit. Here they are not, or
        two tensors have the same name in the model, or the installed transformers has no way
        back.
        """,
    versions="""
        All; which models it meets depends on the version of transformers.
        """,
    fix="""
        Load the base with transformers, save it with `save_pretrained` into a new folder, and
        merge into that. A newer transformers may know the way back.
        """,
    library="transformers",
)
