"""Measures the memory of tensors on a CPU; `from alive import ...`."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at a time, of those that an operation touched."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, out)):
            if isinstance(one, torch.Tensor) and not one.is_meta:
                storage = one.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return out
