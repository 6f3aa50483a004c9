"""The page of TT220."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT220",
    seen="""
        `Expected all tensors to be on the same device`, `mat2 is on cpu`, or the like, in a forward
        of a model that is split over devices.
        """,
    why="""
        A weight, an adapter's weight or the input is on another device than the layer runs on. With
        an adapter on a split base: it was put on the device where the layer rests, not where it
        runs, or a second placement took the hooks off. Without one: a module is used without being
        called, so that no hook brings its weight in.
        """,
    versions="""
        Met with `load_adapter` of transformers 5.1 to 5.24 on a layer that is off the GPU, and with
        `PeftModel.from_pretrained` of PEFT 0.19 when its plan finds no room on the GPU.
        """,
    fix="""
        `trimtab.attach(model, ADAPTER)` puts each adapter where its layer runs; `trimtab.load`
        places everything once. For inputs: `inputs.to(model.device)`.
        """,
    library="peft",
    not_helping="""
        `model.to("cuda")` on a model with a device map: it moves everything to the GPU or fails.
        """,
    foreign=True,
    signs=(
        Sign(
            r"Expected all tensors to be on the same device|mat\d? is on (cpu|cuda|meta)",
            ("RuntimeError",),
            through=r"^(peft|accelerate|transformers|bitsandbytes)/",
            confidence="likely",
        ),
    ),
)
