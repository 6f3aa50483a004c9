"""The page of TT501."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT501",
    seen="""
        The folder, or the hub's repository, has no `config.json`.
        """,
    why="""
        It holds an adapter (`adapter_config.json`), GGUF files, the parts of a diffusers
        pipeline, or only a tokenizer; or it is the folder above or below the model's.
        """,
    versions="""
        All.
        """,
    fix="""
        Name the folder that holds `config.json`. An adapter goes to `--adapter`, its base is
        named in its config. Of a GGUF file transformers can make such a folder.
        """,
    library="the files",
    not_helping="""
        Writing a `config.json` by hand for weights of unknown shape.
        """,
    signs=(
        Sign(
            r"Unrecognized model in .* Should have a `model_type` key"
            r"|does not appear to have a file named config\.json",
            ("ValueError", "OSError", "EnvironmentError"),
            through=r"^transformers/",
        ),
    ),
)
