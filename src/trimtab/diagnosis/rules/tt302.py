"""The page of TT302."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT302",
    seen="""
        The adapter's config or weights cannot be read, or the file is shorter or longer than
        its header says, or it is a pickle with more in it than weights.
        """,
    why="""
        A copy or a download that stopped, a disk that was full while saving, or Git LFS, which
        leaves a small text file where the weights should be. A pickle can hold code; it is read
        as weights only, and nothing in it is run.
        """,
    versions="""
        All.
        """,
    fix="""
        Copy or download it again (`git lfs pull` for a clone). For a pickle with code in it,
        ask its author for `adapter_model.safetensors`.
        """,
    library="the files",
    not_helping="""
        `weights_only=False`: it runs whatever is in the file.
        """,
    signs=(
        Sign(
            r"Error while deserializing header",
            ("SafetensorError",),
            through=r"^peft/|^transformers/integrations/peft\.py:load_adapter$",
            alone=False,
        ),
        Sign(
            r"Weights only load failed|invalid load key|pickle data was truncated"
            r"|PytorchStreamReader failed|Ran out of input",
            ("UnpicklingError", "EOFError", "RuntimeError"),
            through=r"^peft/|^transformers/integrations/peft\.py:load_adapter$",
            alone=False,
        ),
        Sign(
            r"line \d+ column \d+", ("JSONDecodeError",), through=r"^peft/config\.py:", alone=False
        ),
        Sign(
            r"^None$",
            ("KeyError",),
            innermost=r"^peft/(peft_model|config|mapping\w*|auto)\.py:",
            alone=False,
        ),
    ),
)
