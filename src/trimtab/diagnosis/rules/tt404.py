"""The page of TT404."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT404",
    seen="""
        The GPU or the host had less memory than the plan was made for.
        """,
    why="""
        Another program uses the GPU, or began to; the budget was given by hand and is larger
        than what is free; memory that is pinned is limited by the operating system or a
        container.
        """,
    versions="""
        All. On Windows the driver may move GPU memory to RAM instead of failing: then
        everything is slow.
        """,
    fix="""
        Plan with a smaller `--gpu` or `--cpu`, or close the other program. Without these flags
        the plan takes what is free now.
        """,
    library="the machine",
    not_helping="""
        Calling `torch.cuda.empty_cache()`: what torch holds beside the tensors is counted. What
        fragments is little, and less with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`,
        which the commands set.
        """,
    signs=(
        Sign(
            r"CUDA out of memory",
            ("OutOfMemoryError", "RuntimeError"),
            through=r"^(transformers|peft|accelerate|bitsandbytes)/(?!.*:caching_allocator_warmup$)",
            confidence="likely",
            alone=False,
        ),
    ),
)
