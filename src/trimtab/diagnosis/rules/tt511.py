"""The page of TT511."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT511",
    seen="""
        `SCB is neither a parameter, buffer, nor extra state`, the same with `weight_format`,
        `'Parameter' object has no attribute 'SCB'` (or `'CB'`), or `` `weight` is not an
        nn.Module`` while a quantized model is loaded, gets an adapter, or is saved.
        """,
    why="""
        An 8-bit weight needs its scales (`SCB`), a 4-bit one its quantization state. bitsandbytes
        writes them into the state dictionary as entries of their own, but they are no parameters:
        code that looks each entry up by its name finds nothing, most of all when PEFT has renamed
        the layer to `base_layer`.
        """,
    versions="""
        `load_adapter` on an int8 base: transformers 5.1. Saving an offloaded quantized base with an
        adapter: met with transformers 5.24, PEFT 0.21 and accelerate 1.15.
        """,
    fix="""
        `pip install -U transformers peft accelerate bitsandbytes`. To run: `trimtab.load(MODEL,
        adapters={...}, quant="int8")`. To save an adapter, save it alone: `model.save_pretrained`
        of the PEFT model does not need the base.
        """,
    library="transformers",
    not_helping="""
        Deleting the entries from the state dictionary: the weights lose their scales.
        """,
    foreign=True,
    signs=(
        Sign(
            r"(SCB|weight_format|quant_state\S*|absmax|quant_map)`? is neither a parameter, buffer",
            ("AttributeError",),
        ),
        Sign(
            r"'(Parameter|Tensor)' object has no attribute '(S?CB|quant_state)'",
            ("AttributeError",),
        ),
        Sign(
            r"\.(SCB|absmax|quant_map|nested_\w+|quant_state\S*|weight_format)'$",
            ("KeyError",),
            through=r"^peft/",
            alone=False,
        ),
        Sign(
            r"`weight` is not an nn\.Module",
            ("AttributeError",),
            through=r"^transformers/modeling_utils\.py:",
            alone=False,
        ),
    ),
)
