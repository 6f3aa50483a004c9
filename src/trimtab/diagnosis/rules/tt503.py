"""The page of TT503."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT503",
    seen="""
        A folder with a config has no weights, or the index names a shard that is not there.
        """,
    why="""
        The download was not complete, or only some of the files were copied. `trimtab plan`
        needs no weights; loading does.
        """,
    versions="""
        All.
        """,
    fix="""
        `hf download OWNER/NAME`, or copy the rest. Weights are looked for under the names of
        transformers: `model.safetensors`, `pytorch_model.bin`, or shards with an index.
        """,
    library="the files",
    not_helping="""
        Renaming a shard of another model to fill the gap.
        """,
    signs=(
        Sign(
            r"Error no file named .* found in directory"
            r"|does not appear to have a file named (pytorch_)?model\b",
            ("OSError", "EnvironmentError"),
        ),
        Sign(
            r"No such file or directory:? .*\.(safetensors|bin)\b",
            ("FileNotFoundError",),
            through=r"^transformers/modeling_utils\.py:",
            alone=False,
        ),
    ),
)
