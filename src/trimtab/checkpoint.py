"""A checkpoint before anything is loaded: its config and the headers of its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trimtab.errors import EnvironmentFault, FormatFault, TrimtabError, first_three
from trimtab.headers import DTYPES, DamagedFile, read_header

if TYPE_CHECKING:
    from huggingface_hub import SafetensorsRepoMetadata

PEFT_PREFIX = "base_model.model."
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX: Final = f"{SAFE}.index.json"
_BESIDE: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".spm", ".vocab", ".bpe")
_TERMS: Final = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""What lies beside the weights and is copied: endings, and beginnings of the terms of use."""
_VOLATILE = ("transformers_version", "_name_or_path")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint file; `dtype` is torch's name of it, `file` the file's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a model without reading its weights.

    `source` is what the user wrote, `folder` the local folder that holds it (None while its
    files are only on the hub), `tensors` is empty for a folder with a config and no weights.
    `fingerprint` is short, and changes with the config, and with any tensor's name, shape or dtype.
    """

    source: str
    folder: Path | None
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSpec]
    fingerprint: str

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The config's own `quantization_config`, where the checkpoint is stored quantized."""
        found = self.config.get("quantization_config")
        return found if isinstance(found, Mapping) else None


def open_checkpoint(source: str | Path, need_weights: bool = True) -> Checkpoint:
    """Reads the config and the headers of a model's files: of a local folder, or of a hub name.

    Args:
        source: a folder, or a name such as `google/gemma-4-E4B-it`. A local folder is read
            without a network; of a hub name only metadata is fetched, no weights.
        need_weights: whether a model without weight files is an error. A plan needs none.

    Raises:
        EnvironmentFault: TT105, no such model.
        FormatFault: TT501 no config, TT502 a truncated file, TT503 a missing file, TT504 an index
            that names tensors which no file holds, TT507 a checkpoint that was damaged in place.

    Example:
        >>> checkpoint = open_checkpoint("./my-model")
        >>> checkpoint.tensors["model.embed_tokens.weight"].shape
        (128256, 4096)
    """
    text = str(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_folder(text, path, need_weights)
    if path.exists():
        raise EnvironmentFault(
            "TT105", f"{text} is a file, not a model", fix="name the folder that holds config.json"
        )
    if _looks_like_path(text):
        raise EnvironmentFault(
            "TT105", f"there is no folder {text}", fix="check the path; it is taken from here"
        )
    return _from_hub(text, need_weights)


def _looks_like_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or text.endswith("/")
    )


def _from_folder(source: str, folder: Path, need_weights: bool) -> Checkpoint:
    config = _read_json(folder / "config.json", source)
    tensors = read_tensors(folder)
    if need_weights and not tensors:
        raise FormatFault(
            "TT503",
            f"{source} holds no weights: neither {SAFE} nor {PICKLED}, whole or in shards",
            fix="download the model again, or name the folder that holds its weights",
        )
    return _checkpoint(source, folder, config, tensors)


def _checkpoint(
    source: str, folder: Path | None, config: dict[str, Any], tensors: dict[str, TensorSpec]
) -> Checkpoint:
    damaged = [name for name in tensors if name.startswith(PEFT_PREFIX)]
    if damaged:
        raise FormatFault(
            "TT507",
            f"{len(damaged)} of the {len(tensors)} tensors of {source} have names that begin with "
            f"{PEFT_PREFIX!r}, such as {damaged[0]}",
            why="PeftModel.from_pretrained on a disk-offloaded base named by a relative path "
            "rewrites the base's own file: its names change and adapter weights are put in",
            fix="restore the file from its source; `trimtab explain TT507` tells how to repair it",
            tensors=damaged,
        )
    return Checkpoint(source, folder, config, tensors, _fingerprint(config, tensors))


def _fingerprint(config: Mapping[str, Any], tensors: Mapping[str, TensorSpec]) -> str:
    lasting = {key: value for key, value in config.items() if key not in _VOLATILE}
    facts = [[one.name, one.dtype, one.shape, one.nbytes] for _, one in sorted(tensors.items())]
    text = json.dumps([lasting, facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_json(path: Path, source: str) -> dict[str, Any]:
    if not path.is_file():
        code = "TT501" if path.name == "config.json" else "TT503"
        raise FormatFault(
            code, f"{source} has no {path.name}", fix="name the folder that holds the model"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as problem:
        raise FormatFault(
            "TT502", f"{path} is not readable JSON: {problem}", fix="download the file again"
        ) from problem
    if not isinstance(data, dict):
        raise FormatFault("TT502", f"{path} holds no JSON object", fix="download the file again")
    return data


def read_tensors(folder: Path) -> dict[str, TensorSpec]:
    """Every tensor of the folder's checkpoint, by name; empty if there are no weights.

    The order of preference is that of transformers: safetensors before pickles, a whole file
    before an index.

    Raises:
        FormatFault: TT502, TT503, TT504.
    """
    for name, read in ((SAFE, read_safetensors), (PICKLED, read_pickled)):
        if (folder / name).exists():
            return read(folder / name)
        if (folder / f"{name}.index.json").exists():
            return _read_shards(folder, f"{name}.index.json", read)
    return {}


def _read_shards(
    folder: Path, index: str, read: Callable[[Path], dict[str, TensorSpec]]
) -> dict[str, TensorSpec]:
    named = _read_json(folder / index, str(folder)).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise FormatFault(
            "TT502", f"{folder / index} has no weight_map", fix="download the file again"
        )
    tensors: dict[str, TensorSpec] = {}
    for shard in sorted(set(named.values())):
        if not (folder / shard).is_file():
            lost = sum(file == shard for file in named.values())
            raise FormatFault(
                "TT503",
                f"the shard {shard} of {folder} is missing: "
                f"{lost} of {len(named)} tensors are in it",
                fix="download the model again",
                shard=shard,
            )
        tensors.update(read(folder / shard))
    absent = sorted(name for name in named if name not in tensors)
    if absent:
        raise FormatFault(
            "TT504",
            f"{folder / index} names {len(absent)} tensors that its files do not hold: "
            f"{first_three(absent)}",
            fix="download the model again: the index and the shards are of different versions",
            tensors=absent,
        )
    return tensors


def read_safetensors(path: Path) -> dict[str, TensorSpec]:
    """The tensors that a safetensors file's header names, their bytes checked against its size.

    Raises:
        FormatFault: TT502, if the file is shorter or longer than its header says.
    """
    try:
        entries, _ = read_header(path)
    except DamagedFile as problem:
        raise _damaged(path, str(problem)) from problem
    return {
        one.name: TensorSpec(one.name, one.dtype, one.shape, one.nbytes, path.name)
        for one in entries
    }


def read_pickled(path: Path) -> dict[str, TensorSpec]:
    """The tensors of a `.bin` file, unpickled as weights only, without their data.

    Raises:
        FormatFault: TT502, if the file is damaged or holds more than weights.
    """
    import torch

    try:
        state = torch.load(path, map_location="meta", weights_only=True)
    except Exception as problem:
        raise _damaged(path, "it cannot be read as weights only") from problem
    if not isinstance(state, dict):
        raise _damaged(path, "it holds no dictionary of tensors")
    return {
        name: TensorSpec(
            name,
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            value.numel() * value.element_size(),
            path.name,
        )
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _damaged(path: Path, because: str) -> FormatFault:
    return FormatFault(
        "TT502", f"{path} is truncated or damaged: {because}", fix="download the file again"
    )


def _from_hub(source: str, need_weights: bool) -> Checkpoint:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config_file = Path(hf_hub_download(source, "config.json"))
    except LocalEntryNotFoundError as problem:
        raise _unreachable(source, problem) from problem
    except EntryNotFoundError as problem:
        raise FormatFault(
            "TT501",
            f"{source} on the hub has no config.json",
            why="it may hold an adapter, or GGUF files only",
            fix="name the base model",
        ) from problem
    except Exception as problem:
        raise _unreachable(source, problem) from problem
    folder = config_file.parent
    config = _read_json(config_file, source)
    tensors = _cached_tensors(folder)
    if not tensors:
        try:
            tensors = _from_metadata(get_safetensors_metadata(source))
        except Exception as problem:
            if need_weights:
                raise FormatFault(
                    "TT503",
                    f"the weights of {source} are neither in the local cache nor readable on the "
                    f"hub as safetensors ({type(problem).__name__})",
                    fix=f"hf download {source}",
                ) from problem
        return _checkpoint(source, None, config, tensors)
    return _checkpoint(source, folder, config, tensors)


def downloaded(checkpoint: Checkpoint) -> Checkpoint:
    """A model of the hub with all its files, also those that were not needed so far.

    Raises:
        EnvironmentFault: TT105, some are not cached and the hub is out of reach.
    """
    if Path(checkpoint.source).expanduser().is_dir():
        return checkpoint
    from huggingface_hub import snapshot_download

    wanted = [f"*{end}" for end in (*_BESIDE, ".safetensors")] + [f"{one}*" for one in _TERMS]
    try:
        found = open_checkpoint(snapshot_download(checkpoint.source, allow_patterns=wanted))
    except TrimtabError:
        raise
    except Exception as problem:
        if checkpoint.folder is not None:  # cached, and the hub out of reach
            return checkpoint
        raise EnvironmentFault(
            "TT105",
            f"the files of {checkpoint.source} cannot be downloaded",
            why=f"{type(problem).__name__}: {problem}",
            fix=f"hf download {checkpoint.source}",
        ) from problem
    return dataclasses.replace(found, source=checkpoint.source)


def copy_beside(folder: Path, target: Path) -> None:
    """Copies what lies beside a model's weights: configs, tokenizer, templates, terms of use."""
    for file in (*sorted(folder.iterdir()), *sorted(folder.glob("additional_chat_templates/*"))):
        wanted = file.name.endswith(_BESIDE) or file.name.upper().startswith(_TERMS)
        weights = file.name.endswith(".index.json") or file.name.startswith((".", "adapter_"))
        if file.is_file() and wanted and not weights:
            to = target / file.relative_to(folder)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, to)


def _cached_tensors(folder: Path) -> dict[str, TensorSpec]:
    """Those of a snapshot in the hub's cache; none if it is not complete: the hub is asked then."""
    try:
        return read_tensors(folder)
    except FormatFault as problem:
        if problem.code == "TT503":
            return {}
        raise


def _from_metadata(metadata: SafetensorsRepoMetadata) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name,
            DTYPES.get(info.dtype, info.dtype.lower()),
            tuple(info.shape),
            info.data_offsets[1] - info.data_offsets[0],
            file,
        )
        for file, held in metadata.files_metadata.items()
        for name, info in held.tensors.items()
    }


def _unreachable(source: str, problem: Exception) -> EnvironmentFault:
    name = type(problem).__name__
    causes = {
        "RepositoryNotFoundError": "the hub has no model of that name, or it is private",
        "GatedRepoError": "the model is gated: its licence has to be accepted on the hub first",
        "HFValidationError": "that is neither a folder here nor a name the hub could have",
        "OfflineModeIsEnabled": "offline mode is on (HF_HUB_OFFLINE) and the model is not cached",
        "LocalEntryNotFoundError": "the hub cannot be reached and the model is not cached here",
    }
    return EnvironmentFault(
        "TT105",
        f"there is no model {source!r}: no such folder here, and none could be read from the hub",
        why=causes.get(name, f"{name}: {str(problem).splitlines()[0] if str(problem) else ''}"),
        fix="check the name; for a gated or private one run `hf auth login`; "
        "offline, give the path of a folder",
    )
