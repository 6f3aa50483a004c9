"""The page of TT601."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT601",
    seen="""
        Something writes to a weight that is parked: an in-place operation, `weight.data = ...`,
        an item, a pointer to its storage.
        """,
    why="""
        The bytes of a streamed weight rest in a slab. What the module holds between its
        forwards is a stand-in that answers for shape, dtype and device; a write to it would be
        lost at the next forward, in silence.
        """,
    versions="""
        All.
        """,
    fix="""
        Change the checkpoint, not the loaded model. Or keep the unit resident, with a larger
        budget or a device map that puts it on the GPU.
        """,
    library="trimtab",
    not_helping="""
        `copy_` under `torch.no_grad()`: gradients are not what keeps it from working.
        """,
)
