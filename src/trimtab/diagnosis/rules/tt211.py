"""The page of TT211."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT211",
    seen="""
        `Tensor.item() cannot be called on meta tensors`, while a 4-bit base that is split over
        devices gets an adapter, is placed again, or is saved.
        """,
    why="""
        The model is placed twice. The first placement offloads the quantized weights and leaves
        tensors on `meta` in their place; the second one asks for the state dictionary, for which
        bitsandbytes reads the offset of a double-quantized state as a number. A tensor on `meta`
        has none. `PeftModel.from_pretrained` makes such a second placement whenever the base has a
        device map with `cpu` or `disk` in it.
        """,
    versions="""
        Met with transformers 5.1 to 5.24, PEFT 0.18 to 0.21, accelerate 1.12 to 1.15, bitsandbytes
        0.49 and 0.50.
        """,
    fix="""
        Place once. `trimtab.load(MODEL, adapters={...}, quant="nf4-dq", device_map=...)` loads base
        and adapter in one pass; for a base that is loaded already, `trimtab.attach(model, ADAPTER)`
        keeps its placement. With the stock stack alone: a base that is wholly on one device.
        """,
    library="peft",
    not_helping="""
        Double quantization off: the first forward then fails with `Cannot copy out of meta tensor`.
        `offload_dir`, `offload_buffers` and `ephemeral_gpu_offload` change nothing.
        """,
    foreign=True,
    signs=(
        Sign(
            r"Tensor\.item\(\) cannot be called on meta tensors",
            ("RuntimeError",),
            through=r"bitsandbytes/functional\.py|accelerate/|peft/",
        ),
    ),
)
