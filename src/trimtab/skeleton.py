"""A model on the `meta` device, as the loader would make it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab import foreign
from trimtab.errors import EnvironmentFault, FormatFault
from trimtab.quantize import (
    is_part,
    quantization_config,
    quantized_from,
    require_bitsandbytes,
    resolve_quant,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from trimtab.checkpoint import Checkpoint


@dataclass(frozen=True)
class Skeleton:
    """The model on `meta`, its linears swapped for those of `quant`; `dtype` is torch's name.

    `quantized_from` names the dtype that its linears were or will be quantized from, if known.
    """

    model: PreTrainedModel
    quant: str
    dtype: str
    quantized_from: str | None = None
    stored: bool = False


def build_skeleton(checkpoint: Checkpoint, quant: str, dtype: str) -> Skeleton:
    """Builds the model of a checkpoint on `meta`; arguments and errors as of `build_outline`."""
    stored = checkpoint.quantization
    resolved = resolve_quant(quant, stored)
    model_class = model_class_of(checkpoint)
    config = config_of(checkpoint, model_class)
    name = _dtype_of(checkpoint, config, dtype)
    if stored is not None:
        name = _stored_dtype(checkpoint, name, asked=dtype)
    torch_dtype: torch.dtype = getattr(torch, name)
    _set_dtype(config, torch_dtype)
    if resolved != "none":
        require_bitsandbytes(resolved)
    try:
        model = foreign.skeleton(model_class, config, torch_dtype)
        if resolved != "none":
            how = dict(stored) if stored else quantization_config(resolved, name)
            foreign.convert_to_quantized(model, how, stored=stored is not None, dtype=torch_dtype)
    except Exception as problem:
        raise _not_understood(checkpoint, problem) from problem
    return Skeleton(model, resolved, name, quantized_from(stored, name), stored is not None)


def model_class_of(checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """The class of transformers that the config names.

    Raises:
        EnvironmentFault: TT104, the class is not one of the installed transformers.
        FormatFault: TT510, the config names none.
    """
    import transformers

    named = checkpoint.config.get("architectures")
    if not isinstance(named, list) or not named:
        raise FormatFault(
            "TT510",
            f"the config of {checkpoint.source} does not say which class the model is of",
            fix='add its class to config.json, such as "architectures": ["LlamaForCausalLM"]',
        )
    found: type[PreTrainedModel] | None = getattr(transformers, str(named[0]), None)
    if found is None:
        own = "auto_map" in checkpoint.config
        raise EnvironmentFault(
            "TT104",
            f"{checkpoint.source} is a {named[0]}, which transformers {transformers.__version__} "
            "does not have",
            why="its code lies in the model's own repository, and trimtab runs no such code"
            if own
            else "a newer transformers may have it",
            fix="use a checkpoint of a class that transformers has"
            if own
            else "pip install -U transformers",
        )
    return found


def config_of(checkpoint: Checkpoint, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """The checkpoint's config, as transformers reads it.

    Raises:
        EnvironmentFault: TT101, it needs a package that is not installed.
        FormatFault: TT510, transformers cannot read it.
    """
    kind: Any = model_class.config_class
    try:
        config: PreTrainedConfig = kind.from_dict(foreign.decoded_floats(checkpoint.config))
    except Exception as problem:
        raise _not_understood(checkpoint, problem) from problem
    return config


def _not_understood(checkpoint: Checkpoint, problem: Exception) -> FormatFault | EnvironmentFault:
    import transformers

    if isinstance(problem, ImportError):
        line = re.search(r"pip install [\w.-]+", str(problem))
        return EnvironmentFault(
            "TT101",
            f"the model of {checkpoint.source} needs a package that is not installed: "
            f"{' '.join(str(problem).split())}",
            fix=line[0] if line else "install it",
        )
    return FormatFault(
        "TT510",
        f"transformers {transformers.__version__} cannot build the model of "
        f"{checkpoint.source}: {type(problem).__name__}: {problem}",
        why="the config was written by transformers "
        f"{checkpoint.config.get('transformers_version', 'of an unknown version')}, or is wrong",
        fix="pip install -U transformers",
    )


def _dtype_of(checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str) -> str:
    if dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise FormatFault(
                "TT509",
                f"{dtype!r} is not a dtype",
                fix="one of bfloat16, float16, float32, auto",
            )
        return dtype
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.")
    floating = (one.dtype for one in checkpoint.tensors.values() if "float" in one.dtype)
    return next(floating, "bfloat16")


def _stored_dtype(checkpoint: Checkpoint, name: str, asked: str) -> str:
    """The dtype that most of a stored quantized checkpoint's plain tensors have.

    They are loaded as they are: transformers 5.24 casts none of them, whatever the config says.
    """
    held: Counter[str] = Counter()
    for key, tensor in checkpoint.tensors.items():
        if "float" in tensor.dtype and not is_part(key):
            held[tensor.dtype] += tensor.nbytes
    if not held:
        return name
    ((own, _),) = held.most_common(1)
    if asked not in ("auto", own):
        raise FormatFault(
            "TT509",
            f"{checkpoint.source} is stored quantized, its other weights in {own}, and cannot be "
            f"loaded as {asked}",
            why="what is stored quantized is loaded with the dtypes that it has",
            fix=f"ask for auto or {own}, or start from a 16-bit checkpoint of the model",
        )
    return own


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """As the loader does, in the sub-configs too: some layers take their dtype from there."""
    config.dtype = dtype
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            inner.dtype = dtype
