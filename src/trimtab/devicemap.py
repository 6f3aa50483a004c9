"""A Hugging Face device map, matched against the real names of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.errors import PlacementFault
from trimtab.outline import Outline

GPU, CPU, DISK = "gpu:0", "cpu", "disk"

_TIERS = {
    "0": GPU, "cuda": GPU, "cuda:0": GPU, "gpu": GPU, "gpu:0": GPU, "cpu": CPU, "disk": DISK,
}  # fmt: skip

_GPU = re.compile(r"(?:cuda:|gpu:)?\d+")

_PEFT_PREFIXES = ("base_model.model", "base_model")

KINDRED = (
    frozenset(("multi_modal_projector", "mm_projector", "embed_vision", "embed_audio",
               "connector", "merger", "projector")),
    frozenset(("vision_tower", "vision_model", "visual", "vision_encoder", "image_tower")),
    frozenset(("audio_tower", "audio_encoder", "speech_encoder", "audio_model")),
    frozenset(("model", "transformer", "language_model", "gpt_neox", "backbone")),
    frozenset(("lm_head", "embed_out", "output")),
    frozenset(("embed_tokens", "wte", "embed_in", "word_embeddings")),
    frozenset(("layers", "h", "blocks")),
)  # fmt: skip
"""Names that different classes give to the same part."""


@dataclass(frozen=True)
class MatchedMap:
    """`tiers`: where each parameter that owns its bytes is wanted: `gpu:0`, `cpu` or `disk`."""

    tiers: Mapping[str, str]
    notes: tuple[str, ...]


def match_device_map(device_map: Mapping[str, Any], outline: Outline) -> MatchedMap:
    """Gives each parameter the tier of the most specific key that covers it.

    A key covers a module or a parameter by whole components of its name (`model.layers.1` does
    not cover `model.layers.10`); `""` covers everything. A buffer goes with its module. Keys with
    PEFT's prefix, or with a missing or superfluous first component, are understood, with a note.

    Args:
        device_map: module names to `0`, `cuda`, `cuda:0`, `gpu:0`, `cpu` or `disk`.
        outline: the model.

    Raises:
        PlacementFault: TT201 a key that matches nothing, TT202 a parameter without a device,
            TT203 a value that names no tier, TT204 a second GPU.

    Example:
        >>> match_device_map({"": 0, "model.layers.1": "cpu"}, outline).tiers[
        ...     "model.layers.1.mlp.up_proj.weight"]
        'cpu'
    """
    if not isinstance(device_map, Mapping):
        raise PlacementFault(
            "TT203",
            f"{device_map!r} is not a device map",
            fix="leave the device map out: the plan decides from the budget",
        )
    names = known_names(outline)
    tiers, notes, unknown = _read_keys(device_map, names)
    if unknown:
        raise _unmatched(unknown, names)
    return MatchedMap(_spread(tiers, outline), tuple(notes))


def known_names(outline: Outline) -> frozenset[str]:
    """Every name that a key may be: of a module, a buffer or a parameter, tied ones too."""
    parameters = {one.name for one in outline.weights} | {alias for alias, _ in outline.ties}
    return outline.modules | outline.buffers | parameters


def _read_keys(
    device_map: Mapping[str, Any], names: frozenset[str]
) -> tuple[dict[str, str], list[str], list[str]]:
    tiers: dict[str, str] = {}
    notes, unknown = [], []
    for key, value in sorted(device_map.items(), key=lambda item: item[0] in names):
        tier = tier_of(key, value)
        real = real_name(key, names)
        if real is None:
            unknown.append(key)
            continue
        if real != key:
            notes.append(f"the device map's {key!r} is understood as {real!r}")
        tiers[real] = tier
    return tiers, notes, unknown


def tier_of(key: str, value: Any) -> str:
    """The tier that a key's value names.

    Raises:
        PlacementFault: TT203, TT204.
    """
    text = "" if isinstance(value, bool) else str(value).strip().lower()
    if text in _TIERS:
        return _TIERS[text]
    if _GPU.fullmatch(text):
        raise PlacementFault(
            "TT204",
            f"the device map puts {key!r} on {value!r}, a GPU that is not the first",
            why="a placement uses one GPU",
            fix="map it to 0, cpu or disk; CUDA_VISIBLE_DEVICES chooses which GPU is the first",
        )
    raise PlacementFault(
        "TT203",
        f"the device map gives {key!r} the value {value!r}, which names no tier",
        fix="use 0, cuda, cuda:0, gpu:0, cpu or disk",
    )


def real_name(key: str, names: frozenset[str]) -> str | None:
    """The one name that a key can mean; None if there is none, or more than one."""
    if key == "" or key in names:
        return key
    bare = key
    for prefix in _PEFT_PREFIXES:
        if key == prefix:
            return ""
        if key.startswith(prefix + "."):
            bare = key.removeprefix(prefix + ".")
            break
    tops = sorted({name.partition(".")[0] for name in names})
    first, _, later = bare.partition(".")
    guesses = [bare, *(f"{top}.{bare}" for top in tops)]
    if first in ("model", "transformer", "language_model"):
        guesses += [later, *(f"{top}.{later}" for top in tops)]
    if bare.startswith("language_model.model."):
        guesses.append("model.language_model." + bare.removeprefix("language_model.model."))
    found = dict.fromkeys(guess for guess in guesses if guess in names)
    return next(iter(found)) if len(found) == 1 else None


def _unmatched(unknown: list[str], names: frozenset[str]) -> PlacementFault:
    key = unknown[0]
    near = nearest_names(key, names)
    more = f", and {len(unknown) - 1} more such keys" if len(unknown) > 1 else ""
    return PlacementFault(
        "TT201",
        f"the device map's key {key!r} matches no module of the model{more}",
        fix=f"the nearest real names are {', '.join(near)}" if near else "remove the key",
        keys=unknown,
        nearest=near,
    )


def nearest_names(key: str, names: Iterable[str]) -> list[str]:
    """Up to three real names that may be meant: of the same role there, else of like spelling."""
    known = sorted(names)
    parent, _, last = key.rpartition(".")
    kindred = next((group for group in KINDRED if last in group), frozenset())
    same_role = [
        name
        for name in known
        if name.rpartition(".")[2] in kindred and name.rpartition(".")[0] == parent
    ]
    return (same_role + difflib.get_close_matches(key, known, n=3, cutoff=0.5))[:3]


def _spread(tiers: Mapping[str, str], outline: Outline) -> dict[str, str]:
    placed = {}
    homeless = []
    for weight in outline.weights:
        tier = most_specific(weight.name, tiers)
        if tier is None:
            homeless.append(weight.name)
        else:
            placed[weight.name] = tier
    if homeless:
        more = f", nor {len(homeless) - 1} other parameters" if len(homeless) > 1 else ""
        raise PlacementFault(
            "TT202",
            f"the device map gives {homeless[0]} no device{more}",
            fix='name its module, or add the key "" for everything that is not named',
            parameters=homeless,
        )
    return placed


def most_specific(name: str, tiers: Mapping[str, str]) -> str | None:
    """The tier of the longest key that covers a name by whole components."""
    while name:
        if name in tiers:
            return tiers[name]
        name = name.rpartition(".")[0]
    return tiers.get("")
