"""Device maps for a reproduction: a default one, one for this machine, one for a tiny model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Map = dict[str, Any]

_GPU = re.compile(r"(cuda|gpu)(:\d+)?|\d+")
_WRAPPED = re.compile(r"^base_model\.(model\.)?")


def split_map(tensors: Iterable[str], away: Collection[str], here: int | str, to: str) -> Map:
    """A map without a catch-all: these modules `to` there, every other tensor `here`.

    Example:
        >>> split_map(["a.0.w", "a.1.w", "b.w"], ["a.1"], "cpu", "disk")
        {'a.0': 'cpu', 'a.1': 'disk', 'b': 'cpu'}
    """
    return expanded({"": here, **dict.fromkeys(away, to)}, tensors)


def expanded(device_map: Mapping[str, Any], tensors: Iterable[str]) -> Map:
    """The map without a catch-all: no key lies in another one, and the most specific one has won.

    Keys that cover no tensor stay as they are.
    """
    known = list(tensors)
    places = {name: _place(name, device_map) for name in known}
    made: Map = {}

    def put(prefix: str) -> None:
        start = f"{prefix}." if prefix else ""
        inside = [one for one in known if one == prefix or one.startswith(start)]
        if len({places[one] for one in inside}) > 1:
            below = [one.removeprefix(start).partition(".")[0] for one in inside]
            for child in dict.fromkeys(below):
                put(start + child)
        elif inside and places[inside[0]] is not None:
            made[prefix] = places[inside[0]]

    put("")
    idle = [key for key in device_map if key and not _covers(key, known)]
    return made | {key: device_map[key] for key in idle}


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def _covers(key: str, tensors: Iterable[str]) -> bool:
    return any(one == key or one.startswith(f"{key}.") for one in tensors)


def is_gpu(place: Any) -> bool:
    """Whether a map's value names a GPU."""
    return not isinstance(place, bool) and bool(_GPU.fullmatch(str(place).lower()))


def without_gpu(device_map: Mapping[str, Any], tensors: Iterable[str]) -> Map:
    """The map for a machine without a GPU: `cpu` for what was on one, `disk` for what was not.

    One that names no GPU remains as it is. Another one gets no catch-all, since transformers takes
    one beside `cpu` but not beside `disk`.
    """
    if not any(is_gpu(place) for place in device_map.values()):
        return dict(device_map)
    played = {name: "cpu" if is_gpu(place) else "disk" for name, place in device_map.items()}
    return expanded(played, tensors)


def layer_of(key: str, layers: Sequence[str]) -> int | None:
    """The decoder layer that a key of a map lies in; None for one outside of them.

    Args:
        key: with or without PEFT's prefix, and with as many first components as somebody wrote.
        layers: the names of the decoder's layers.

    Example:
        >>> layer_of("layers.3.mlp", ["model.layers.0", "model.layers.1"])
        3
    """
    container = layers[0].rpartition(".")[0]
    last = container.rpartition(".")[2]
    found = re.match(rf"(.*?(?:^|\.){re.escape(last)})\.(\d+)(?:\.|$)", _WRAPPED.sub("", key))
    if found is None:
        return None
    inside = f".{container}".endswith(f".{found[1]}") or f".{found[1]}".endswith(f".{container}")
    return int(found[2]) if inside else None


def telling_layers(device_map: Mapping[str, Any], layers: Sequence[str]) -> list[int]:
    """One layer for each way in which the map treats layers: none of them may get lost."""
    told: dict[frozenset[tuple[str, str]], int] = {}
    for index, keys in _by_layer(device_map, layers).items():
        treated = frozenset((renumbered(key, index, 0), str(device_map[key])) for key in keys)
        told.setdefault(treated, index)
    return sorted(told.values())


def scaled(device_map: Mapping[str, Any], layers: Sequence[str], source: Sequence[int]) -> Map:
    """The map for a tiny model whose layer `i` stands for the layer `source[i]`."""
    by_layer = _by_layer(device_map, layers)
    inside = {key for keys in by_layer.values() for key in keys}
    made = {key: place for key, place in device_map.items() if key not in inside}
    for index, original in enumerate(source):
        for key in by_layer.get(original, ()):
            made[renumbered(key, original, index)] = device_map[key]
    return made


def renumbered(name: str, before: int, now: int) -> str:
    """A name with the last number of that value replaced."""
    head, _, tail = f".{name}.".rpartition(f".{before}.")
    return f"{head}.{now}.{tail}".strip(".")


def _by_layer(device_map: Mapping[str, Any], layers: Sequence[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for key in device_map:
        index = layer_of(key, layers)
        if index is not None:
            found.setdefault(index, []).append(key)
    return found
