"""The page of TT215."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT215",
    seen="""
        A `KeyError` with the name of a weight or a module, such as
        `base_model.model.model.layers.0.mlp.experts.0.down_proj`, from `_update_offload` or from
        accelerate's index of offloaded weights.
        """,
    why="""
        For a base on the disk PEFT renames the entries of the offload index by what it takes the
        names to be. It is wrong where a checkpoint names its weights otherwise than the class
        (Qwen3-MoE's experts, vision models), where a head is tied, and in older versions for nearly
        every model.
        """,
    versions="""
        Met with PEFT 0.18.1 to 0.21.2. With 0.21 a plain Llama passes; models whose checkpoint has
        other names do not.
        """,
    fix="""
        `trimtab.load(MODEL, adapters={...}, device_map=..., disk=...)`, which never writes to the
        base. Then check the base: the same call may have rewritten its `model.safetensors`; see
        TT507.
        """,
    library="peft",
    not_helping="""
        Another `offload_folder` or `offload_index`. Trying again: the second try reads the
        rewritten file.
        """,
    foreign=True,
    signs=(
        Sign(
            r"^'.+\..+'$",
            ("KeyError",),
            innermost=r"^peft/peft_model\.py:_update_offload$",
            alone=False,
        ),
        Sign(
            r"^'.+\..+'$",
            ("KeyError",),
            innermost=r"^accelerate/utils/offload\.py:__getitem__$",
            alone=False,
        ),
    ),
)
