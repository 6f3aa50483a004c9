"""What is tried, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Case(Enum):
    """A row of the matrix; the value is the name of its script."""

    WHOLE = "whole"
    SPLIT = "split"
    ADAPTER = "split-adapter"
    SAME_MAP = "split-adapter-same-map"
    TRIMTAB = "trimtab-load"

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES = {
    Case.WHOLE: "all on one device, with the adapter",
    Case.SPLIT: "split, no adapter",
    Case.ADAPTER: "split, with the adapter",
    Case.SAME_MAP: "split, with the adapter and the same map for PEFT",
    Case.TRIMTAB: "trimtab, with the adapter and the same map",
}

STORED = "as stored"
"""The format of a checkpoint that is quantized already: it has no double quantization to switch."""

_WORDS = {
    "none": "16 bits",
    "int8": "int8",
    "nf4": "NF4",
    "fp4": "FP4",
    "nf4-dq": "NF4, double quantization",
    "fp4-dq": "FP4, double quantization",
}


def words(quant: str) -> str:
    """A format for people."""
    return _WORDS.get(quant, quant)


@dataclass(frozen=True)
class Tiny:
    """A random model: arguments of its class's config, and of PEFT's config of its adapter.

    `tied`: its head is its table of embeddings.
    """

    config: Mapping[str, Any]
    adapter: Mapping[str, Any]
    tied: bool = False


@dataclass(frozen=True)
class Subject:
    """What is reproduced.

    `model` and `adapter` are hub names or folders (empty for a tiny one); `shown` is the model's
    name without folders. `model_class` is the name of its class in transformers, `dtype` torch's of
    the one computed in, `here` the device that runs; `quants` are the formats tried; `nbytes` the
    size of the checkpoint. `notes` say what was adapted.
    """

    shown: str
    model: str
    adapter: str
    model_class: str
    dtype: str
    here: int | str
    device_map: Mapping[str, Any]
    quants: tuple[str, ...]
    tiny: Tiny | None = None
    nbytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def on_disk(self) -> bool:
        return "disk" in self.device_map.values()

    @property
    def arguments(self) -> list[str]:
        """The folders that a script is called with; hub names are written into it."""
        return [] if self.tiny else [one for one in (self.model, self.adapter) if is_folder(one)]


def is_folder(name: str) -> bool:
    """Whether a resolved name is one of a folder here: those are absolute."""
    return Path(name).is_absolute()
