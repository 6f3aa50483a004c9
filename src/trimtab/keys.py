"""Which tensors of a checkpoint become which parameters of the model, and the way back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trimtab import foreign
from trimtab.errors import FormatFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trimtab.checkpoint import Checkpoint

Read = Callable[[str], torch.Tensor]
"""Gives a tensor of the checkpoint by its key."""


@dataclass(frozen=True)
class Origin:
    """Tensors of a checkpoint that the loader takes together, and the parameters it makes of them.

    `patterns` says of each key which of the loader's patterns matched; it is empty where one tensor
    becomes one parameter as it is.
    """

    first: str
    keys: tuple[str, ...]
    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()


class Keys:
    """The loader's own table of keys, asked once for the whole checkpoint.

    Raises:
        FormatFault: TT514, from any method, where the way back to the file is not certain.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        self._model = model
        self._source = checkpoint.source
        self._conversions = foreign.key_conversions(model)
        self._known = dict(model.state_dict())
        self._of_key: dict[str, Origin] = {}
        self._of_name: dict[str, Origin] = {}
        self._twice: set[str] = set()
        self._collect(checkpoint)

    def of_key(self, key: str) -> Origin | None:
        """What a key belongs to; None for one that the model has no parameter for."""
        return self._of_key.get(key)

    def of_name(self, name: str) -> Origin | None:
        """Where a parameter comes from; None if the checkpoint does not hold it."""
        if name in self._twice:
            raise self._uncertain(f"several tensors of {self._source} are {name}")
        return self._of_name.get(name)

    def key_for(self, name: str) -> str:
        """The key under which a parameter that the checkpoint lacks would be stored."""
        empty = torch.empty(0, device="meta")
        found = list(foreign.reverted_tensors(self._model, self._conversions, {name: empty}))
        if len(found) == 1 and self._name_of(found[0]) == (name, None):
            return found[0]
        raise self._uncertain(f"{self._source} has no certain name for {name}")

    def parameters(self, origin: Origin, read: Read) -> dict[str, torch.Tensor]:
        """The parameters of an origin, by name, as the loader makes them."""
        if not origin.patterns:
            return {origin.names[0]: read(origin.keys[0])}
        tensors = {key: read(key) for key in origin.keys}
        found = self._convert(origin.first, origin.keys, origin.patterns, tensors)
        back = self._revert(found)
        if set(back) != set(tensors) or not all(
            torch.equal(back[key], one) and back[key].dtype == one.dtype
            for key, one in tensors.items()
        ):
            raise self._uncertain(
                f"{', '.join(origin.names)} cannot be turned back into the tensors of"
                f" {self._source} that it was made of"
            )
        return found

    def tensors(
        self, origin: Origin, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, by key, of the parameters of an origin."""
        if not origin.patterns:
            return {origin.keys[0]: parameters[origin.names[0]]}
        return self._revert(dict(parameters))

    def _collect(self, checkpoint: Checkpoint) -> None:
        renamed: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key in sorted(checkpoint.tensors, key=foreign.natural_order):
            name, pattern = self._name_of(key)
            if pattern is not None:
                renamed[name].append((key, pattern))
            elif name in self._known:
                self._add(Origin(name, (key,), (name,)))
        for name, found in renamed.items():
            keys = tuple(key for key, _ in found)
            patterns = tuple(pattern for _, pattern in found)
            if name in self._known:
                made = self._convert(name, keys, patterns, _empty(checkpoint, keys))
                self._add(Origin(name, keys, tuple(made), patterns))

    def _add(self, origin: Origin) -> None:
        for name in origin.names:
            if name in self._of_name:
                self._twice.add(name)
            self._of_name[name] = origin
        self._of_key.update(dict.fromkeys(origin.keys, origin))

    def _name_of(self, key: str) -> tuple[str, str | None]:
        return foreign.renamed_key(key, self._model, self._conversions, self._known)

    def _convert(
        self,
        name: str,
        keys: tuple[str, ...],
        patterns: tuple[str, ...],
        tensors: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        given = [(key, pattern, tensors[key]) for key, pattern in zip(keys, patterns, strict=True)]
        try:
            return foreign.convert_tensors(self._model, self._conversions, name, given)
        except Exception as problem:
            raise self._uncertain(
                f"the tensors of {self._source} that make {name} cannot be put together", problem
            ) from problem

    def _revert(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            return foreign.reverted_tensors(self._model, self._conversions, parameters)
        except Exception as problem:
            raise self._uncertain(
                f"{', '.join(parameters)} cannot be taken apart as {self._source} holds it", problem
            ) from problem

    def _uncertain(self, what: str, problem: Exception | None = None) -> FormatFault:
        return FormatFault(
            "TT514",
            what,
            why=f"{type(problem).__name__}: {problem}"
            if problem
            else "the installed transformers renames or converts them, and not one to one",
            fix="load the base and save it again with save_pretrained, then take that",
        )


def _empty(checkpoint: Checkpoint, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    specs = (checkpoint.tensors[key] for key in keys)
    return {
        one.name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta")
        for one in specs
    }
