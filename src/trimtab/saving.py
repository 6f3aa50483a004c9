"""A placed model's quantized weights as a checkpoint, weight by weight: nothing is quantized again.

Each weight is read from where it rests, and never brought to a GPU for it.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from trimtab import foreign
from trimtab.checkpoint import INDEX, SAFE, Checkpoint, copy_beside, downloaded, open_checkpoint
from trimtab.errors import FormatFault, PlacementFault
from trimtab.formats import Format, by_name
from trimtab.headers import Entry
from trimtab.keys import Keys, Origin
from trimtab.partial import Partial, disk_faults
from trimtab.quantize import QUANTIZED_FROM, quantization_config
from trimtab.shards import entry_of, write_file
from trimtab.skeleton import build_skeleton

if TYPE_CHECKING:
    from trimtab.park import ParkedUnit
    from trimtab.plan import Plan
    from trimtab.rooms import Rooms

SHARD: Final = 2**30
"""The most bytes of a file, unless one weight has more."""

Parts = Callable[[str], tuple[Format, dict[str, torch.Tensor], Any]]
"""Gives the format, the plain tensors and the recipe of a weight by its name."""


@dataclass(frozen=True)
class Saved:
    """A model that was saved: `nbytes` are those of its `tensors` tensors."""

    folder: Path
    quant: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "quant": self.quant,
            "files": list(self.files),
            "tensors": self.tensors,
            "bytes": self.nbytes,
        }


class Weights:
    """The base's weights by name, wherever they rest and whatever adapters lie around them.

    Args:
        modules: the base's modules by name, as they were before any adapter came.
        units: the parked units.
        rooms: what holds their bytes, and those of tables.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], units: Iterable[ParkedUnit], rooms: Rooms
    ) -> None:
        self._modules = modules
        self._parked = {
            weight.name: (weight, rooms.slabs[unit.name])
            for unit in units
            for weight in unit.weights
        }
        self._tables = rooms.resting
        self._quant = rooms.plan.quant

    def same(self, name: str, other: str) -> bool:
        """Whether two names are those of one parameter."""
        return self._tensor(name) is self._tensor(other)

    def shown(self, name: str) -> tuple[Format, dict[str, torch.Tensor], Any]:
        """A weight's format, tensors and recipe; tensors that would have to be read on `meta`."""
        if name not in self._parked:
            return self.read(name)
        weight, slab = self._parked[name]
        parts = {}
        for key, span in slab.layout.spans[name].items():
            parts[key] = (
                torch.empty(span.shape, dtype=span.dtype, device="meta")
                if span.shape
                else slab.read(name, torch.device("cpu"), key)[key]
            )
        return weight.storage, parts, weight.recipe

    def read(self, name: str) -> tuple[Format, dict[str, torch.Tensor], Any]:
        """The same with all bytes: private copies of what is parked, the others where they are."""
        if name in self._parked:
            weight, slab = self._parked[name]
            return weight.storage, slab.read(name, torch.device("cpu")), weight.recipe
        tensor = self._tensor(name)
        if name in self._tables:
            tensor = self._tables[name].view(tensor.dtype).view(tensor.shape)
        owner, _, attribute = name.rpartition(".")
        module = self._modules[owner]
        if attribute == "weight" and foreign.is_bitsandbytes(module):
            storage = by_name(self._quant)
            return storage, *storage.split(module, tensor, lambda one: one)
        return by_name("plain"), {"data": tensor.detach()}, None

    def _tensor(self, name: str) -> Any:
        owner, _, attribute = name.rpartition(".")
        return getattr(self._modules[owner], attribute)


def save(
    folder: str | Path,
    plan: Plan,
    weights: Weights,
    *,
    progress: Callable[[str], None] | None = None,
    shard: int = SHARD,
) -> Saved:
    """Writes a checkpoint of the weights as they are, under the keys of the plan's own checkpoint.

    Raises:
        EnvironmentFault: TT105, the plan's checkpoint is gone.
        FormatFault: TT514, a place in the checkpoint is not certain; TT516, nothing is quantized,
            or `folder` is taken.
        MemoryFault: TT403, the disk is full.
        PlacementFault: TT205, the plan's checkpoint was changed.
    """
    if plan.quant == "none":
        raise FormatFault(
            "TT516",
            f"{plan.model} is placed in {plan.dtype}: there is nothing quantized to save",
            fix="plan with a quant, such as nf4; the checkpoint itself is the copy in 16 bits",
        )
    checkpoint = downloaded(_unchanged(plan))
    assert checkpoint.folder is not None
    groups = list(_groups(plan, checkpoint, weights))
    target = Path(folder).expanduser().absolute()
    with closing(Growing(target, uuid.uuid4().hex)) as growing:
        try:
            files, written = _write(groups, growing, shard, progress)
            with disk_faults(growing.path, 0):
                copy_beside(checkpoint.folder, growing.path)
                config = _json(_config(checkpoint, plan))
                (growing.path / "config.json").write_text(config, "utf-8")
            growing.take_place()
        except BaseException:
            growing.close()
            shutil.rmtree(growing.path, ignore_errors=True)
            raise
    return Saved(target, plan.quant, files, sum(len(one.entries) for one in groups), written)


class Growing(Partial):
    """`DIR.partial` of a model that is saved: it becomes `DIR`, or goes."""

    kind = "save"
    others = "one that was killed, or is still going on"

    @staticmethod
    def taken(what: str, fix: str) -> FormatFault:
        return FormatFault("TT516", what, why="nothing is overwritten", fix=fix)


@dataclass(frozen=True)
class Group:
    """Tensors of a file that are written together, and what makes them."""

    entries: tuple[Entry, ...]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.entries)


def _unchanged(plan: Plan) -> Checkpoint:
    checkpoint = open_checkpoint(plan.model)
    if checkpoint.fingerprint != plan.fingerprint:
        raise PlacementFault(
            "TT205",
            f"{plan.model} was loaded as {plan.fingerprint} and is now {checkpoint.fingerprint}",
            why="the weights are saved under the names that the checkpoint gives them",
            fix="load it again as it is now",
        )
    return checkpoint


def _groups(plan: Plan, checkpoint: Checkpoint, weights: Weights) -> Iterator[Group]:
    """All that is to be written, in the order of the model."""
    skeleton = build_skeleton(checkpoint, plan.quant, plan.dtype).model
    keys = Keys(checkpoint, skeleton)
    ties = foreign.tied_names(skeleton)
    seen: set[str] = set()
    for name in skeleton.state_dict():
        owner = ties.get(name)
        if name in seen or (owner is not None and weights.same(name, owner)):
            continue
        origin = keys.of_name(name)
        if origin is None:
            # A head that is tied may be what the checkpoint holds of the two.
            aliases = [alias for alias, to in ties.items() if to == name]
            origin = next(filter(None, map(keys.of_name, aliases)), None)
            if origin is None:
                continue  # the loader made it, and will again
            origin = Origin(name, origin.keys, (name,))
        seen.update(origin.names)

        def make(parts: Parts, origin: Origin = origin) -> Mapping[str, torch.Tensor]:
            return _stored(origin, keys, parts, checkpoint.source)

        entries = tuple(entry_of(key, one) for key, one in make(weights.shown).items())
        yield Group(entries, lambda make=make: make(weights.read))  # type: ignore[misc]


def _stored(origin: Origin, keys: Keys, parts: Parts, source: str) -> Mapping[str, torch.Tensor]:
    """The tensors of a file that an origin's parameters are stored as, by key."""
    found = {name: parts(name) for name in origin.names}
    storage, tensors, recipe = found[origin.names[0]]
    if all(one[0].name == "plain" for one in found.values()):
        plain = {name: one[1]["data"] for name, one in found.items()}
        if not origin.patterns:
            return {origin.keys[0]: plain[origin.names[0]]}
        # Taking apart may copy: not on the GPU, whose memory the plan has given away.
        return keys.tensors(
            origin, {name: one if one.is_meta else one.cpu() for name, one in plain.items()}
        )
    if origin.patterns:
        raise FormatFault(
            "TT514",
            f"{origin.names[0]} is quantized and {source} holds it in other parts",
            why="what is quantized as one cannot be taken apart",
            fix="load the base and save it again with save_pretrained, then take that",
        )
    prefix = origin.keys[0].removesuffix("weight")
    return {f"{prefix}{key}": one for key, one in storage.stored(tensors, recipe).items()}


def _write(
    groups: list[Group], growing: Partial, limit: int, progress: Callable[[str], None] | None
) -> tuple[tuple[str, ...], int]:
    """The files of weights and their index; the names of the files, and all bytes of tensors."""
    shards: list[list[Group]] = [[]]
    for group in groups:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + group.nbytes > limit:
            shards.append([])
        shards[-1].append(group)
    stem, count = SAFE.removesuffix(".safetensors"), len(shards)
    total, index = 0, {}
    with disk_faults(growing.path, sum(one.nbytes for one in groups)):
        for number, shard in enumerate(shards, 1):
            file = SAFE if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"
            entries = [one for group in shard for one in group.entries]
            total += write_file(growing.path / file, entries, _tensors(shard))
            index.update({one.name: file for one in entries})
            if progress is not None:
                progress(file)
        if count > 1:
            found = {"metadata": {"total_size": total}, "weight_map": index}
            (growing.path / INDEX).write_text(_json(found), "utf-8")
    return tuple(dict.fromkeys(index.values())), total


def _tensors(shard: list[Group]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a shard, none of them held when it has been taken."""
    for group in shard:
        made = dict(group.make())
        for key in list(made):
            yield key, made.pop(key)


def _config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The checkpoint's own config, which says in addition how the weights are quantized."""
    config = dict(checkpoint.config)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = plan.dtype
    if checkpoint.quantization is None:
        asked = quantization_config(plan.quant, plan.dtype)
        assert asked is not None
        config["quantization_config"] = {
            **json.loads(asked.to_json_string(use_diff=False)),
            QUANTIZED_FROM: plan.dtype,
        }
    return config


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
