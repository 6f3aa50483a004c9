"""A config of the same architecture with few, narrow layers, and a device map that goes with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LAYERS: Final = 4
SHARING: Final = 8
"""Decoder layers of a tiny model, and of one whose last layers reuse keys and values."""

TOWER: Final = 2
"""Layers of a tower."""

VOCABULARY: Final = 256
SPECIAL: Final = 240
"""Special tokens are moved to ids from here on; the prompt uses lower ones."""

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_INNER = re.compile(r"(^|_)(intermediate_size|n_inner|ffn_dim|ffn_hidden_size|d_ff)")
_TOKEN = re.compile(r"(token_id|token_index|token_ids)$")
_LARGEST: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "hidden_size_per_layer_input": 64,
}
_OF_TEXT = ("out_hidden_size", "projection_dim", "output_proj_dims", "text_hidden_size")
"""What in a tower's config is the width of the language model."""


@dataclass(frozen=True)
class Shrunk:
    """`config`: as a dictionary; `source`: for each of its decoder layers that of the original."""

    config: dict[str, Any]
    source: tuple[int, ...]


def shrink(config: Mapping[str, Any], layers: Sequence[int] = ()) -> Shrunk:
    """The config of a tiny model of the same architecture.

    Layers are few and narrow, the vocabulary is short, towers have two layers of their own width;
    the size of a head, kinds of layers, shared keys and values, experts and ties remain.

    Args:
        config: a whole config, defaults included, as `to_dict` gives it.
        layers: the decoder layers that must be among those that are kept.

    Example:
        >>> shrink(LlamaConfig().to_dict()).config["num_hidden_layers"]
        4
    """
    made: dict[str, Any] = _plain({**config, "quantization_config": None})
    text_key = next((key for key in ("text_config", "llm_config") if made.get(key)), "")
    text = dict(made[text_key]) if text_key else made
    before = _first(text, _WIDTHS)
    source = _shrink_text(text, layers)
    if text_key:
        made[text_key] = text
    for key, value in made.items():
        if isinstance(value, dict) and key != text_key and _count_key(value):
            made[key] = _shrink_tower(value, before, _first(text, _WIDTHS))
    made |= {key: _first(text, _WIDTHS) for key in _OF_TEXT if made.get(key) == before}
    _move_tokens(made)
    return Shrunk(made, source)


def spread(total: int, count: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """`count` of the layers 0 to `total`, the `wanted` ones, else evenly.

    Example:
        >>> spread(32, 4, [7])
        (0, 7, 21, 31)
    """
    if count >= total:
        return tuple(range(total))
    even = [round(one * (total - 1) / (count - 1)) for one in range(count)]
    for one in list(dict.fromkeys(wanted))[:count]:
        if one not in even:
            free = [other for other in even if other not in wanted]
            even.remove(min(free, key=lambda other: abs(other - one)))
            even.append(one)
    return tuple(sorted(even))


def _shrink_text(text: dict[str, Any], layers: Sequence[int]) -> tuple[int, ...]:
    key = _count_key(text)
    total = int(text[key])
    source = spread(total, SHARING if text.get("num_kv_shared_layers") else LAYERS, layers)
    count = len(source)
    if count < total:
        alike = _alike(text, source, total)
        for name, value in text.items():
            if isinstance(value, list) and len(value) == total:
                text[name] = [value[one] for one in alike]
            elif name.endswith(("_layers", "_indexes")) and isinstance(value, list):
                text[name] = [one for one in value if isinstance(one, int) and one < count]
        if own := text.get("per_layer_config"):
            numbered = {int(one): value for one, value in own.items()}
            kept = {str(at): numbered.get(one) for at, one in enumerate(alike)}
            text["per_layer_config"] = {at: one for at, one in kept.items() if one}
        if text.get("num_kv_shared_layers"):
            text["num_kv_shared_layers"] = count // 2
    text[key] = count
    _narrow(text)
    return source


def _alike(text: Mapping[str, Any], source: Sequence[int], total: int) -> list[int]:
    """For each tiny layer one of the original's that it is built like.

    Each kind of layer is in both halves: layers that share keys and values look for their maker in
    the first. Some models insist on the kind of their last one.
    """
    before = text.get("layer_types")
    kinds = list(dict.fromkeys(before or ()))
    if not before or len(kinds) == 1:
        return list(source)
    half = len(source) // 2
    pattern = (kinds[:1] * half + kinds[1:])[-half:]
    pattern.sort(key=lambda one: one == before[-1])
    return [
        min((at for at in range(total) if before[at] == kind), key=lambda at: abs(at - near))
        for near, kind in zip(source, pattern * 2, strict=True)
    ]


def _narrow(text: dict[str, Any]) -> None:
    """Two heads of their own size, and narrow layers."""
    heads_key = next((key for key in _HEADS if isinstance(text.get(key), int)), "")
    width_key = next((key for key in _WIDTHS if isinstance(text.get(key), int)), "")
    if heads_key and width_key:
        heads, width = text[heads_key], text[width_key]
        text[heads_key] = 2
        for key in ("num_key_value_heads", "num_global_key_value_heads"):
            if text.get(key):
                text[key] = 2 if text[key] == heads else 1
        # Where the size of a head is not said, it is the width over the heads.
        text[width_key] = 128 if text.get("head_dim") else 2 * (width // heads)
    for key, value in text.items():
        if _INNER.search(key) and value:
            small = 64 if "moe" in key or "expert" in key else 256
            text[key] = [small] * len(value) if isinstance(value, list) else small
        elif key in _LARGEST and isinstance(value, int):
            text[key] = min(value, _LARGEST[key])
    if "initializer_range" in text:
        text["initializer_range"] = 0.1  # else such narrow layers all but vanish


def _shrink_tower(tower: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    key = _count_key(tower)
    made = {**tower, key: min(int(tower[key]), TOWER)}
    for name, value in tower.items():
        if isinstance(value, list) and len(value) == tower[key]:
            made[name] = value[: made[key]]
        elif _INNER.search(name) and isinstance(value, int):
            made[name] = min(value, 256)
        elif name.endswith("_indexes") and isinstance(value, list):
            made[name] = [one for one in value if one < made[key]]
        elif name in _OF_TEXT and value == before:
            made[name] = now
    return made


def _move_tokens(config: dict[str, Any]) -> None:
    """Gives ids inside the vocabulary to special tokens; equal ones stay equal."""
    moved: dict[int, int] = {}

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(one) for one in value]
        if isinstance(value, int) and value >= SPECIAL:
            return moved.setdefault(value, SPECIAL + len(moved) % (VOCABULARY - SPECIAL))
        return value

    for inner in _dictionaries(config):
        for key, value in inner.items():
            if _TOKEN.search(key):
                inner[key] = place(value)


def _plain(config: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy without what is None and what has numbers for names."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if isinstance(key, str) and value is not None
    }


def _dictionaries(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _dictionaries(value)


def _count_key(config: Mapping[str, Any]) -> str:
    return next((key for key in _COUNTS if isinstance(config.get(key), int)), "")


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)
