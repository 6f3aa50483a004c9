"""The names that users give to storage formats, and what they mean to transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab.errors import EnvironmentFault, FormatFault

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

FOUR_BIT = ("nf4", "nf4-dq", "fp4", "fp4-dq")
QUANTS = (*FOUR_BIT, "int8", "none")


def resolve_quant(quant: str, stored: Mapping[str, Any] | None) -> str:
    """The format of the linears: the one asked for, or for `auto` the checkpoint's own.

    Args:
        quant: one of `QUANTS`, or `auto`.
        stored: the checkpoint's `quantization_config`, None for one in 16 or 32 bits.

    Raises:
        FormatFault: TT509, an unknown format, or another one than the checkpoint is stored in.
    """
    if quant not in (*QUANTS, "auto"):
        raise FormatFault(
            "TT509",
            f"the storage format {quant!r} is not supported",
            fix=f"one of {', '.join(QUANTS)}, auto",
        )
    if stored is None:
        return "none" if quant == "auto" else quant
    own = _stored_format(stored)
    if quant not in ("auto", own):
        raise FormatFault(
            "TT509",
            f"the checkpoint is stored in {own}, and cannot be loaded as {quant}",
            why="quantizing again would round twice, and what was rounded off is gone",
            fix=f"ask for auto or {own}, or start from a 16-bit checkpoint of the model",
        )
    return own


def part_names(name: str, quant: str) -> list[str]:
    """The keys that each weight stored in the format `quant` has, the packed bytes' first."""
    if quant == "int8":
        return [name, f"{name.removesuffix('weight')}SCB"]
    return [name, f"{name}.absmax", f"{name}.quant_map"]


def is_part(key: str) -> bool:
    """Whether a tensor of a stored checkpoint belongs to a quantized weight, by its key."""
    last = key.rpartition(".")[2]
    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format")
    return last in parts or ".quant_state." in key


def _stored_format(stored: Mapping[str, Any]) -> str:
    method = str(stored.get("quant_method", "bitsandbytes")).lower()
    if method.startswith("bitsandbytes"):
        if stored.get("load_in_8bit") or stored.get("_load_in_8bit"):
            return "int8"
        kind = str(stored.get("bnb_4bit_quant_type", "fp4"))
        name = kind + ("-dq" if stored.get("bnb_4bit_use_double_quant") else "")
        if name in FOUR_BIT and stored.get("bnb_4bit_quant_storage", "uint8") == "uint8":
            return name
        method = f"bitsandbytes {name} packed as {stored.get('bnb_4bit_quant_storage')}"
    raise FormatFault(
        "TT509",
        f"the checkpoint is stored in a format that is not supported: {method}",
        fix="use a 16-bit checkpoint of the model; trimtab quantizes while it loads",
    )


def quantization_config(quant: str, dtype: str) -> BitsAndBytesConfig | None:
    """What `from_pretrained` needs to quantize to this format; None for 16 and 32 bits.

    Args:
        quant: one of `QUANTS`.
        dtype: torch's name of the dtype that is computed in.

    Raises:
        EnvironmentFault: TT101, bitsandbytes is not installed.
        FormatFault: TT509, an unknown format.

    Example:
        >>> quantization_config("nf4-dq", "bfloat16").bnb_4bit_use_double_quant
        True
    """
    if resolve_quant(quant, None) == "none":
        return None
    require_bitsandbytes(quant)
    import torch
    from transformers import BitsAndBytesConfig

    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant.removesuffix("-dq"),
        bnb_4bit_use_double_quant=quant.endswith("-dq"),
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


QUANTIZED_FROM = "quantized_from"
"""The key in a saved `quantization_config` under which trimtab says so; transformers skips it."""


def quantized_from(stored: Mapping[str, Any] | None, dtype: str) -> str | None:
    """The dtype of the weights that the linears are quantized from, None where nobody knows.

    transformers casts to the `dtype` that it loads in before it quantizes. A checkpoint that is
    `stored` quantized does not say, but for those that trimtab saved.
    """
    if stored is None:
        return dtype
    found = stored.get(QUANTIZED_FROM)
    return found if isinstance(found, str) else None


def require_bitsandbytes(quant: str) -> None:
    """Raises TT101 with the line that installs it, if bitsandbytes is not there."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFault(
            "TT101",
            f"the format {quant} needs the package bitsandbytes, which is not installed",
            fix="pip install bitsandbytes",
        )
