"""Parking: the one file that touches the insides of modules.

A parked unit's weights are guarded stand-ins. When its module's forward is called they are bound
to the bytes that a carrier brings, and parked again when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from trimtab import foreign
from trimtab.errors import PlacementFault, RunningFault
from trimtab.formats import Format
from trimtab.formats.base import Share
from trimtab.guard import (
    Source,
    data_of,
    guard_class,
    guarded_tensor,
    is_guarded,
    plain_class,
    stand_in,
)

Joined = Mapping[str, Any]
"""What each weight of a unit, by name, is bound to."""


class Carrier(Protocol):
    """Brings a unit's weights to the device that runs, and takes them away again."""

    def take(self) -> tuple[Joined, Any]:
        """The joined weights, and a claim on the memory that they lie in."""

    def give(self, claim: Any) -> None:
        """The unit has run: the memory of `claim` is free."""

    def forget(self) -> None:
        """What was taken is free, though nobody has its claim: `take` did not end."""


class _NoCarrier:
    """The carrier of a unit whose placement is closed; nothing reaches it through the gate."""

    def take(self) -> tuple[Joined, Any]:
        raise PlacementFault("TT208", "the placement of this unit is closed")

    def give(self, claim: Any) -> None:
        pass

    def forget(self) -> None:
        pass


class ParkedWeight:
    """A parameter whose bytes rest in a store.

    Args:
        name: full name of the parameter in the model.
        storage: its format.
        recipe: what `storage.split` returned beside the tensors.
        parameter: the parameter itself; it stays the same object for good.
        owner: the module and attribute that hold it; `owners` gets more if it is tied.
        read: private copies of its plain tensors, or of the one that is named.
        device: the device that runs.
        parts: shape and dtype of each plain tensor, the parameter's data first.
        share: gives one copy of what is equal: the elements of stand-ins.
    """

    def __init__(
        self,
        name: str,
        storage: Format,
        recipe: Any,
        parameter: torch.nn.Parameter,
        owner: tuple[torch.nn.Module, str],
        read: Callable[..., dict[str, torch.Tensor]],
        device: torch.device,
        parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        share: Share | None = None,
    ) -> None:
        self.name = name
        self.storage = storage
        self.recipe = recipe
        self.parameter = parameter
        self.owners = [owner]
        source = Source(name, storage, recipe, read, next(iter(parts)))
        self._plain = plain_class(type(parameter))
        self._guard = guard_class(self._plain)
        self._guards = {
            key: guarded_tensor(source.of_part(key), stand_in(shape, dtype, device, share))
            for key, (shape, dtype) in parts.items()
        }
        source.guards = self._guards
        self._bare = stand_in(*next(iter(parts.values())), device, share)
        parameter._trim_source = source  # type: ignore[attr-defined]

    def bind(self, joined: Any) -> None:
        """The weight computes from `joined`.

        Raises:
            RunningFault: TT602, if somebody has put another parameter in its place.
        """
        self._check_owners(None)
        if type(self.parameter) is not self._guard:
            raise self._replaced()
        # bitsandbytes' classes look at each read and write of .data; this one does not.
        self.parameter.__class__ = torch.nn.Parameter
        self.storage.bind(self.owners[0][0], self.parameter, joined)
        self.parameter.__class__ = self._plain

    def park(self, joined: Any = None) -> None:
        """The weight is a stand-in again; a copy of it that took its place is put back out."""
        replaced = None
        try:
            self._check_owners(joined)
        except RunningFault as fault:
            replaced = fault
        self.settle()
        if replaced is not None:
            raise replaced

    def settle(self) -> None:
        """Makes the parameter a guarded stand-in, whatever it is now."""
        # Under the guard, .data may not be set.
        self.parameter.__class__ = torch.nn.Parameter
        self.storage.release(self.owners[0][0], self.parameter, self._bare, self._guards)
        self.parameter.__class__ = self._guard

    def _check_owners(self, joined: Any) -> None:
        for module, attribute in self.owners:
            present = module._parameters.get(attribute)
            if present is self.parameter:
                continue
            if (
                joined is not None
                and present is not None
                and not is_guarded(present)
                and present.data_ptr() == data_of(joined).data_ptr()
            ):
                # PEFT on a CPU replaces a weight by itself, wrapped anew (`weight.to(device)`).
                module._parameters[attribute] = self.parameter
                continue
            raise self._replaced()

    def _replaced(self) -> RunningFault:
        return RunningFault(
            "TT602",
            f"{self.name} is parked, and another parameter was put in its place",
            why="the new parameter would never be streamed, and the old one never be used",
            fix="change weights before loading, or keep the unit resident",
            weight=self.name,
        )


class ParkedUnit:
    """A unit's parked weights and the carrier that brings them; entered and left by depth."""

    def __init__(self, name: str, weights: Sequence[ParkedWeight], carrier: Carrier) -> None:
        self.name = name
        self.weights = weights
        self._carrier: Carrier = carrier
        self._depth = 0
        self._joined: Joined = {}
        self._claim: Any = None
        # Set before the first weight is touched and cleared after the last: what stands between
        # is what an interrupt, which may come at any line, leaves to `heal`.
        self._touched = False

    def enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            if self._touched:
                self._park()
            self._touched = True
            self._joined, self._claim = self._carrier.take()
            for weight in self.weights:
                weight.bind(self._joined[weight.name])

    def leave(self) -> None:
        # An interrupt may have come before `enter` counted.
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._park()

    def heal(self) -> None:
        """Parks a unit that an interrupt left entered, or partly parked."""
        if self._touched:
            self._depth = 0
            self._park()

    def close(self) -> None:
        """Lets go of the weights and of what they could be bound to."""
        self._joined, self._claim, self._carrier, self.weights = {}, None, _NoCarrier(), ()

    def _park(self) -> None:
        fault: RunningFault | None = None
        for weight in self.weights:
            try:
                weight.park(self._joined.get(weight.name))
            except RunningFault as error:
                fault = fault or error
        claim, self._joined, self._claim = self._claim, {}, None
        if claim is None:
            self._carrier.forget()
        else:
            self._carrier.give(claim)
        self._touched = False
        if fault is not None:
            raise fault


class Gate:
    """One lock for all units of a placement; heals what an interrupted call left behind."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._lock = threading.RLock()
        self.units: list[ParkedUnit] = []
        self.closed = False

    @contextlib.contextmanager
    def passing(self) -> Any:
        """Around a call of the whole model.

        Raises:
            PlacementFault: TT208, if the placement was closed.
        """
        with self._lock:
            # Asked when it is our turn: whoever waited may have waited for the close.
            if self.closed:
                raise PlacementFault("TT208", "the placement of this model is closed")
            self.heal()
            try:
                yield
            except BaseException:
                foreign.drop_mixed_batch_hooks(self._root)
                raise

    @contextlib.contextmanager
    def through(self, unit: ParkedUnit) -> Any:
        """Around a call of one unit."""
        with self._lock:
            if self.closed:
                raise PlacementFault("TT208", f"the placement of {unit.name} is closed")
            try:
                unit.enter()
                yield
            finally:
                unit.leave()

    def heal(self) -> None:
        for unit in self.units:
            unit.heal()

    def close(self) -> None:
        """No call passes any more, and the model's weights are let go."""
        with self._lock:
            self.closed = True
            for unit in self.units:
                unit.close()
            self.units.clear()
            dissolve(self._root)


class Wrapped:
    """A method of a module with something around it; `remove` puts the module's own back.

    Args:
        module: the module.
        around: makes the context in which the method runs.
        method: the name of the method.
        whole: the module is the placed model itself: its inputs are moved to `device`, and it
            cannot be copied. Else it is a unit, whose copies are plain modules with real weights,
            and whose outputs refuse gradients.
        through: what calls the method in its stead, with the method as its first argument.

    `around` makes the context for those who call a part of the module by itself.

    Raises:
        PlacementFault: TT209, if the method is replaced already.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        around: Callable[[], Any],
        *,
        method: str = "forward",
        whole: torch.device | None = None,
        through: Callable[..., Any] | None = None,
    ) -> None:
        if method in module.__dict__:
            raise PlacementFault(
                "TT209",
                f"the {method} of {type(module).__name__} is replaced already",
                why="accelerate's hooks, or another placement, hold it",
                fix="load the model fresh; for a model that accelerate placed use trimtab.attach",
            )
        self._module = module
        self.around = around
        # Dynamo must see neither guarded parameters nor their binding.
        self._eager = torch.compiler.disable(self._run)
        self._method = method
        self._whole = whole
        own = getattr(module, method)
        self._own = own if through is None else functools.partial(through, own)
        functools.update_wrapper(self, own)
        module.__dict__[method] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._eager(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._whole is not None:
            args, kwargs = moved(args, self._whole), moved(kwargs, self._whole)
        with self.around():
            out = self._own(*args, **kwargs)
        if self._whole is not None or not torch.is_grad_enabled():
            return out
        return refuse_gradients(out, type(self._module).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._module))
        if self._whole is not None or twin is None:
            raise RunningFault(
                "TT605",
                "a placed model cannot be copied",
                why="the copy's layers would bring in the weights of the original",
                fix="load the checkpoint a second time",
            )
        return types.MethodType(getattr(type(self._module), self._method), twin)

    def __reduce__(self) -> Any:
        raise RunningFault("TT605", "a placed model cannot be pickled")

    def remove(self) -> None:
        if self._module.__dict__.get(self._method) is self:
            del self._module.__dict__[self._method]


def is_leaf(one: Any) -> bool:
    """What inputs are not looked into: a cache, which may be known to torch as a container, too,
    and would be filled in a copy."""
    return not isinstance(one, dict | list | tuple)


def moved(inputs: Any, device: torch.device) -> Any:
    """Inputs with their tensors on `device`, wherever the caller had them."""
    return tree_map_only(torch.Tensor, lambda one: one.to(device), inputs, is_leaf=is_leaf)


def refuse_gradients(out: Any, name: str) -> Any:
    """`out`, its tensors made to raise when gradients reach them."""

    def refuse(_: torch.Tensor) -> None:
        raise RunningFault(
            "TT604",
            f"gradients reached the output of a streamed {name}",
            why="its weights are gone from the device when the backward pass runs",
            fix="use torch.no_grad(), or train on a model that is resident",
        )

    found = out.values() if isinstance(out, dict) else out
    for one in found if isinstance(found, tuple | list) or isinstance(out, dict) else (out,):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            one.register_hook(refuse)
    return out


def dissolve(model: torch.nn.Module) -> None:
    """Lets go of every weight of a model, whoever still holds the model itself."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update(dict.fromkeys(held))
        for state in ("quant_state", "state"):
            if state in module.__dict__:
                module.__dict__[state] = None
