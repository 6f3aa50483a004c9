"""Adapters within a cap of bytes: the least recently used ones rest in host memory."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trimtab import foreign_peft
from trimtab.errors import MemoryFault
from trimtab.formats import ALIGNMENT
from trimtab.memory import align, format_size
from trimtab.store import HostMemory, Span
from trimtab.switching import Switch


class Weights:
    """The weights of one adapter, which lie on the device that runs or in host memory.

    They stay PEFT's parameters, and real: only their bytes move, all of them in one copy. An
    adapter that has rested keeps its place in host memory.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.rests = False
        self._device = device
        self._host: HostMemory | None = None
        self._here: torch.Tensor | None = None
        self.measure()

    def measure(self) -> None:
        """Takes note of sizes that have changed."""
        self.spans, self.nbytes = [], 0
        for one in self.parameters:
            self.spans.append(Span(self.nbytes, tuple(one.shape), one.dtype))
            self.nbytes += align(one.nbytes, ALIGNMENT)

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.buffer.numel()

    def rest(self) -> None:
        """The bytes go to host memory; those on the device are free."""
        if self.host_bytes != self.nbytes:
            self.close()
            self._host = HostMemory(self.nbytes, pin=self._device.type == "cuda")
        assert self._host is not None
        # Before it is true: after an interrupt some lie here and some there, and all must come.
        self.rests = True
        self._lay_into(self._host.buffer, self._here)
        self._here = None

    def come(self) -> None:
        """The bytes are on the device again, at other addresses than before."""
        assert self._host is not None
        self._here = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._lay_into(self._here, self._host.buffer)
        self.rests = False

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None

    def _lay_into(self, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Copies the bytes to `target`; at once, if they lie in `source` as they will there."""
        placed = list(zip(self.parameters, self.spans, strict=True))
        whole = (
            source is not None
            and source.numel() == target.numel()
            and all(one.data_ptr() == source.data_ptr() + span.offset for one, span in placed)
        )
        if whole:
            assert source is not None
            target.copy_(source, non_blocking=True)
        for one, span in placed:
            view = span.view(target)
            if not whole:
                view.copy_(one.detach(), non_blocking=True)
            one.data = view
        if self._device.type == "cuda" and target.device.type == "cpu":
            # What is read there is there: by a user, or by the copy back, on any stream.
            torch.cuda.current_stream(self._device).synchronize()


class Shelf:
    """Keeps a placement's adapters within `cap` bytes of the device that runs.

    What a call needs comes back before it, to the last bit as it was, and the least recently used
    others leave for it. An adapter that is larger than the cap is there alone.

    Args:
        switch: knows the model and its layers.
        device: the device that runs.
        cap: bytes; None: all adapters stay.
        forget: called with an adapter's name when its weights have left their addresses.
    """

    def __init__(
        self,
        switch: Switch,
        device: torch.device,
        cap: int | None,
        forget: Callable[[str], None],
    ) -> None:
        self.cap = cap
        self.peak = 0
        self._switch = switch
        self._device = device
        self._forget = forget
        self._held: OrderedDict[str, Weights] = OrderedDict()  # the least recently used first
        self._configs: dict[str, Any] = {}

    @property
    def here(self) -> int:
        """Bytes of adapters on the device that runs."""
        return sum(one.nbytes for one in self._held.values() if not one.rests)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that adapters have or had a place in."""
        return sum(one.host_bytes for one in self._held.values())

    @property
    def resting(self) -> tuple[str, ...]:
        """Names of the adapters that rest in host memory, the least recently used first."""
        return tuple(name for name, one in self._held.items() if one.rests)

    @torch.inference_mode(False)  # what is made inside one cannot be written to outside
    def make_room(self, nbytes: int, keep: Iterable[str] = ()) -> None:
        """Before an adapter of `nbytes` is loaded: others than `keep` leave until it has room."""
        if self.cap is not None:
            self.look()
            self._clear(self.cap - nbytes, keep)

    @torch.inference_mode(False)
    def admit(self, names: Iterable[str] | None = None) -> None:
        """Before a call: the adapters that it applies, or those named, are on the device.

        Raises:
            MemoryFault: TT406, they are several, and together larger than the cap.
        """
        if self.cap is None or self._switch.model is None:
            return
        self.look()
        if names is None:
            names = foreign_peft.needed_adapters(self._switch.layers())
        chosen = set(names)
        wanted = [name for name in self._held if name in chosen]
        needed = sum(self._held[name].nbytes for name in wanted)
        if len(wanted) > 1 and needed > self.cap:
            raise MemoryFault(
                "TT406",
                f"{len(wanted)} adapters are needed at once, {', '.join(wanted)}: together"
                f" {format_size(needed)}, and the adapter memory is {format_size(self.cap)}",
                fix="plan with a larger adapter_memory, or use fewer of them in one call",
                needed=needed,
            )
        coming = [one for name in wanted if (one := self._held[name]).rests]
        self._clear(self.cap - sum(one.nbytes for one in coming), keep=wanted)
        for one in coming:
            one.come()
        for name in wanted:
            self._held.move_to_end(name)
        self.peak = max(self.peak, self.here)

    @contextlib.contextmanager
    def serving(self, passing: Callable[[], Any]) -> Iterator[None]:
        """Around a call of the whole model, which is `passing`: what it applies is there."""
        with passing():
            self.admit()
            yield

    def measure(self, name: str) -> None:
        """An adapter's weights were changed where they are, and may have grown."""
        self.look()
        self._held[name].measure()

    def take_over(self) -> None:
        """From now on adapters come back to be combined; call it for each that is loaded."""
        tuner = getattr(self._switch.model, "base_model", None)
        own = getattr(type(tuner), "add_weighted_adapter", None)
        if self.cap is not None and own is not None:
            vars(tuner)["add_weighted_adapter"] = functools.partial(self._weighted, tuner, own)
        self.look()

    def close(self) -> None:
        for one in self._held.values():
            one.close()
        self._held.clear()
        self._configs.clear()

    def _weighted(
        self, tuner: Any, own: Any, adapters: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        self.admit(adapters)
        return own(tuner, adapters, *args, **kwargs)

    def look(self) -> None:
        """Finds adapters that came or went, whichever way they did."""
        model = self._switch.model
        configs = {} if model is None else model.peft_config
        for name in [one for one in self._held if configs.get(one) is not self._configs.get(one)]:
            self._held.pop(name).close()
            self._configs.pop(name, None)
        for name, config in configs.items():
            if name not in self._held:
                weights = foreign_peft.adapter_weights(self._switch.layers(), name)
                self._held[name] = Weights(weights, self._device)
                self._configs[name] = config
        self.peak = max(self.peak, self.here)

    def _clear(self, room: int, keep: Iterable[str]) -> None:
        """The least recently used leave until what is here is no more than `room` bytes."""
        kept = set(keep)
        for name, one in self._held.items():
            if self.here <= room:
                return
            if not one.rests and name not in kept:
                try:
                    one.rest()
                finally:
                    self._forget(name)
