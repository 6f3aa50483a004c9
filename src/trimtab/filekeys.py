"""Keys of an adapter's file: the module that each belongs to, and what PEFT calls it there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab.adapters import ADAPTED, AdapterHeader


@dataclass(frozen=True)
class FileKey:
    """A key of the file: its module there, and what follows it."""

    key: str
    path: str
    rest: str


def split_key(header: AdapterHeader, key: str) -> FileKey:
    """The module path of a key: what stands before the adapter's own part of it."""
    name = key.removeprefix(ADAPTED)
    parts = name.split(".")
    if not header.is_own(key):
        return FileKey(key, ".".join(parts[:-1]), parts[-1])
    if header.is_prompt or header.is_shared(key):
        return FileKey(key, "", name)
    at = next(number for number, part in enumerate(parts) if header.begins_own(part))
    at -= parts[at - 1] == "token_adapter" if at else 0
    rest = parts[at:]
    while at and parts[at - 1] == "base_layer":  # several parameters of one module are adapted
        at -= 1
        rest = ["base_layer", *rest]
    if rest[-1] == "lora_magnitude_vector":  # a module since peft 0.12, saved as if it were none
        rest.append("weight")
    return FileKey(key, ".".join(parts[:at]), ".".join(rest))


def key_here(one: FileKey, mapping: Mapping[str, str]) -> str:
    return f"{ADAPTED}{mapping[one.path]}.{one.rest}" if one.path else one.key


def tied_keys(header: AdapterHeader) -> list[FileKey]:
    """Keys that look like the base's own, and may be a trained module's under its tied name."""
    if not header.config.get("ensure_weight_tying"):
        return []
    return [split_key(header, key) for key in header.base_tensors]


def repeated(
    header: AdapterHeader,
    keys: Iterable[FileKey],
    used: list[FileKey],
    mapping: Mapping[str, str],
    ties: Iterable[tuple[str, str]],
) -> list[FileKey]:
    """What the file holds a second time for a module that is tied to one that is adapted.

    PEFT ties the adapters of both by itself; that they are equal shows when they are loaded.
    """
    if header.peft_type != "TRAINABLE_TOKENS" and not header.config.get("ensure_weight_tying"):
        return []
    adapted = {mapping[one.path] for one in used if one.path}
    pairs = [tuple(name.rpartition(".")[0] for name in pair) for pair in ties]
    twins = {one for pair in pairs if adapted.intersection(pair) for one in pair}
    known = {one.key for one in used}
    return [one for one in keys if one.key not in known and mapping.get(one.path) in twins]
