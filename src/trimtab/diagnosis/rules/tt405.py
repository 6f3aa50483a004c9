"""The page of TT405."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT405",
    seen="""
        `CUDA out of memory` in `caching_allocator_warmup`, while a base is loaded, or while an
        adapter is loaded with `model.load_adapter`.
        """,
    why="""
        transformers allocates the bytes of everything it is about to load in one piece, to save
        time. For `load_adapter` it counts the base once more, which is on the GPU already: with a
        base of more than half of the memory that cannot work.
        """,
    versions="""
        transformers 5.
        """,
    fix="""
        `trimtab.load`: the warm-up is off, and the peak while loading stays within the plan. With
        the stock stack: `PeftModel.from_pretrained` instead of `load_adapter`, or more of the map
        on `cpu`.
        """,
    library="transformers",
    not_helping="""
        `PYTORCH_CUDA_ALLOC_CONF`, `torch.cuda.empty_cache()`: the piece is too large, not
        fragmented.
        """,
    foreign=True,
    signs=(
        Sign(
            r"out of memory",
            ("OutOfMemoryError", "RuntimeError"),
            through=r"^transformers/.*:caching_allocator_warmup$",
            alone=False,
        ),
    ),
)
