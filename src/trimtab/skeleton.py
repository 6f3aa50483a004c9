"""A model on the `meta` device, as the loader would make it, and its description."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab import foreign
from trimtab.errors import EnvironmentFault, FormatFault
from trimtab.outline import CacheLayer, Outline
from trimtab.plan import Unit, WeightSpec
from trimtab.quantize import quantization_config, require_bitsandbytes, resolve_quant

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from trimtab.checkpoint import Checkpoint

SOUND = ("audio", "speech")
SIGHT = ("vision", "visual", "image", "video")
BETWEEN = ("projector", "connector", "merger", "aligner", "resampler")
"""Names of what stands beside a language model: for sound, for sight, between a tower and it."""


@dataclass(frozen=True)
class Skeleton:
    """The model on `meta`, its linears swapped for those of `quant`; `dtype` is torch's name."""

    model: PreTrainedModel
    quant: str
    dtype: str


def describe(skeleton: Skeleton) -> Outline:
    """The units, ties and caches of a skeleton."""
    model = skeleton.model
    text = _text_config(model)
    return Outline(
        architecture=type(model).__name__,
        units=_Units(skeleton).collect(),
        ties=tuple(sorted(foreign.tied_names(model).items())),
        cache=_cache(model),
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        dtype=skeleton.dtype,
        quant=skeleton.quant,
        modules=frozenset(module for module, _ in model.named_modules() if module),
        buffers=frozenset(buffer for buffer, _ in model.named_buffers()),
    )


def build_skeleton(checkpoint: Checkpoint, quant: str, dtype: str) -> Skeleton:
    """Builds the model of a checkpoint on `meta`; arguments and errors as of `build_outline`."""
    stored = checkpoint.quantization
    resolved = resolve_quant(quant, stored)
    model_class = model_class_of(checkpoint)
    config = _config_of(checkpoint, model_class)
    name = _dtype_of(checkpoint, config, dtype)
    torch_dtype: torch.dtype = getattr(torch, name)
    _set_dtype(config, torch_dtype)
    try:
        model = foreign.skeleton(model_class, config, torch_dtype)
    except Exception as problem:
        raise _not_understood(checkpoint, problem) from problem
    if resolved != "none":
        require_bitsandbytes(resolved)
        asked = dict(stored) if stored else quantization_config(resolved, name)
        foreign.convert_to_quantized(model, asked, stored=stored is not None, dtype=torch_dtype)
    return Skeleton(model, resolved, name)


def model_class_of(checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """The class of transformers that the config names.

    Raises:
        EnvironmentFault: TT104, the class is not one of the installed transformers.
        FormatFault: TT510, the config names none.
    """
    import transformers

    named = checkpoint.config.get("architectures")
    if not isinstance(named, list) or not named:
        raise FormatFault(
            "TT510",
            f"the config of {checkpoint.source} does not say which class the model is of",
            fix='add its class to config.json, such as "architectures": ["LlamaForCausalLM"]',
        )
    found: type[PreTrainedModel] | None = getattr(transformers, str(named[0]), None)
    if found is None:
        own = "auto_map" in checkpoint.config
        raise EnvironmentFault(
            "TT104",
            f"{checkpoint.source} is a {named[0]}, which transformers {transformers.__version__} "
            "does not have",
            why="its code lies in the model's own repository, and trimtab runs no such code"
            if own
            else "a newer transformers may have it",
            fix="use a checkpoint of a class that transformers has"
            if own
            else "pip install -U transformers",
        )
    return found


def _config_of(checkpoint: Checkpoint, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    kind: Any = model_class.config_class
    try:
        config: PreTrainedConfig = kind.from_dict(dict(checkpoint.config))
    except Exception as problem:
        raise _not_understood(checkpoint, problem) from problem
    return config


def _not_understood(checkpoint: Checkpoint, problem: Exception) -> FormatFault | EnvironmentFault:
    import transformers

    if isinstance(problem, ImportError):
        line = re.search(r"pip install [\w.-]+", str(problem))
        return EnvironmentFault(
            "TT101",
            f"the model of {checkpoint.source} needs a package that is not installed: "
            f"{' '.join(str(problem).split())}",
            fix=line[0] if line else "install it",
        )
    return FormatFault(
        "TT510",
        f"transformers {transformers.__version__} cannot build the model of "
        f"{checkpoint.source}: {type(problem).__name__}: {problem}",
        why="the config was written by transformers "
        f"{checkpoint.config.get('transformers_version', 'of an unknown version')}, or is wrong",
        fix="pip install -U transformers",
    )


def _dtype_of(checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str) -> str:
    if dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise FormatFault(
                "TT509",
                f"{dtype!r} is not a dtype",
                fix="one of bfloat16, float16, float32, auto",
            )
        return dtype
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.")
    floating = (one.dtype for one in checkpoint.tensors.values() if "float" in one.dtype)
    return next(floating, "bfloat16")


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """As the loader does, in the sub-configs too: some layers take their dtype from there."""
    config.dtype = dtype
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            inner.dtype = dtype


class _Units:
    """Gives each module of a skeleton to one unit."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.model = skeleton.model
        self.quant = skeleton.quant
        self.dtype = skeleton.dtype
        self.ties = foreign.tied_names(self.model)
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self.float32 = foreign.kept_in_float32(self.model, getattr(torch, self.dtype))
        self.claimed: set[int] = set()

    def collect(self) -> tuple[Unit, ...]:
        decoder: nn.Module = self.model.get_decoder()
        layers = decoder_layers(decoder)
        shared = _kv_owners(self.model, len(layers))
        layer_units = []
        for index, layer in enumerate(layers):
            owner = shared.get(index)
            kv_from = None if owner is None else self.names[id(layers[owner])]
            layer_units.append(self._unit(layer, "layer", kv_from=kv_from))
        towers = [
            self._unit(self.model.get_submodule(name), "tower", needs=needs)
            for name, needs in _towers(self.model, decoder).items()
        ]
        head = self._head()
        tables = [
            self._unit(module, "table")
            for module in self._free()
            if isinstance(module, nn.Embedding)
        ]
        projections = [
            self._unit(module, "projection")
            for module in self._free()
            if not any(True for _ in module.children())
            and any(one.ndim > 1 for one in module.parameters(recurse=False))
        ]
        return (*towers, *tables, *projections, *layer_units, *head, self._rest())

    def _free(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if id(module) not in self.claimed]

    def _head(self) -> list[Unit]:
        head = self.model.get_output_embeddings()
        if head is None or id(head) in self.claimed:
            return []
        owner = self.ties.get(f"{self.names[id(head)]}.weight")
        return [self._unit(head, "head", tied_to=owner and owner.rpartition(".")[0])]

    def _unit(
        self,
        module: nn.Module,
        kind: str,
        needs: tuple[str, ...] = (),
        tied_to: str | None = None,
        kv_from: str | None = None,
    ) -> Unit:
        name = self.names[id(module)]
        inside = [one for one in module.modules() if id(one) not in self.claimed]
        self.claimed.update(id(one) for one in inside)
        return self._describe(name, kind, inside, needs, tied_to, kv_from)

    def _rest(self) -> Unit:
        return self._describe("", "rest", self._free())

    def _describe(
        self,
        name: str,
        kind: str,
        modules: list[nn.Module],
        needs: tuple[str, ...] = (),
        tied_to: str | None = None,
        kv_from: str | None = None,
    ) -> Unit:
        weights = [spec for module in modules for spec in self._weights(module)]
        buffers = (one for module in modules for one in module.buffers(recurse=False))
        return Unit(
            name=name,
            kind=kind,
            weights=tuple(weights),
            buffer_bytes=sum(one.numel() * one.element_size() for one in buffers),
            needs=needs,
            tied_to=tied_to,
            kv_from=kv_from,
        )

    def _weights(self, module: nn.Module) -> Iterator[WeightSpec]:
        prefix = self.names[id(module)]
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if name in self.ties:
                continue
            storage = self._storage(module, key)
            dtype = str(parameter.dtype).removeprefix("torch.")
            if storage != "plain":
                # A stored checkpoint's skeleton has its bytes' dtype here, not the weight's.
                dtype = self.dtype
            elif self.float32 is not None and self.float32.search(name):
                dtype = "float32"
            yield WeightSpec(name, tuple(parameter.shape), dtype, storage)

    def _storage(self, module: nn.Module, key: str) -> str:
        kind = type(module).__name__
        return self.quant if key == "weight" and kind in ("Linear4bit", "Linear8bitLt") else "plain"


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: its longest list of modules that does not lie inside another list."""
    best: list[nn.Module] = []
    waiting = list(decoder.children())
    while waiting:
        module = waiting.pop(0)
        if not isinstance(module, nn.ModuleList):
            waiting.extend(module.children())
        elif len(module) > len(best):
            best = list(module)
    return best


def _towers(model: PreTrainedModel, decoder: nn.Module) -> dict[str, tuple[str, ...]]:
    """What stands beside the language model, towers and what projects from them: name to needs."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    if model.config.is_encoder_decoder or not path:
        return {}
    needs: dict[str, tuple[str, ...]] = {}
    parent: nn.Module = model
    prefix = ""
    for step in path.split("."):
        for name, child in parent.named_children():
            if name != step and any(True for _ in child.parameters()):
                needs[prefix + name] = _needs(name)
        parent, prefix = parent.get_submodule(step), f"{prefix}{step}."
    # What stands between serves the towers that there are.
    served = tuple(dict.fromkeys(one for found in needs.values() for one in found))
    for name in needs:
        if not needs[name] and any(word in name.rpartition(".")[2] for word in BETWEEN):
            needs[name] = served
    return {name: found for name, found in needs.items() if found}


def _needs(name: str) -> tuple[str, ...]:
    if any(word in name for word in SOUND):
        return ("audio",)
    return ("image", "video") if any(word in name for word in SIGHT) else ()


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _kv_owners(model: PreTrainedModel, count: int) -> dict[int, int]:
    """For each layer that reuses keys and values, the last layer of its kind that makes them."""
    config = _text_config(model)
    first = count - (getattr(config, "num_kv_shared_layers", 0) or 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    if not 0 < first < count:
        return {}
    return {
        index: max(one for one in range(first) if kinds[one] == kinds[index])
        for index in range(first, count)
    }


def _cache(model: PreTrainedModel) -> tuple[CacheLayer, ...]:
    config = _text_config(model)
    layers = decoder_layers(model.get_decoder())
    owners = _kv_owners(model, len(layers))
    found = []
    for index in range(len(layers)):
        heads, size = _kv_shape(layers[owners.get(index, index)], config)
        found.append(CacheLayer(heads, size, _window(config, index), index in owners))
    return tuple(found)


def _kv_shape(layer: nn.Module, config: Any) -> tuple[int, int]:
    """Heads and their size, from the attention itself: layers may differ, and a config that lets
    them does not answer for all.
    """
    for name, module in layer.named_modules():
        if not name.endswith(("attn", "attention")):
            continue
        part: Any = module
        if hasattr(part, "qk_head_dim") and hasattr(part, "v_head_dim"):
            # Multi-head latent attention caches keys and values of different sizes: their mean.
            return part.num_heads, -(-(part.qk_head_dim + part.v_head_dim) // 2)
        size = getattr(part, "head_dim", None)
        keys: Any = getattr(part, "k_proj", None)
        if size and hasattr(keys, "out_features"):
            return keys.out_features // size, size
        if size and isinstance(getattr(part, "num_heads", None), int):
            return int(getattr(part, "num_key_value_heads", part.num_heads)), size
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        return 0, 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, size


def _window(config: Any, index: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index < len(kinds) else None
    if kind == "chunked_attention":
        return int(config.attention_chunk_size)
    window = getattr(config, "sliding_window", None)
    return int(window) if kind in (None, "sliding_attention") and window else None
