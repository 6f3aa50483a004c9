"""The page of TT105."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT105",
    seen="""
        The model is neither a folder here nor a name that the hub knows.
        """,
    why="""
        A relative path is taken from the folder in which the command runs. A hub name has the
        form `owner/name`. A gated model can be seen on the hub, but not be read, until its
        licence has been accepted. With `HF_HUB_OFFLINE=1` only what is in the cache can be had.
        """,
    versions="""
        All.
        """,
    fix="""
        Check the name for typing errors. For a gated or private model: accept the licence on
        its page and run `hf auth login`. Without a network: give the path of the folder.
        """,
    library="the command",
    not_helping="""
        Naming a file of the model (`.../model.safetensors`): it is the folder that is asked
        for.
        """,
    signs=(
        Sign(
            r"Repo id must|not a local folder and is not a valid model identifier"
            r"|We couldn't connect to .* to load the files|You are trying to access a gated repo",
            ("OSError", "EnvironmentError", "HFValidationError", "RepositoryNotFoundError"),
            through=r"^transformers/(models/auto/|configuration_utils|modeling_utils|utils/hub)",
            alone=False,
        ),
    ),
)
