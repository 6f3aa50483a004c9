"""The page of TT401."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT401",
    seen="""
        Even the leanest plan is above the budget of a tier. The error says of which, by how
        many bytes, and what would help. `plan`, `run` and `chat` exit with 3.
        """,
    why="""
        On the device that runs there must be room for what cannot leave it: norms, tied tables,
        the slots through which layers are streamed, the KV cache for the context and batch
        asked for, logits, activations, adapters in 32 bits, the CUDA context. What is away
        needs room in RAM or on the disk. While loading, the largest parameter is there in 16
        bits, too; of fused experts it is two and a half times that.
        """,
    versions="""
        All.
        """,
    fix="""
        What the error lists, each with the bytes it saves: a larger budget, a shorter context,
        a smaller batch, another format, a disk tier. With a device map: leave it out, and the
        plan decides.
        """,
    library="the budget",
    not_helping="""
        `device_map="auto"` in the stock stack: it places the base, and fails when the adapter
        comes.
        """,
)
