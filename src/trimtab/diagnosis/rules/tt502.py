"""The page of TT502."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT502",
    seen="""
        A file of the checkpoint, or the config, cannot be read, or is shorter or longer than
        its header says.
        """,
    why="""
        A copy or a download that stopped; a full disk; Git LFS, which leaves a small text file
        where the weights should be; a pickle that holds more than weights.
        """,
    versions="""
        All.
        """,
    fix="""
        Download the file again (`hf download` continues where it stopped; `git lfs pull` for a
        clone). `trimtab check` reads all headers and takes seconds.
        """,
    library="the files",
    not_helping="""
        Deleting the index file: the shards are read by it.
        """,
    signs=(
        Sign(
            r"Error while deserializing header",
            ("SafetensorError",),
            innermost=r"^transformers/|^safetensors/",
            through=r"^transformers/modeling_utils\.py:from_pretrained$",
            alone=False,
        ),
        Sign(
            r"Weights only load failed|invalid load key|pickle data was truncated"
            r"|PytorchStreamReader failed|Ran out of input",
            ("UnpicklingError", "EOFError", "RuntimeError"),
            through=r"^transformers/modeling_utils\.py:",
            alone=False,
        ),
        Sign(
            r"line \d+ column \d+",
            ("JSONDecodeError",),
            through=r"^transformers/(utils/hub|configuration_utils|modeling_utils)\.py:",
            alone=False,
        ),
        Sign(
            r"config file at .* is not a valid JSON file",
            ("OSError", "EnvironmentError"),
            through=r"^transformers/",
        ),
    ),
)
