"""Adapters merged into a checkpoint, file by file: never a GPU, never the whole model in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab import foreign
from trimtab.adapted import shapes_of
from trimtab.adapters import load_tensors, read_adapter
from trimtab.changes import Changes
from trimtab.checkpoint import INDEX, SAFE, Checkpoint, copy_beside, downloaded, open_checkpoint
from trimtab.compat import known_fields
from trimtab.deltas import Delta, check_mergeable
from trimtab.errors import AdapterFault, FormatFault
from trimtab.fit import fit
from trimtab.headers import Entry, read_header
from trimtab.keys import Keys, Read
from trimtab.memory import format_size
from trimtab.partial import Partial, disk_faults
from trimtab.shards import read_tensor, write_copy
from trimtab.skeleton import build_skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Merged:
    """A merge that was carried out.

    `tensors` of the `total` tensors were changed or added, the others are the base's bytes;
    `nbytes` are those of all weights; `untied` names the parameters that are one tensor in the base
    and two in the merged model; `notes` say what was mapped, skipped, dropped or untied.
    """

    folder: Path
    base: str
    adapters: tuple[tuple[str, float], ...]
    files: tuple[str, ...]
    tensors: int
    total: int
    nbytes: int
    untied: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "base": self.base,
            "adapters": [{"source": one, "weight": weight} for one, weight in self.adapters],
            "files": list(self.files),
            "tensors": self.tensors,
            "total": self.total,
            "bytes": self.nbytes,
            "untied": list(self.untied),
            "notes": list(self.notes),
        }


def merge(
    model: str | Path,
    adapter: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    allow_unused: bool = False,
    allow_other_base: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Merged:
    """Writes a checkpoint of base and adapters in the base's own dtype, equal to PEFT's merge.

    The base's files are copied one by one; tensors that no adapter touches keep their bytes. At no
    time is there more in memory than one of the base's modules, and the adapters. What is written
    grows in `<out>.partial` and becomes `out` at the end; a merge that was interrupted goes on when
    it is called again.

    Where the input table is also the head and an adapter changes one of them, both are written, and
    the config says that they are no longer tied: PEFT's merge in memory would change both, which
    base and adapter side by side do not. Trained token rows are in both there, too, and stay tied.

    Args:
        model: the base in 16 or 32 bits: a folder, or a name on the hub.
        adapter: a folder or hub name, or several; each is merged into what the one before left.
        out: the folder to write; must not exist, or be empty.
        weights: what each adapter's scale is multiplied with; by default 1.
        allow_unused: tensors that match nothing are left out, and said, instead of an error.
        allow_other_base: adapters that name another base are accepted.
        progress: called with the name of each file when it is finished.

    Raises:
        AdapterFault: TT309, a quantized base; TT310, adapters that undo each other; TT314, a kind
            that cannot be merged; TT318, `out` is taken; and all that `load` raises for adapters.
        FormatFault: TT501 to TT514, the base.
        MemoryFault: TT403, the disk is full.

    Example:
        >>> trimtab.merge("google/gemma-3-4b-it", "./sql-lora", "./gemma-sql").tensors
        238
    """
    sources = [adapter] if isinstance(adapter, (str, Path)) else list(adapter)
    scales = [1.0] * len(sources) if weights is None else [float(one) for one in weights]
    if not sources or len(scales) != len(sources) or not all(map(math.isfinite, scales)):
        raise ValueError(f"{len(sources)} adapters need as many finite weights, not {scales}")
    target = Path(out).expanduser().absolute()
    checkpoint = _base(model)
    folder = checkpoint.folder
    assert folder is not None
    entries = _entries(checkpoint, folder)

    def read(key: str) -> torch.Tensor:
        return read_tensor(folder / checkpoint.tensors[key].file, entries[key])

    skeleton = build_skeleton(checkpoint, "none", "auto").model
    keys = Keys(checkpoint, skeleton)
    allowed = {"allow_unused": allow_unused, "allow_other_base": allow_other_base}
    deltas = [
        _delta(one, weight, checkpoint, skeleton, allowed)
        for one, weight in zip(sources, scales, strict=True)
    ]
    deltas = [_with_own_base(one, keys, read) for one in deltas]
    changes = Changes(checkpoint, keys, skeleton, deltas, read)
    with closing(Partial(target, _job(checkpoint, folder, deltas))) as growing:
        files = _write(checkpoint, folder, changes, growing, progress)
        merged = Merged(
            folder=target,
            base=checkpoint.source,
            adapters=tuple((one.source, one.weight) for one in deltas),
            files=files,
            tensors=len(changes.keys) + len(changes.untied),
            total=len(checkpoint.tensors) + len(changes.untied),
            nbytes=_total(checkpoint, changes),
            untied=tuple(sorted(changes.broken)),
            notes=tuple(_notes(changes, deltas)),
        )
        _write_rest(checkpoint, folder, changes, growing, merged)
        growing.take_place()
    return merged


def _notes(changes: Changes, deltas: Sequence[Delta]) -> Iterator[str]:
    for one in deltas:
        yield from one.decided.notes
    if changes.broken:
        yield (
            f"{' and '.join(sorted(changes.broken))} were one tensor and are two now: an adapter"
            " changes one of them, or each in its own way"
        )


def _base(model: str | Path) -> Checkpoint:
    """The base, in a local folder, in safetensors and not quantized."""
    checkpoint = open_checkpoint(model)
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method", "an unnamed method")
        raise AdapterFault(
            "TT309",
            f"{checkpoint.source} is quantized ({method}): nothing is merged into it",
            why="its weights would be rounded twice: once as they are, and again after the adapter"
            " is added",
            fix="merge into the base in 16 bits, and quantize the result; or run the adapter beside"
            " the quantized base, which is exact",
        )
    checkpoint = downloaded(checkpoint)
    other = next((one for one in checkpoint.tensors.values() if _is_other(one.file)), None)
    if other is not None:
        raise FormatFault(
            "TT509",
            f"{checkpoint.source} holds its weights in {other.file}, and only safetensors files"
            " can be merged file by file",
            fix="load it with transformers and save it with save_pretrained, then merge into that",
        )
    return checkpoint


def _is_other(file: str) -> bool:
    return not file.endswith(".safetensors")


def _entries(checkpoint: Checkpoint, folder: Path) -> dict[str, Entry]:
    files = sorted({one.file for one in checkpoint.tensors.values()})
    return {one.name: one for file in files for one in read_header(folder / file)[0]}


def _delta(
    source: str | Path,
    weight: float,
    checkpoint: Checkpoint,
    skeleton: PreTrainedModel,
    allowed: Mapping[str, bool],
) -> Delta:
    header = read_adapter(source)
    decided = fit(
        header,
        shapes_of(skeleton),
        checkpoint.source,
        ties=foreign.tied_names(skeleton).items(),
        known_fields=known_fields(header),
        allow_unused=allowed["allow_unused"],
        allow_other_base=allowed["allow_other_base"],
    )
    return Delta(decided, load_tensors(header), weight)


def _with_own_base(delta: Delta, keys: Keys, read: Read) -> Delta:
    """The adapter with those tensors of the base that it has its own values of."""
    own = {}
    for key, name in delta.decided.base_tensors.items():
        origin = keys.of_name(name)
        base = keys.parameters(origin, read)[name] if origin else None
        if base is None or not torch.equal(base, delta.tensors[key].to(base.dtype)):
            own[name] = key
    found = dataclasses.replace(delta, own_base=own)
    check_mergeable(found)
    return found


def _job(checkpoint: Checkpoint, folder: Path, deltas: Sequence[Delta]) -> str:
    """A fingerprint of all that the result is a function of."""
    import peft
    import transformers

    from trimtab import __version__

    def stamp(file: Path) -> list[Any]:
        found = file.stat()
        return [file.name, found.st_size, found.st_mtime_ns]

    files = sorted({one.file for one in checkpoint.tensors.values()})
    facts = [
        [__version__, peft.__version__, transformers.__version__, torch.__version__],
        [str(folder.resolve()), checkpoint.fingerprint, [stamp(folder / one) for one in files]],
        [
            [
                one.source,
                one.weight,
                dict(one.decided.config),
                sorted(one.decided.keys.items()),
                hashlib.sha256(one.decided.header.file.read_bytes()).hexdigest(),
            ]
            for one in deltas
        ],
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    changes: Changes,
    growing: Partial,
    progress: Callable[[str], None] | None,
) -> tuple[str, ...]:
    """The files of weights, those that are finished left out."""
    files = sorted({one.file for one in checkpoint.tensors.values()})
    left = [file for file in files if not growing.has(file)]
    needed = sum((folder / file).stat().st_size for file in left)
    with disk_faults(growing.path, needed, resumes=True):
        for file in left:
            held = frozenset(key for key, one in checkpoint.tensors.items() if one.file == file)
            write_copy(folder / file, growing.path / file, changes.value, changes.added(held))
            changes.forget()
            growing.finish(file)
            if progress is not None:
                progress(file)
    return tuple(files)


def _total(checkpoint: Checkpoint, changes: Changes) -> int:
    extra = sum(checkpoint.tensors[one.like].nbytes for one in changes.untied)
    return sum(one.nbytes for one in checkpoint.tensors.values()) + extra


def _write_rest(
    checkpoint: Checkpoint, folder: Path, changes: Changes, growing: Partial, merged: Merged
) -> None:
    """All that is not weights."""
    with disk_faults(growing.path, 0, resumes=True):
        copy_beside(folder, growing.path)
        if changes.broken:
            config = growing.path / "config.json"
            config.write_text(_json(_untied_config(checkpoint.config)), "utf-8")
        if SAFE not in merged.files:
            index = json.loads((folder / INDEX).read_text("utf-8"))
            for one in changes.untied:
                index["weight_map"][one.key] = checkpoint.tensors[one.like].file
            index["metadata"] = {**index.get("metadata", {}), "total_size": merged.nbytes}
            (growing.path / INDEX).write_text(_json(index), "utf-8")
        (growing.path / "README.md").write_text(_card(merged), "utf-8")


def _untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model whose table and head are two tensors."""
    found = {**config, "tie_word_embeddings": False}
    for name, part in config.items():
        if isinstance(part, Mapping) and (
            "tie_word_embeddings" in part or name in ("text_config", "llm_config")
        ):
            found[name] = {**part, "tie_word_embeddings": False}
    return found


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _card(merged: Merged) -> str:
    """The model card."""
    import peft

    from trimtab import __version__

    front = ["---", f"base_model: {json.dumps(merged.base)}", "base_model_relation: merge"]
    front += ["library_name: transformers", "tags:", "- merge", "- trimtab", "---"]
    lines = [
        *front,
        "",
        f"# {merged.folder.name}",
        "",
        f"`{merged.base}` with these PEFT adapters merged into its weights, in this order:",
        "",
        "| adapter | weight |",
        "| --- | --- |",
        *(f"| `{source}` | {weight:g} |" for source, weight in merged.adapters),
        "",
        f"{merged.tensors} of {merged.total} tensors ({format_size(merged.nbytes)} in all) were"
        " changed or added; the others are the base's, byte for byte.",
    ]
    if merged.notes:
        lines += ["", *(f"- {note}" for note in merged.notes)]
    lines += ["", f"Made by trimtab {__version__} with PEFT {peft.__version__}.", ""]
    return "\n".join(lines)
