"""The page of TT313."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT313",
    seen="""
        The adapter has tensors for modules that only wrap a layer.
        """,
    why="""
        In Gemma 4 the towers wrap their linears in `Gemma4ClippableLinear`, which is no
        `torch.nn.Linear`; PEFT adapts linears, and refuses the wrapper. An adapter with tensors
        for the wrapper itself was made with a patched PEFT or by another library.
        """,
    versions="""
        transformers from 5.5, where Gemma 4 is. Stock, the same is `Target module
        Gemma4ClippableLinear ... is not supported`, also for an adapter of the language model
        alone, since names like `q_proj` occur in the towers too. trimtab then adapts what the
        file has tensors for and names the modules it leaves alone.
        """,
    fix="""
        Use an adapter that targets the layer inside, `...q_proj.linear`, or one of the language
        model only.
        """,
    library="peft",
    not_helping="""
        `exclude_modules` at loading: the tensors are in the file and would be dropped.
        """,
    references=("huggingface/peft#3129",),
    signs=(
        Sign(r"Target module [\s\S]* is not supported", ("ValueError",), through=r"^peft/tuners/"),
    ),
)
