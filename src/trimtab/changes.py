"""What a merge changes of a checkpoint: the tensors by key, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from trimtab import foreign
from trimtab.deltas import Delta, below, merge_module, outermost
from trimtab.errors import AdapterFault, FormatFault
from trimtab.keys import Keys, Origin, Read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trimtab.checkpoint import Checkpoint


@dataclass(frozen=True)
class Untied:
    """A tensor that gets a key of its own: `name` shared the tensor of `like` so far."""

    key: str
    name: str
    like: str


class Changes:
    """Which tensors of a checkpoint adapters change, and into what.

    Args:
        checkpoint: the base.
        keys: where its tensors belong.
        model: its skeleton on `meta`.
        deltas: the adapters, in the order in which they are merged.
        read: gives a tensor of the checkpoint by its key, a private copy.

    Raises:
        FormatFault: TT505 a parameter that the checkpoint lacks, TT514 keys that are not certain.
        AdapterFault: TT309 a tensor that is not stored in 16 or 32 bits, TT310 and TT314 adapters
            that exclude each other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keys: Keys,
        model: PreTrainedModel,
        deltas: Sequence[Delta],
        read: Read,
    ) -> None:
        self._checkpoint = checkpoint
        self._keys = keys
        self._model = model
        self._deltas = deltas
        self._read = read
        self._ties = foreign.tied_names(model)
        self._ready: dict[str, torch.Tensor] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._part_of = {
            name: path
            for path in outermost(set().union(*(one.paths for one in deltas)))
            for name, _ in model.get_submodule(path).named_parameters(path)
        }
        self._refuse_overlaps()
        self._kept, self.broken = self._look_at_ties()
        self.untied = tuple(self._untied())
        self.keys = frozenset(self._changed())
        self._check_dtypes()

    def value(self, key: str) -> torch.Tensor | None:
        """A tensor of the checkpoint with the adapters merged in; None: it stays as it is."""
        if key not in self.keys:
            return None
        if key not in self._ready:
            origin = self._keys.of_key(key)
            assert origin is not None
            self._ready.update(self._keys.tensors(origin, self._merged(origin)))
        return self._ready.pop(key)

    def forget(self) -> None:
        """Lets go of what was made together with what was asked for."""
        self._ready.clear()
        self._made.clear()

    def added(self, like: frozenset[str]) -> dict[str, tuple[str, Callable[[], torch.Tensor]]]:
        """Tensors with a key of their own that belong to the file that holds the keys `like`."""
        return {
            one.key: (one.like, partial(self._alone, one.name))
            for one in self.untied
            if one.like in like
        }

    def _alone(self, name: str) -> torch.Tensor:
        path = self._part_of.get(name)
        return self._base(name) if path is None else self._merge(path, {})[name]

    def _merged(self, origin: Origin) -> dict[str, torch.Tensor]:
        """All parameters of an origin, those that no adapter touches as they are."""
        touched = {name: self._kept.get(name, name) for name in origin.names}
        if not all(one in self._made for one in touched.values()):
            known = self._keys.parameters(origin, self._read)
            paths = {self._part_of[one] for one in touched.values() if one in self._part_of}
            for path in sorted(paths):
                self._made.update(self._merge(path, known))
            for name, one in touched.items():
                self._made.setdefault(one, known[name])
        return {name: self._made.pop(one) for name, one in touched.items()}

    def _merge(self, path: str, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {
            name: known[name] if name in known else self._base(name)
            for name, part in self._part_of.items()
            if part == path
        }
        deltas = [one for one in self._deltas if any(below(each, path) for each in one.paths)]
        return merge_module(self._model.get_submodule(path), path, given, deltas)

    def _base(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        return self._keys.parameters(self._origin(stored), self._read)[stored]

    def _stored(self, name: str) -> str:
        """The name under which the checkpoint holds a parameter: a tied one may have another's."""
        group = (name, *self._tied_to(name))
        return next((one for one in group if self._keys.of_name(one) is not None), name)

    def _origin(self, name: str) -> Origin:
        found = self._keys.of_name(name)
        if found is None:
            raise FormatFault(
                "TT505",
                f"{self._checkpoint.source} lacks {name}, which an adapter changes",
                fix="use the versions that the checkpoint was written with, or download it again",
                tensors=[name],
            )
        return found

    def _changed(self) -> Iterator[str]:
        """The keys of the checkpoint that get other values."""
        alone = {one.name for one in self.untied}
        for name in {*self._part_of, *self._kept} - alone:
            if name in self._part_of and self._stored(name) in self._kept:
                continue  # its tensor lies under the other name
            yield from self._origin(name).keys

    def _tied_to(self, name: str) -> list[str]:
        owner = self._ties.get(name, name)
        group = {owner, *(one for one, other in self._ties.items() if other == owner)}
        return sorted(group - {name}) if len(group) > 1 else []

    def _look_at_ties(self) -> tuple[dict[str, str], frozenset[str]]:
        """Names that change with a touched one that they are tied to, and names of broken ties."""
        kept: dict[str, str] = {}
        broken: set[str] = set()
        for name, path in self._part_of.items():
            others = self._tied_to(name)
            if not others:
                continue
            users = [one for one in self._deltas if self._touches(one, (name, *others))]
            same = [one.keeps_ties(path) for one in users]
            if all(same) and not any(one in self._part_of for one in others):
                held = [one for one in others if self._keys.of_name(one) is not None]
                kept.update(dict.fromkeys(held, name))
            elif (
                any(same)
                or {name, *others} != self._table_and_head()
                or any(one in user.own_base for user in users for one in (name, *others))
            ):
                raise AdapterFault(
                    "TT314",
                    f"{name} is tied to {', '.join(others)}, and the adapters change them in ways"
                    " that no checkpoint can hold",
                    fix="run the adapters beside the base, which is exact",
                )
            else:
                broken.update((name, *others))
        return kept, frozenset(broken)

    def _untied(self) -> Iterator[Untied]:
        """The names of broken ties that the checkpoint has no key for."""
        for name in sorted(self.broken):
            if self._keys.of_name(name) is None:
                like = self._origin(self._stored(name)).keys[0]
                yield Untied(self._keys.key_for(name), name, like)

    def _touches(self, delta: Delta, names: tuple[str, ...]) -> bool:
        return any(below(name, path) for name in names for path in delta.paths)

    def _table_and_head(self) -> set[str]:
        modules = {id(module): name for name, module in self._model.named_modules()}
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        return {f"{modules[id(one)]}.weight" for one in ends if one is not None}

    def _refuse_overlaps(self) -> None:
        """What an adapter holds whole would undo what one before it changed."""
        for delta in self._deltas:
            names = (*delta.whole, *delta.own_base)
            for other in self._deltas:
                both = sorted(name for name in names for path in other.paths if below(name, path))
                if both and other is not delta:
                    raise AdapterFault(
                        "TT310",
                        f"{delta.source} holds {both[0]} whole, and {other.source} changes it too",
                        why="one would undo the other",
                        fix="merge them into copies of their own",
                    )

    def _check_dtypes(self) -> None:
        floats = ("bfloat16", "float16", "float32", "float64")
        for key in sorted(self.keys):
            spec = self._checkpoint.tensors[key]
            if spec.dtype not in floats:
                raise AdapterFault(
                    "TT309",
                    f"{key} of {self._checkpoint.source} is stored as {spec.dtype}",
                    why="it would be rounded twice: once as it was stored, and again when the"
                    " adapter is added",
                    fix="merge into the base in 16 bits, and quantize the result",
                )
