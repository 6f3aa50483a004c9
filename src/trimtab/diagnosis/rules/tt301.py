"""The page of TT301."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

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
    signs=(
        Sign(r"Can't find 'adapter_config\.json' at", ("ValueError",)),
        Sign(
            r"Repo id must|not a local folder and is not a valid model identifier",
            ("HFValidationError", "OSError", "RepositoryNotFoundError"),
            through=r"^peft/utils/save_and_load\.py:load_peft_weights$|^peft/.*:_get_peft_type$",
            alone=False,
        ),
    ),
)
