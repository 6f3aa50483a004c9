"""A checkpoint opened for a merge, without the files it writes; `from unmerged import opened`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trimtab import foreign
from trimtab.adapted import shapes_of
from trimtab.adapters import load_tensors, read_adapter
from trimtab.changes import Changes
from trimtab.checkpoint import Checkpoint, open_checkpoint
from trimtab.deltas import Delta
from trimtab.fit import fit
from trimtab.keys import Keys
from trimtab.skeleton import build_skeleton


@dataclass
class Opened:
    """A base: its tensors by key, its skeleton, and where its tensors belong."""

    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]
    model: Any
    keys: Keys

    def read(self, key: str) -> torch.Tensor:
        return self.tensors[key].clone()

    def delta(self, folder: Path, weight: float = 1.0) -> Delta:
        header = read_adapter(folder)
        ties = foreign.tied_names(self.model).items()
        decided = fit(header, shapes_of(self.model), self.checkpoint.source, ties=ties)
        return Delta(decided, load_tensors(header), weight)

    def changes(self, *deltas: Delta) -> Changes:
        return Changes(self.checkpoint, self.keys, self.model, deltas, self.read)


def opened(folder: Path) -> Opened:
    checkpoint = open_checkpoint(folder)
    model = build_skeleton(checkpoint, "none", "auto").model
    tensors = {
        k: v for one in sorted(folder.glob("*.safetensors")) for k, v in load_file(one).items()
    }
    return Opened(checkpoint, tensors, model, Keys(checkpoint, model))
