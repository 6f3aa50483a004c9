"""The hook under `from_pretrained`: each weight goes to its home as it arrives.

`torch.nn.modules.module.register_module_parameter_registration_hook` sees a loaded parameter,
quantized already, when the loader sets it; so there is never more than one on the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from trimtab import foreign
from trimtab.errors import FormatFault
from trimtab.formats import by_name
from trimtab.formats.base import Share
from trimtab.park import ParkedWeight
from trimtab.plan import WeightSpec
from trimtab.store import HostMemory, Slab


class Home(Protocol):
    """Where a weight goes when it has been loaded."""

    def receive(self, module: torch.nn.Module, attribute: str, weight: torch.nn.Parameter) -> None:
        """Takes the weight's bytes; the parameter object stays, its data changes."""


class ParkingHome:
    """A weight of a streamed or idle unit: its tensors go into the unit's slab."""

    def __init__(self, spec: WeightSpec, slab: Slab, device: torch.device, share: Share) -> None:
        self.spec = spec
        self._slab = slab
        self._device = device
        self._share = share
        self.parked: ParkedWeight | None = None

    def receive(self, module: torch.nn.Module, attribute: str, weight: torch.nn.Parameter) -> None:
        storage = by_name(self.spec.storage)
        try:
            tensors, recipe = storage.split(module, weight, self._share)
        except AttributeError as error:
            raise FormatFault(
                "TT508",
                f"{self.spec.name} was planned as {self.spec.storage} and loaded as a "
                f"{type(weight).__name__}",
                why=str(error),
                fix="make the plan again with the installed versions",
            ) from error
        except ValueError as error:
            raise FormatFault(
                "TT508",
                f"{self.spec.name} was planned as {self.spec.storage} and is stored as {error}",
                why="the quantization_config in config.json is not true of the file; or the blocks "
                "are not of 64 weights, which only resident weights may be",
                fix="correct bnb_4bit_quant_type and bnb_4bit_use_double_quant there, or quantize "
                "the model again from its 16-bit checkpoint",
            ) from error
        for key, tensor in tensors.items():
            self._slab.put(self.spec.name, key, tensor)
        self.parked = ParkedWeight(
            self.spec.name,
            storage,
            recipe,
            weight,
            (module, attribute),
            lambda key=None: self._slab.read(self.spec.name, self._device, key),
            self._device,
            {key: (tuple(one.shape), one.dtype) for key, one in tensors.items()},
            self._share,
        )
        self.parked.settle()


class TableHome:
    """A table that is looked up: a real tensor over bytes that do not move.

    On a GPU the bytes are pinned host memory that the GPU reads row by row; on a CPU a mapped file.
    """

    def __init__(self, spec: WeightSpec, resting: torch.Tensor, seen: torch.Tensor) -> None:
        self.spec = spec
        self._resting = resting
        self._seen = seen

    def receive(self, module: torch.nn.Module, attribute: str, weight: torch.nn.Parameter) -> None:
        if tuple(weight.shape) != self.spec.shape or weight.dtype != getattr(
            torch, self.spec.dtype
        ):
            raise FormatFault(
                "TT508",
                f"{self.spec.name} was planned as {list(self.spec.shape)} {self.spec.dtype} and "
                f"loaded as {list(weight.shape)} {weight.dtype}",
                fix="make the plan again",
            )
        self._resting.view(weight.dtype).view(weight.shape).copy_(weight.data)
        weight.data = self._seen.view(weight.dtype).view(weight.shape)


class Intake:
    """Sends loaded parameters of one model to their homes, on the thread that loads.

    Args:
        homes: by full name of the parameter.
        arrived: called with the name of each loaded parameter, for a progress display.
    """

    def __init__(
        self, homes: Mapping[str, Home], arrived: Callable[[str], None] | None = None
    ) -> None:
        self._homes = homes
        self._arrived = arrived
        self._thread = threading.get_ident()
        self._modules: dict[int, tuple[torch.nn.Module, str]] = {}
        self._seen: dict[int, torch.nn.Parameter] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While inside, this thread's `from_pretrained` sends weights to their homes."""
        hook = register_module_parameter_registration_hook(self._register)
        try:
            with foreign.watched_load(self._know):
                yield
        finally:
            hook.remove()
            self._modules.clear()
            self._seen.clear()

    def _know(self, model: torch.nn.Module) -> None:
        # The module is kept beside its name: an id alone could be reused.
        self._modules = {id(module): (module, name) for name, module in model.named_modules()}

    def _register(self, module: torch.nn.Module, attribute: str, weight: Any) -> None:
        if threading.get_ident() != self._thread or weight is None:
            return
        _, owner = self._modules.get(id(module), (None, None))
        if owner is None or not foreign.is_loaded(weight) or id(weight) in self._seen:
            return
        name = f"{owner}.{attribute}" if owner else attribute
        if self._arrived is not None:
            self._arrived(name)
        home = self._homes.get(name)
        if home is not None:
            self._seen[id(weight)] = weight
            with torch.no_grad():
                home.receive(module, attribute, weight)


class _PinnedView:
    """Pinned host memory as an array that CUDA can read (`__cuda_array_interface__`, version 3)."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (buffer.numel(),),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "version": 3,
        }


def seen_by_gpu(memory: HostMemory, device: torch.device) -> torch.Tensor:
    """A CUDA tensor over pinned host memory: reads go over the link, row by row."""
    return torch.as_tensor(_PinnedView(memory.buffer), device=device)
