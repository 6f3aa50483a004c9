"""The page of TT212."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT212",
    seen="""
        `Cannot copy out of meta tensor; no data!`, or a tensor on device meta where another device
        was expected, with an adapter on a base that is split over devices.
        """,
    why="""
        accelerate keeps an offloaded weight elsewhere and a tensor without bytes, on `meta`, in the
        model. PEFT takes the hooks off that would bring the weight in, plans anew without knowing
        the first plan, and moves what is on `meta` as if it had bytes. Adapters that are put on
        such layers are made on `meta` too. The same comes of `model.to(...)` on an offloaded model,
        and of 4-bit weights whose quantization state was offloaded.
        """,
    versions="""
        Met with transformers 5.1 to 5.24, PEFT 0.18 to 0.21, accelerate 1.12 to 1.15.
        """,
    fix="""
        Place once: `trimtab.load(MODEL, adapters={...}, device_map=...)`, or `trimtab.attach(model,
        ADAPTER)` for a base that is placed already; both keep the map. With the stock stack alone:
        the whole base on one device, or the adapter merged into a 16-bit checkpoint first.
        """,
    library="peft",
    not_helping="""
        `to_empty()`, which the message names: it fills the weights with noise. `offload_dir`,
        `offload_buffers`, `ephemeral_gpu_offload`, `low_cpu_mem_usage`.
        """,
    foreign=True,
    signs=(
        Sign(
            r"Cannot copy out of meta tensor|Tensor on device meta is not on the expected device"
            r"|is not on the expected device meta",
            ("NotImplementedError", "RuntimeError"),
            through=r"^(accelerate|peft|bitsandbytes)/|^transformers/(integrations|quantizers)/",
        ),
    ),
)
