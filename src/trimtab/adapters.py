"""Facts about an adapter, read from its config and the header of its weights file."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trimtab.errors import AdapterFault, first_line
from trimtab.fields import problem
from trimtab.formats.base import DTYPE_BYTES
from trimtab.headers import DTYPES, DamagedFile, read_header

if TYPE_CHECKING:
    import torch

CONFIG_FILE: Final = "adapter_config.json"
SAFETENSORS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"

ADAPTED: Final = "base_model.model."
"""What PEFT puts before the base's own names, in its files."""

_SHARED: Final = "base_model."

_PREFIXES: Final = {
    "LORA": "lora_", "ADALORA": "lora_", "LOHA": "hada_", "VERA": "vera_lambda_",
    "PVERA": "pvera_lambda_",
}  # fmt: skip

_OTHERS: Final = ("trainable_tokens_", "vera_", "pvera_", "adaption_")
"""Beginnings that are not those of a kind's name."""

PROMPT_TYPES: Final = frozenset(
    ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
)
"""Kinds that put tokens before the input and change no module."""


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter file: its key there, torch's name of its dtype, its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class AdapterHeader:
    """An adapter without its weights.

    `source` is what the user named, `folder` and `file` where it lies, `config` its
    adapter_config.json as it is, `tensors` what the file holds, by key.
    """

    source: str
    folder: Path
    file: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, AdapterTensor]

    @property
    def peft_type(self) -> str:
        return str(self.config["peft_type"])

    @property
    def base_name(self) -> str | None:
        """The base model that the config names: a hub name or a path of the machine of training."""
        return self.config.get("base_model_name_or_path") or None

    @property
    def prefix(self) -> str:
        """What the names of this kind's own weights begin with, such as `lora_`."""
        return _PREFIXES.get(self.peft_type, f"{self.peft_type.lower()}_")

    @property
    def is_prompt(self) -> bool:
        return self.peft_type in PROMPT_TYPES

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the LoRA tensors of the file have, ascending."""
        first = (".lora_A.weight", ".lora_embedding_A")
        return tuple(
            sorted({one.shape[0] for key, one in self.tensors.items() if key.endswith(first)})
        )

    @property
    def target_modules(self) -> str | tuple[str, ...] | None:
        """A regular expression, module names or their ends, or None."""
        targets = self.config.get("target_modules")
        return targets if isinstance(targets, str) else _names(targets)

    @property
    def modules_to_save(self) -> tuple[str, ...]:
        return _names(self.config.get("modules_to_save")) or ()

    @property
    def target_parameters(self) -> tuple[str, ...]:
        return _names(self.config.get("target_parameters")) or ()

    @property
    def use_dora(self) -> bool:
        return bool(self.config.get("use_dora"))

    @property
    def init_weights(self) -> bool | str:
        """LoRA's `init_lora_weights`; True for kinds without it."""
        chosen = self.config.get("init_lora_weights", True)
        return chosen.lower() if isinstance(chosen, str) else bool(chosen)

    @property
    def weights(self) -> tuple[str, ...]:
        """Keys of the adapter's own weights, whole trained modules included."""
        dropped = set(self.base_tensors)
        return tuple(key for key in self.tensors if key not in dropped)

    def is_own(self, key: str) -> bool:
        """Whether a key of the file is a weight of the adapter's kind, not one of the base."""
        if self.is_prompt or self.is_shared(key):
            return True
        return any(self.begins_own(part) for part in key.split("."))

    def begins_own(self, part: str) -> bool:
        """Whether a part of a key is where the module's name ends and the adapter's own begins."""
        return part.startswith(self._beginnings)

    @cached_property
    def _beginnings(self) -> tuple[str, ...]:
        return (self.prefix, *_OTHERS)

    def is_shared(self, key: str) -> bool:
        """Whether a key is of what all layers share, such as VeRA's projections."""
        return key.startswith(_SHARED) and not key.startswith(ADAPTED)

    @property
    def saved_keys(self) -> tuple[str, ...]:
        """Keys of whole modules that were trained: `modules_to_save`."""
        return tuple(key for key in self.tensors if not self.is_own(key) and self._is_saved(key))

    @cached_property
    def base_tensors(self) -> tuple[str, ...]:
        """Keys of tensors that belong to the base model: biases, embedding tables."""
        return tuple(
            key for key in self.tensors if not self.is_own(key) and not self._is_saved(key)
        )

    def _is_saved(self, key: str) -> bool:
        if self.peft_type == "LN_TUNING":
            return True
        # PEFT's rule: whatever ends with the name, such as `input_layernorm` with `norm`.
        parts = key.removeprefix(ADAPTED).split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts))]
        return any(path.endswith(name) for path in paths for name in self.modules_to_save)


def adapter_bytes(header: AdapterHeader) -> int:
    """Bytes of the loaded adapter: PEFT makes 32-bit floats of 16-bit ones.

    Modules that were trained whole keep the dtype of the file; tensors of the base add nothing.

    Example:
        >>> adapter_bytes(read_adapter("./sql-lora"))  # doctest: +SKIP
        13631488
    """
    kept, dropped = set(header.saved_keys), set(header.base_tensors)
    total = 0
    for key, one in header.tensors.items():
        if key in dropped:
            continue
        small = one.dtype in ("float16", "bfloat16") or one.dtype.startswith("float8")
        total += math.prod(one.shape) * 4 if small and key not in kept else one.nbytes
    return total


def read_adapter(source: str | Path | AdapterHeader) -> AdapterHeader:
    """Reads an adapter's config and header, from a local folder or a hub name.

    What has been read already is returned as it is.

    Raises:
        AdapterFault: TT301, no adapter or no weights there; TT302, a config or weights file that
            is damaged, truncated or holds anything but weights.

    Example:
        >>> read_adapter("./sql-lora").ranks  # doctest: +SKIP
        (16,)
    """
    if isinstance(source, AdapterHeader):
        return source
    folder = _local(source)
    name = str(source)
    config_file = _config_file(folder, name)
    config = _read_config(config_file)
    file = _weights_file(folder, name)
    if file.name == SAFETENSORS_FILE:
        tensors = _read_header(file)
    else:
        tensors = {
            key: AdapterTensor(key, str(one.dtype).removeprefix("torch."), tuple(one.shape))
            for key, one in _read_pickle(file).items()
        }
    if not tensors:
        raise AdapterFault("TT301", f"{file} holds no tensors")
    return AdapterHeader(name, config_file.parent, file, config, tensors)


def read_config(source: str | Path) -> dict[str, Any]:
    """An adapter's config alone; it needs no weights.

    Raises:
        AdapterFault: TT301, TT302.
    """
    return _read_config(_config_file(_local(source), str(source)))


def load_tensors(header: AdapterHeader) -> dict[str, torch.Tensor]:
    """The adapter's tensors by key, as in the file, on the CPU.

    Raises:
        AdapterFault: TT302, the file has changed or is damaged, or holds NaN or infinite values.
    """
    import safetensors
    import safetensors.torch
    import torch

    try:
        if header.file.name == SAFETENSORS_FILE:
            tensors = safetensors.torch.load_file(header.file)
        else:
            tensors = _read_pickle(header.file)
    except (safetensors.SafetensorError, OSError) as exc:
        raise _damaged(header.file, str(exc)) from exc
    broken = [key for key, one in tensors.items() if not torch.isfinite(one.float()).all()]
    if broken:
        raise AdapterFault(
            "TT302",
            f"{broken[0]} of {header.source} is not finite"
            + (f", nor are {len(broken) - 1} more of its tensors" if len(broken) > 1 else ""),
            why="the training diverged, or the file was damaged",
            fix="take an earlier checkpoint of the adapter, or copy it again",
        )
    return tensors


def _names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def _damaged(file: Path, why: str) -> AdapterFault:
    return AdapterFault("TT302", f"{file} is damaged", why=why, fix="copy or download it again")


def _local(source: str | Path) -> Path | None:
    """The folder that `source` names, None for a hub name."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    text = str(source)
    if folder.is_file():
        raise AdapterFault("TT301", f"{text} is a file", fix="name the folder it lies in")
    if isinstance(source, Path) or folder.is_absolute() or text.startswith((".", "~")):
        raise AdapterFault(
            "TT301", f"there is no folder {text}", fix="check the path; it is taken from here"
        )
    if text.count("/") > 1 or "\\" in text or not text:
        raise AdapterFault("TT301", f"{text!r} is neither a folder here nor a hub name")
    return None


def _from_hub(name: str, file: str) -> Path | None:
    """A file of a hub repository, from the cache if it is there; None if the hub has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file))
    except LocalEntryNotFoundError as exc:
        # Offline, a file that is not cached looks the same as one that does not exist.
        why = first_line(exc)
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        why = first_line(exc)
    raise AdapterFault(
        "TT301",
        f"{file} of {name} is neither in a local folder nor to be had from the hub",
        why=why,
        fix="check the name, or download the adapter and name its folder",
    )


def _config_file(folder: Path | None, name: str) -> Path:
    file = folder / CONFIG_FILE if folder else _from_hub(name, CONFIG_FILE)
    if file is None or not file.is_file():
        raise AdapterFault(
            "TT301",
            f"{name} has no {CONFIG_FILE}",
            fix="name the folder that PEFT's save_pretrained wrote, or a hub name",
        )
    return file


def _weights_file(folder: Path | None, name: str) -> Path:
    missing: AdapterFault | None = None
    for file in (SAFETENSORS_FILE, PICKLE_FILE):
        try:
            found = folder / file if folder else _from_hub(name, file)
        except AdapterFault as fault:
            missing = missing or fault
            continue
        if found is not None and found.is_file():
            return found
    raise AdapterFault(
        "TT301",
        f"{name} has {CONFIG_FILE} but no weights: neither {SAFETENSORS_FILE} nor {PICKLE_FILE}",
        why=missing.why if missing else "",
        fix="save or download the adapter again, weights included",
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as exc:
        raise _damaged(file, str(exc)) from exc
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise _damaged(file, "it names no peft_type")
    if wrong := problem(config):
        raise _damaged(file, wrong)
    return config


def _read_header(file: Path) -> dict[str, AdapterTensor]:
    """The tensors of a safetensors file, checked against its size on disk."""
    try:
        entries, _ = read_header(file)
    except DamagedFile as problem:
        raise _damaged(file, str(problem)) from problem
    odd = next((one for one in entries if one.stored not in DTYPES), None)
    if odd is not None:
        raise _damaged(file, f"{odd.name} has the unknown dtype {odd.stored}")
    return {one.name: AdapterTensor(one.name, one.dtype, one.shape) for one in entries}


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """The weights of a pickle, read by torch's loader that runs no code."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd about the file is said below
            weights = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise AdapterFault(
            "TT302",
            f"{file} is a pickle that holds more than weights; it was not loaded",
            why="loading it would run code from the file",
            fix="ask its author for adapter_model.safetensors",
        ) from exc
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as exc:
        raise _damaged(file, first_line(exc)) from exc
    if not isinstance(weights, dict) or not all(
        isinstance(key, str) and isinstance(one, torch.Tensor) for key, one in weights.items()
    ):
        raise _damaged(file, "it is not a mapping of names to tensors")
    return weights
