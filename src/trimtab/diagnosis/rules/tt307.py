"""The page of TT307."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT307",
    seen="""
        `adapter_config.json` has a field that the installed PEFT does not know, and the field
        is set; or it names a kind of adapter that PEFT does not know.
        """,
    why="""
        The adapter was saved by a newer PEFT. A field that only says how it was trained is left
        out, with a note. A field that changes what the adapter computes cannot be left out.
        """,
    versions="""
        Any PEFT older than the one that saved the adapter; newer ones write their
        `peft_version` into the config.
        """,
    fix="""
        `pip install -U peft`.
        """,
    library="peft",
    not_helping="""
        Deleting the field from the config: the adapter loads and computes something else.
        """,
    references=("huggingface/peft#2275",),
    signs=(
        Sign(
            r"^'[A-Z0-9_]+'$",
            ("KeyError",),
            innermost=r"^peft/(peft_model|config|mapping)\.py:",
            alone=False,
        ),
        Sign(
            r"^(Lora|AdaLora|LoHa|LoKr|IA3|OFT|BOFT|Vera|\w*Prompt\w*|\w*Tuning\w*|\w*Lora)Config"
            r"\.__init__\(\) got an unexpected keyword argument",
            ("TypeError",),
        ),
    ),
)
