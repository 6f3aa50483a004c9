"""What is reproduced, from what a user names: the model, the adapter, the map, this machine."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trimtab import adapters, skeleton
from trimtab.checkpoint import Checkpoint, open_checkpoint
from trimtab.errors import FormatFault
from trimtab.outline import Outline, build_outline
from trimtab.quantize import require_bitsandbytes, resolve_quant
from trimtab.repro.cases import STORED, Subject, Tiny
from trimtab.repro.maps import Map, scaled, split_map, telling_layers, without_gpu
from trimtab.repro.shrink import Shrunk, shrink

if TYPE_CHECKING:
    from torch import nn

_MADE_BY: Final = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights"),
        *("init_weights", "layers_pattern", "layers_to_transform", "loftq_config", "peft_version"),
        *("eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core"),
        *("rank_pattern", "alpha_pattern", "revision", "runtime_config", "trainable_token_indices"),
    )
)
"""Fields of an adapter's config that a tiny one does without."""

_DERIVED: Final = frozenset(
    ("model_type", "transformers_version", "architectures", "dtype", "id2label", "label2id")
)
"""Of a model's config, what its class sets by itself."""

RANK: Final = 8
"""The largest of a tiny adapter."""


def describe(
    model: str,
    adapter: str = "",
    device_map: Mapping[str, Any] | None = None,
    *,
    quant: str = "nf4",
    tiny: bool = False,
    gpu: bool = False,
) -> Subject:
    """Reads the configs of model and adapter; loads nothing.

    Args:
        model: a folder, or a name on the hub; for a tiny one, config.json is enough.
        adapter: a PEFT adapter; of a tiny one only its config is read, and without one all linears
            of the language model are adapted.
        device_map: a Hugging Face map; by default the second half of the layers is away.
        quant: a format; those with 4 bits are tried with double quantization and without.
        tiny: whether a tiny random model takes the place of this one.
        gpu: whether there is a GPU to run on.

    Raises:
        TrimtabError: TT101, TT104, TT105, TT301, TT302, TT501 to TT510: model or adapter cannot be
            read, or no tiny model can be made of the config (TT510).
    """
    checkpoint = open_checkpoint(model, need_weights=not tiny)
    outline = build_outline(checkpoint, "auto", "auto")
    here: int | str = 0 if gpu else "cpu"
    notes: list[str] = []
    given = dict(device_map) if device_map is not None else _default_map(outline, here)
    wanted = given if gpu else without_gpu(given, _tensors(outline))
    if wanted != given:
        notes.append("there is no GPU: `cpu` plays it, and `disk` holds what the map puts away")
    made: Tiny | None = None
    if tiny:
        made, wanted = _Tiny(checkpoint, outline, adapter, notes).make(wanted)
    return Subject(
        shown=_shown(model),
        model="" if tiny else _resolved(model),
        adapter="" if tiny else _resolved(adapter),
        model_class=outline.architecture,
        dtype=outline.dtype,
        here=here,
        device_map=wanted,
        quants=_quants(checkpoint, quant, tiny),
        tiny=made,
        nbytes=0 if tiny else sum(one.nbytes for one in checkpoint.tensors.values()),
        notes=tuple(notes),
    )


def _quants(checkpoint: Checkpoint, quant: str, tiny: bool) -> tuple[str, ...]:
    resolved = resolve_quant(quant.removesuffix("-dq"), None)
    if checkpoint.quantization is not None:
        stored = resolve_quant("auto", checkpoint.quantization)
        require_bitsandbytes(stored)
        if not tiny:
            return (STORED,)
        resolved = stored.removesuffix("-dq")
    if resolved == "none":
        return ("none",)
    require_bitsandbytes(resolved)
    return ("int8",) if resolved == "int8" else (f"{resolved}-dq", resolved)


def _default_map(outline: Outline, here: int | str) -> Map:
    layers = _layers(outline)
    away = layers[len(layers) // 2 :]
    return split_map(_tensors(outline), away, here, "disk" if here == "cpu" else "cpu")


def _layers(outline: Outline) -> list[str]:
    return [unit.name for unit in outline.units if unit.kind == "layer"]


def _tensors(outline: Outline) -> list[str]:
    aliases = (alias for alias, _ in outline.ties)
    return [*(one.name for one in outline.weights), *aliases, *sorted(outline.buffers)]


def _shown(model: str) -> str:
    """A hub name as it is; of a folder its last part."""
    return Path(model).resolve().name if Path(model).expanduser().exists() else model


def _resolved(source: str) -> str:
    """A folder's whole path; a hub name as it is."""
    folder = Path(source).expanduser()
    return str(folder.resolve()) if source and folder.is_dir() else source


# ------------------------------------------------------------------------------------------ tiny


@dataclass
class _Tiny:
    """Makes a tiny model, adapter and map of the given ones."""

    checkpoint: Checkpoint
    outline: Outline
    adapter: str
    notes: list[str]

    def make(self, device_map: Map) -> tuple[Tiny, Map]:
        layers = _layers(self.outline)
        shrunk, config, model = self._model(telling_layers(device_map, layers))
        names = {name for name, _ in model.named_modules()}
        tensors = {one for one, _ in (*model.named_parameters(), *model.named_buffers())}
        known = self.outline.modules | self.outline.buffers | set(_tensors(self.outline))
        wanted = scaled(device_map, layers, shrunk.source)
        gone = {key for key in wanted if key in known and key not in names | tensors}
        if len(shrunk.source) < len(layers):
            stand = ", ".join(str(one) for one in shrunk.source)
            self.notes.append(
                f"the tiny model has {len(shrunk.source)} layers, mapped as the original's {stand}"
                f" of {len(layers)}"
            )
        if gone:
            self.notes.append(f"the tiny model has no {', '.join(sorted(gone)[:3])}: not mapped")
        fields = self._fields(model, layers[0].rpartition(".")[0], shrunk.source)
        tied = any(alias.endswith("lm_head.weight") for alias, _ in self.outline.ties)
        return Tiny(config, fields, tied), {key: wanted[key] for key in wanted if key not in gone}

    def _model(self, wanted: Sequence[int]) -> tuple[Shrunk, dict[str, Any], nn.Module]:
        """The tiny config, the arguments that differ from its class's, the model on `meta`."""
        kind: Any = skeleton.model_class_of(self.checkpoint)
        own = {**self.checkpoint.config, "dtype": self.outline.dtype}
        own.pop("torch_dtype", None)
        try:
            whole = kind.config_class.from_dict(own).to_dict()
            shrunk = shrink(whole, wanted)
            config = kind.config_class.from_dict(shrunk.config)
            differing = _differing(config)
            again = kind.config_class(**differing)
            with tempfile.TemporaryDirectory() as folder:
                told = {**again.to_dict(), "architectures": [kind.__name__]}
                Path(folder, "config.json").write_text(json.dumps(told), encoding="utf-8")
                made = open_checkpoint(folder, need_weights=False)
                model = skeleton.build_skeleton(made, "none", self.outline.dtype).model
        except Exception as problem:
            raise FormatFault(
                "TT510",
                f"no tiny model can be made of the config of {self.checkpoint.source}: "
                f"{type(problem).__name__}: {' '.join(str(problem).split())}",
                fix="leave --tiny out",
            ) from problem
        return shrunk, differing, model

    def _fields(self, model: nn.Module, layers: str, source: Sequence[int]) -> dict[str, Any]:
        """The tiny adapter's config: what its PEFT class takes."""
        linears = _linears(model, layers)
        given = adapters.read_config(self.adapter) if self.adapter else {}
        fields: dict[str, Any] = _own_fields(given) or {"peft_type": "LORA"}
        if given and fields["peft_type"] != given["peft_type"]:
            self.notes.append(f"this PEFT has no {given['peft_type']}: a LoRA takes its place")
        if not given or given.get("target_modules"):
            targets = _targets(given.get("target_modules"), linears, source)
            if given and not targets:
                self.notes.append(
                    f"the targets of {_shown(self.adapter)} match nothing in the tiny model: all "
                    "linears of the language model are adapted"
                )
            if isinstance(targets, list) and _meets_others(targets, model, layers):
                self.notes.append("only the language model is adapted: PEFT cannot adapt a tower")
                targets = _below(layers, targets)
            ends = sorted({name.rpartition(".")[2] for name in linears})
            fields["target_modules"] = targets or _below(layers, ends)
        if "r" in fields:
            fields["r"] = min(fields["r"], RANK)
        return {"task_type": "CAUSAL_LM", **fields}


def _differing(config: Any) -> dict[str, Any]:
    """The arguments of a config's class that make this config, as few as there can be."""
    inner = getattr(config, "sub_configs", {})
    told, plain = config.to_dict(), type(config)().to_dict()
    made = {
        key: value
        for key, value in told.items()
        if key not in _DERIVED and key not in inner and value != plain.get(key)
    }
    for key in inner:
        one = getattr(config, key, None)
        if one is not None:
            made[key] = {"model_type": one.model_type, **_differing(one)}
    return made


def _linears(model: nn.Module, layers: str) -> list[str]:
    """The linears of the decoder's layers, but for those of experts."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(f"{layers}.")
    ]


def _meets_others(targets: Sequence[str], model: nn.Module, layers: str) -> bool:
    """Whether names of targets are also those of modules outside that PEFT cannot adapt."""
    return any(
        any(f".{name}".endswith(f".{target}") for target in targets)
        for name, module in model.named_modules()
        if not name.startswith(f"{layers}.") and any(True for _ in module.children())
    )


def _below(layers: str, ends: Sequence[str]) -> str:
    """PEFT's pattern for modules of the decoder's layers with these ends of names."""
    return rf"{re.escape(layers)}\.\d+\.(.*\.)?({'|'.join(ends)})"


def _targets(
    given: str | list[str] | None, linears: Sequence[str], source: Sequence[int]
) -> str | list[str] | None:
    """The given targets, those that name layers for the tiny model's; None if nothing is matched.

    A name matches as PEFT matches it: a pattern the whole name, else the name's end.
    """
    if isinstance(given, str):
        matched = given == "all-linear" or any(re.fullmatch(given, one) for one in linears)
        return given if matched else None
    made: dict[str, None] = {}
    for target in given or ():
        numbered = re.search(r"(?:^|\.)(\d+)\.", target)
        if numbered is None:
            made[target] = None
        elif int(numbered[1]) in source:
            start, end = numbered.span(1)
            made[f"{target[:start]}{source.index(int(numbered[1]))}{target[end:]}"] = None
    found = any(f".{name}".endswith(f".{one}") for one in made for name in linears)
    return sorted(made) if found else None


def _own_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the defaults of PEFT's class for this kind; nothing if it has none."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(str(config.get("peft_type")))
    if kind is None:
        return {}
    plain = kind()
    known = {one.name for one in dataclasses.fields(kind)} - _MADE_BY - {"peft_type", "task_type"}
    differing = {
        key: value
        for key, value in config.items()
        if key in known and value is not None and value != getattr(plain, key, None)
    }
    return {"peft_type": config["peft_type"], **differing}
