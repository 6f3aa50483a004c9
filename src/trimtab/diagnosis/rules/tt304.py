"""The page of TT304."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT304",
    seen="""
        The config's `target_modules` match none of the modules that the adapter's file has
        tensors for.
        """,
    why="""
        The config is not the one that the weights were saved with: edited, overwritten by a
        later run, or copied from another adapter. The tensors would have a place in the model,
        but the config does not make it.
        """,
    versions="""
        All.
        """,
    fix="""
        Restore the `adapter_config.json` of the run that saved the weights.
        """,
    library="the adapter",
    not_helping="""
        `target_modules="all-linear"`: it makes layers for which the file has no tensors.
        """,
    signs=(
        Sign(
            r"Target modules .* not found in the base model"
            r"|Please specify `(target|feedforward)_modules`",
            ("ValueError", "NoMatchingPeftModuleError"),
        ),
    ),
)
