"""The page of TT103."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT103",
    seen="""
        The device map or the plan names a GPU, and there is none here, or torch does not see
        it.
        """,
    why="""
        One of these: torch was installed as a CPU build; the driver is older than the CUDA
        version of torch; `CUDA_VISIBLE_DEVICES` hides the GPU; the plan was made for another
        machine.
        """,
    versions="""
        All.
        """,
    fix="""
        `python -c "import torch; print(torch.version.cuda, torch.cuda.is_available())"` tells
        which. `None` is a CPU build: install torch from its index for CUDA. A version and
        `False`: update the driver.

        To plan for a GPU that is not here, give its size (`--gpu 8GiB`). To run without a GPU,
        leave `--gpu` out and map to `cpu` and `disk` only.
        """,
    library="the environment",
    not_helping="""
        Reinstalling trimtab or transformers: neither holds anything of CUDA.
        """,
    signs=(
        Sign(
            r"Cannot access accelerator device when none is available"
            r"|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
            r"|No CUDA GPUs are available"
            r"|NVIDIA driver on your system is too old|CUDA driver version is insufficient"
            r"|pin_memory=True requires a CUDA",
            ("RuntimeError", "AssertionError"),
            through=r"^(transformers|peft|accelerate|bitsandbytes)/",
            alone=False,
        ),
    ),
)
