"""The shape of a model before anything is loaded: ordered units, ties, caches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab import foreign
from trimtab.plan import Unit, WeightSpec

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from trimtab.checkpoint import Checkpoint
    from trimtab.skeleton import Skeleton

SOUND = ("audio", "speech")
SIGHT = ("vision", "visual", "image", "video")
BETWEEN = ("projector", "connector", "merger", "aligner", "resampler")
"""Names of what stands beside a language model: for sound, for sight, between a tower and it."""


@dataclass(frozen=True)
class CacheLayer:
    """What one decoder layer keeps for each token: keys and values of `kv_heads` x `head_dim`.

    `window` limits the tokens of a sliding layer; a `shared` layer keeps none of its own.
    """

    kv_heads: int
    head_dim: int
    window: int | None
    shared: bool


@dataclass(frozen=True)
class Outline:
    """A model as ordered units.

    `units` are in running order; each parameter is in exactly one of them, a tied one in its
    owner's. `ties` are pairs (alias, owner) of parameter names. `modules`, `buffers` are all names
    of modules and buffers, `quant` the format of the linears, `dtype` the one computed in.
    """

    architecture: str
    units: tuple[Unit, ...]
    ties: tuple[tuple[str, str], ...]
    cache: tuple[CacheLayer, ...]
    vocab: int
    hidden: int
    dtype: str
    quant: str
    modules: frozenset[str]
    buffers: frozenset[str]
    stored: bool = False
    """Whether the checkpoint is stored quantized."""

    @property
    def weights(self) -> Iterator[WeightSpec]:
        """All parameters that own their bytes."""
        return itertools.chain.from_iterable(unit.weights for unit in self.units)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape, tied ones under each of their names."""
        own = {one.name: one.shape for one in self.weights}
        return own | {alias: own[owner] for alias, owner in self.ties}

    def is_tied(self, unit: Unit) -> bool:
        """Whether another unit, such as a head, multiplies with a weight of this one."""
        owners = {owner for _, owner in self.ties}
        return any(one.name in owners for one in unit.weights)


def build_outline(checkpoint: Checkpoint, quant: str = "auto", dtype: str = "auto") -> Outline:
    """The model as units, from its config alone: nothing is loaded, everything is on `meta`.

    Args:
        checkpoint: what `open_checkpoint` gave; a folder with a config and no weights will do.
        quant: format of the linears: `nf4`, `nf4-dq`, `fp4`, `fp4-dq`, `int8`, `none`, or `auto`
            (the checkpoint's own, else `none`).
        dtype: torch's name of the dtype to compute in, or `auto` (the config's, else that of the
            checkpoint's tensors, else bfloat16).

    Raises:
        EnvironmentFault: TT101 bitsandbytes is missing, TT104 the model brings its own code.
        FormatFault: TT509 a format that is not supported, TT510 a config that is not understood.

    Example:
        >>> outline = build_outline(open_checkpoint("./my-model"), quant="nf4")
        >>> [unit.name for unit in outline.units if unit.kind == "layer"][0]
        'model.layers.0'
    """
    from trimtab.skeleton import build_skeleton

    return _describe(build_skeleton(checkpoint, quant, dtype))


def _describe(skeleton: Skeleton) -> Outline:
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
        stored=skeleton.stored,
    )


class _Units:
    """Gives each module of a skeleton to one unit."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.model = skeleton.model
        self.quant = skeleton.quant
        self.dtype = skeleton.dtype
        self.quantized_from = skeleton.quantized_from
        self.ties = foreign.tied_names(self.model)
        self.names = {id(module): name for name, module in self.model.named_modules()}
        self.float32 = foreign.kept_in_float32(self.model, self.dtype)
        self.claimed: set[int] = set()

    def collect(self) -> tuple[Unit, ...]:
        from torch import nn

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
            kept = self.float32 is not None and self.float32.search(name) is not None
            if storage != "plain":
                # A stored checkpoint's skeleton has its bytes' dtype here, not the weight's.
                dtype = self.dtype
            elif kept:
                dtype = "float32"
            origin = None if storage == "plain" or kept else self.quantized_from
            yield WeightSpec(name, tuple(parameter.shape), dtype, storage, origin)

    def _storage(self, module: nn.Module, key: str) -> str:
        kind = type(module).__name__
        return self.quant if key == "weight" and kind in ("Linear4bit", "Linear8bitLt") else "plain"


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers: its longest list of modules that does not lie inside another list."""
    from torch import nn

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
