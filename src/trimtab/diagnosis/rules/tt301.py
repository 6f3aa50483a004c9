"""The page of TT301."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT301",
    seen="""
        The adapter's folder or hub name holds no `adapter_config.json`, or no weights beside
        it.
        """,
    why="""
        PEFT's `save_pretrained` writes two files: `adapter_config.json` and
        `adapter_model.safetensors` (older: `adapter_model.bin`). A training checkpoint may have
        them in a folder below; a download may have stopped; a repository that was merged holds
        a whole model instead.
        """,
    versions="""
        All.
        """,
    fix="""
        Name the folder that holds both files. From the hub: `hf download OWNER/NAME`, then look
        what is there.
        """,
    library="the files",
    not_helping="""
        Naming the `.safetensors` file itself: the config is needed too.
        """,
)
