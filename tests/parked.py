"""A small model of parked layers, made by hand; `from parked import ...`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from quantized import Parked, park
from trimtab.guard import is_guarded
from trimtab.park import Gate, ParkedUnit, Wrapped
from trimtab.rooms import RingCarrier
from trimtab.stream import Ring


class Chain:
    """Units of one 64 x 64 linear each, streamed through a poisoned ring; `true` is its twin.

    Args:
        units: how many.
        slots: of the ring.
        name: the format.
    """

    def __init__(self, units: int = 5, slots: int = 3, name: str = "plain") -> None:
        self.layers: list[Parked] = [park(name, (64, 64), seed=i + 1) for i in range(units)]
        self.model = nn.Sequential(*(nn.Sequential(one.made.module) for one in self.layers))
        self.true = nn.Sequential(*(nn.Sequential(one.twin.module) for one in self.layers))
        self.ring = Ring([one.slab for one in self.layers], slots, torch.device("cpu"), poison=True)
        self.gate = Gate(self.model)
        self.wrapped: list[Wrapped] = []
        for number, layer in enumerate(self.layers):
            carrier = RingCarrier(self.ring, number, layer.slab, [layer.parked])
            unit = ParkedUnit(str(number), [layer.parked], carrier)
            self.gate.units.append(unit)
            around = functools.partial(self.gate.through, unit)
            self.wrapped.append(Wrapped(self.model[number], around))
        whole = Wrapped(self.model, self.gate.passing, whole=torch.device("cpu"))
        self.wrapped.append(whole)
        self.inputs = torch.arange(64.0).sin().to(self.layers[0].made.inputs.dtype)[None]

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.inputs)  # type: ignore[no-any-return]

    @functools.cached_property
    def wanted(self) -> torch.Tensor:
        with torch.no_grad():
            return self.true(self.inputs)  # type: ignore[no-any-return]

    def is_at_rest(self) -> bool:
        """Every weight is parked, where it was, and every slot is free."""
        return all(
            is_guarded(layer.weight) and layer.made.module.weight is layer.parked.parameter
            for layer in self.layers
        ) and not any(slot.busy for slot in self.ring.slots)

    def runs_right(self) -> bool:
        return torch.equal(self.run(), self.wanted) and self.is_at_rest()


def hook_that_raises(error: BaseException) -> Any:
    """A forward pre-hook that raises each time."""

    def hook(*_: Any) -> None:
        raise error

    return hook
