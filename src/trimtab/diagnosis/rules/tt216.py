"""The page of TT216."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT216",
    seen="""
        `KeyError: 22`, or another layer's number or the name of a type of layer, in
        `shared_kv_states` of Gemma 4's attention.
        """,
    why="""
        Later layers of Gemma 4 reuse the keys and values of an earlier one, through a dictionary
        that is passed from layer to layer. A hook of accelerate on a decoder layer copies the
        arguments of the call, the dictionary among them: what an earlier layer writes into its
        copy, later ones do not see. transformers names the argument as one that hooks must leave
        alone; PEFT does not pass that on when it places the model again.
        """,
    versions="""
        transformers from 5.5, where Gemma 4 is; seen in 5.5.4 with PEFT 0.19.1, no longer in 5.24.
        """,
    fix="""
        `pip install -U transformers peft accelerate`, and place once: `trimtab.load(MODEL,
        adapters={...}, device_map=...)`.
        """,
    library="peft",
    not_helping="""
        `use_cache=False`; another split of the decoder layers, as long as one of them has a hook.
        """,
    foreign=True,
    signs=(
        Sign(
            r"^(\d+|'\w+_attention')$",
            ("KeyError",),
            innermost=r"^transformers/models/gemma\w+/modeling_\w+\.py:forward$",
            alone=False,
        ),
    ),
    affected={"transformers": ("5.5", "5.24")},
)
