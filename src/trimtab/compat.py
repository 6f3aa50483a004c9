"""Whether an adapter's config suits the base and the installed PEFT: kind, base's name, fields."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any, Final

from trimtab.adapters import AdapterHeader
from trimtab.errors import AdapterFault

HARMLESS: Final = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode",
        "loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
        "revision", "runtime_config", "task_type", "velora_config",
    )
)  # fmt: skip
"""Config fields that say how an adapter was made, not what it computes."""

READS_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_CLOSED: Final = {
    "megatron_config": None,  # with megatron_core, a module that PEFT would import
    "prompt_tuning_init": "RANDOM",  # the others read the files below, or a tokenizer
    "prompt_tuning_init_state_dict_path": None,
    "prompt_tuning_init_text": None,
    "tokenizer_name_or_path": None,
    "tokenizer_kwargs": None,
}
"""Fields by which a config would make PEFT import code or follow a path, and what they become."""

_COUNTS: Final = (
    "r", "num_virtual_tokens", "adapter_len", "num_vectors", "n_frequency", "theta_d_length",
)  # fmt: skip
"""Fields that each take as many numbers in the file, at the least."""

_UNSUPPORTED: Final = frozenset(("XLORA", "SHADOW", "POLY"))
_QUANTIZED: Final = re.compile(r"([-_.](unsloth|bnb|dynamic|4bit|8bit|int8|nf4|fp4|quantized))+$")


def check_kind(header: AdapterHeader) -> None:
    """Refuses kinds that add layers, and initialisations that rewrite the base at load.

    Raises:
        AdapterFault: TT308, TT314.
    """
    kind, init = header.peft_type, header.init_weights
    if kind in _UNSUPPORTED or header.config.get("layer_replication"):
        what = "layer replication" if kind not in _UNSUPPORTED else f"the kind {kind}"
        raise AdapterFault(
            "TT314",
            f"{header.source} uses {what}, which trimtab does not support",
            why="it adds layers or models of its own to the base",
        )
    if isinstance(init, str) and init.startswith(READS_BASE):
        raise AdapterFault(
            "TT308",
            f"{header.source} was saved with init_lora_weights={init!r}",
            why="loading it makes PEFT compute from the base's weights and rewrite them",
            fix="save it with save_pretrained(path_initial_model_for_weight_conversion=...), which"
            " makes a plain LoRA of it",
        )


def check_base(
    header: AdapterHeader, base_name: str | None, allowed: bool, notes: list[str]
) -> None:
    """Compares the last part of both names: owners, folders and quantized copies may differ.

    Raises:
        AdapterFault: TT305.
    """
    theirs = header.base_name
    if not theirs or not base_name or _last(theirs) == _last(base_name):
        return
    said = f"{header.source} was made for {theirs}, the base is {base_name}"
    if allowed or _is_path(theirs) or _is_path(base_name):
        notes.append(said)
        return
    raise AdapterFault(
        "TT305",
        said,
        why="an adapter of another model changes the outputs to something nobody trained",
        fix="load it on its own base, or pass allow_other_base=True if they are the same model",
        adapter_base=theirs,
        base=base_name,
    )


def _last(name: str) -> str:
    """The model's own name: without owner or folder, and without what a quantizer appended."""
    parts = [part for part in re.split(r"[/\\]+", name.lower()) if part not in ("", ".")]
    for part in parts:
        if part.startswith("models--"):  # a snapshot in the hub's cache
            return _QUANTIZED.sub("", part.split("--")[-1])
    return _QUANTIZED.sub("", parts[-1]) if parts else ""


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~", "\\")) or "\\" in name or name.count("/") != 1


def check_counts(header: AdapterHeader) -> None:
    """Refuses a config that asks for more than its file can hold, before PEFT allocates it.

    Raises:
        AdapterFault: TT312.
    """
    held = sum(math.prod(one.shape) for one in header.tensors.values())
    asked = {field: header.config.get(field) for field in _COUNTS}
    asked |= header.config.get("rank_pattern") or {}
    wrong = [f"{key}={one}" for key, one in asked.items() if isinstance(one, int) and one > held]
    if wrong:
        raise AdapterFault(
            "TT312",
            f"the config of {header.source} sets {', '.join(wrong)}, and its file holds {held}"
            " numbers in all",
            fix="the file is incomplete, or its config is not the one it was saved with",
        )


def known_fields(header: AdapterHeader) -> tuple[str, ...]:
    """The config fields that the installed PEFT knows for this kind of adapter.

    Raises:
        AdapterFault: TT307, if it does not know the kind.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(header.peft_type)
    if kind is None:
        raise AdapterFault(
            "TT307",
            f"{header.source} is of the kind {header.peft_type}, which the installed PEFT does not"
            " know",
            fix="pip install -U peft",
        )
    return tuple(one.name for one in dataclasses.fields(kind))


def known_config(
    header: AdapterHeader, known: Iterable[str] | None, notes: list[str]
) -> dict[str, Any]:
    """The config without the fields that the installed PEFT does not know.

    Raises:
        AdapterFault: TT307, a field that is set and that changes what the adapter computes.
    """
    config = _closed(header, notes)
    if known is None:
        return config
    unknown = sorted(set(config) - set(known))
    wrong = [name for name in unknown if config[name] and name not in HARMLESS]
    if wrong:
        raise AdapterFault(
            "TT307",
            f"{header.source} sets {', '.join(f'{name}={config[name]!r}' for name in wrong)},"
            " which the installed PEFT does not know",
            why="the adapter was saved by a newer PEFT, and computes something else with it",
            fix="pip install -U peft",
        )
    if unknown:
        notes.append(f"config fields that the installed PEFT does not know: {', '.join(unknown)}")
    return {name: value for name, value in config.items() if name not in unknown}


def _closed(header: AdapterHeader, notes: list[str]) -> dict[str, Any]:
    """The config without what makes PEFT import code or read other files than the adapter's."""
    config = dict(header.config)
    for field, harmless in _CLOSED.items():
        if field not in config:
            continue
        if config[field] and field.endswith(("_dict_path", "megatron_config")):
            notes.append(f"{field} of {header.source} is not followed: {str(config[field])[:200]}")
        config[field] = harmless
    config.pop("runtime_config", None)
    return config
