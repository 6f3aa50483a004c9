"""A placed model: what runs, its adapters, and what frees it all when it is closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from trimtab.adapters import AdapterHeader, adapter_bytes, read_adapter
from trimtab.apply import fit_model, load_onto, remove
from trimtab.decode import Steps
from trimtab.errors import AdapterFault, PlacementFault, RunningFault
from trimtab.loading import out_of_gpu_memory
from trimtab.merging import allow_merging, refuse_merging
from trimtab.park import Gate
from trimtab.plan import Plan
from trimtab.prompts import Prompts
from trimtab.proof import Applied
from trimtab.report import Report, measure
from trimtab.rooms import Rooms
from trimtab.saving import Saved, Weights, save
from trimtab.shelf import Shelf
from trimtab.swapping import Swap
from trimtab.switching import Switch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Progress = Callable[[str], None]


@dataclass
class Ran:
    """What an answer came to: its tokens."""

    tokens: int = 0


class Placement:
    """A model that runs where its plan says; use it in a `with`, or close it.

    `model` is a `peft.PeftModel` as soon as there is an adapter, the transformers model before;
    `generate`, `set_adapter`, `disable_adapter` and the like work on it as on a resident model.
    `applied` says for each adapter what it changed. `steps` are its decode steps: on a GPU they are
    CUDA graphs where they can be, and `steps.refusals` says why they are not.

    Example:
        >>> with trimtab.load("./model", adapters={"sql": "./sql-lora"}, quant="nf4",
        ...                   gpu="6GiB", cpu="20GiB") as placed:
        ...     placed.generate("How many users?", adapter="sql")
    """

    def __init__(
        self,
        plan: Plan,
        model: PreTrainedModel,
        rooms: Rooms,
        gate: Gate,
        steps: Steps,
        switch: Switch,
        shelf: Shelf,
        source: Path | str,
        shutdown: contextlib.ExitStack,
    ) -> None:
        self.plan = plan
        self.model: Any = model
        self.applied: dict[str, Applied] = {}
        self._rooms = rooms
        self._gate = gate
        self.steps = steps
        self._switch, self.shelf = switch, shelf
        # Which adapter is active is one thread's at a time; its calls may be made by others.
        self._choosing = threading.RLock()
        self._prompts = Prompts(source)
        self._shutdown = shutdown
        self._pace: float | None = None
        self._modules = dict(model.named_modules())  # the base's names, before PEFT changes them

    @property
    def device(self) -> torch.device:
        """The device that runs."""
        return self._rooms.device

    @property
    def closed(self) -> bool:
        return self._gate.closed

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded, those that PEFT's own methods made too."""
        model = self._switch.model
        return () if model is None else tuple(model.peft_config)

    @property
    def tokenizer(self) -> Any:
        return self._prompts.tokenizer

    @torch.inference_mode(False)  # what is made inside one cannot be written to outside
    def add_adapter(
        self,
        name: str,
        source: str | Path | AdapterHeader,
        *,
        allow_unused: bool = False,
        allow_other_base: bool = False,
    ) -> Applied:
        """Loads an adapter under `name` and proves that every tensor of its file is used.

        Raises:
            AdapterFault: TT3nn; the model is left as it was.
        """
        self._check_open()
        if name in self.adapters:
            raise AdapterFault(
                "TT311",
                f"an adapter named {name!r} is loaded already",
                fix="give another name, or remove_adapter first",
            )
        header = read_adapter(source)
        # No call may run meanwhile: a LoRA is put on with the others out of sight.
        with self._gate.passing():
            self.shelf.make_room(adapter_bytes(header))
            model, applied = load_onto(
                self.model,
                header,
                name,
                base_name=self.plan.model,
                allow_unused=allow_unused,
                allow_other_base=allow_other_base,
            )
            try:
                self.model = model
                refuse_merging(model)
                self._switch.take_over(model)
                self.shelf.take_over()
                self.applied[name] = applied
            except BaseException:
                self._take_off(name, model)
                raise
        return applied

    def swap_adapter(
        self,
        name: str,
        source: str | Path | AdapterHeader,
        *,
        allow_unused: bool = False,
        allow_other_base: bool = False,
    ) -> Applied:
        """Puts another adapter's weights into the place of the loaded adapter `name`.

        No layer is made, and captured decode steps stay right. The ranks of a LoRA may differ: a
        smaller one is padded with zeros, which may round sums otherwise than the adapter loaded
        fresh; with a larger one, or another scaling, steps are captured again.

        Raises:
            AdapterFault: TT311, there is none of that name; TT321, it cannot take that place, and
                TT3nn as for `add_adapter`. The loaded adapter is then as it was.
        """
        self._check_adapter(name)
        header = read_adapter(source)
        with self._gate.passing():
            decided = fit_model(
                self.model,
                header,
                base_name=self.plan.model,
                allow_unused=allow_unused,
                allow_other_base=allow_other_base,
            )
            swap = Swap(self.model, decided, name)
            self.shelf.make_room(swap.growth, keep=(name,))
            if not swap.keeps_steps:
                self.steps.forget_adapter(name)
            try:
                applied = self.applied[name] = swap.carry_out()
            finally:
                self.shelf.measure(name)
        return applied

    def remove_adapter(self, name: str) -> None:
        """Unloads an adapter; without any, `model` is the base again.

        Raises:
            AdapterFault: TT311, if there is none of that name.
        """
        self._check_adapter(name)
        with self._gate.passing():
            self._take_off(name, self.model)

    def _take_off(self, name: str, model: Any) -> None:
        self.steps.forget_adapter(name)
        self.model = remove(model, name)
        self.applied.pop(name, None)
        if self.model is not self._switch.model:
            self._switch.let_go()
        self.shelf.look()

    @contextlib.contextmanager
    def using(self, adapter: str | EllipsisType | None = ...) -> Iterator[Any]:
        """The model with that adapter active, `None` for the base, `...` for whatever is active.

        What was active before is active again afterwards. Another thread that asks for an adapter,
        or for the base, waits until then; one that takes what is active does not.
        """
        self._check_open()
        if adapter is ... or not self.adapters:
            if isinstance(adapter, str):
                self._check_adapter(adapter)
            yield self.model
            return
        with self._choosing:
            self._check_open()
            with self._switch.off() if adapter is None else self._chosen(adapter):
                yield self.model

    @contextlib.contextmanager
    def _chosen(self, adapter: str) -> Iterator[None]:
        self._check_adapter(adapter)
        before = list(self.model.active_adapters)
        try:
            self._switch.choose(adapter)
            yield
        finally:
            if not self.closed and all(one in self.adapters for one in before):
                self._switch.choose(before)

    def generate(
        self,
        messages: str | list[dict[str, Any]],
        *,
        adapter: str | EllipsisType | None = ...,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> str:
        """The answer to a text or to chat messages, as text: of several sequences, the first.

        Args:
            messages: a text (one user message, where the model has a chat template), or messages
                as `[{"role": "user", "content": ...}]`.
            adapter: a loaded adapter, `None` for the base, left out for the active one.
            max_new_tokens: the most tokens to add; by default what a `generation_config` among the
                options says, else 200.
            options: passed on to transformers' `generate`.

        Raises:
            RunningFault: TT606, if prompt and answer exceed the context that was planned.
            MemoryFault: TT404, if the GPU has less memory than the plan counts on.
        """
        inputs = self.encode(messages)
        config = options.get("generation_config")
        longest = max_new_tokens or getattr(config, "max_new_tokens", None) or 200
        self.check_length(inputs["input_ids"], longest)
        if options.get("stop_strings") or getattr(config, "stop_strings", None):
            options.setdefault("tokenizer", self.tokenizer)
        with self.using(adapter) as model, self.running() as ran:
            found = model.generate(**inputs, max_new_tokens=longest, **options)
            tokens = getattr(found, "sequences", found)
            fresh = tokens[0, inputs["input_ids"].shape[-1] :].cpu()
            ran.tokens = len(fresh)
        return str(self.tokenizer.decode(fresh, skip_special_tokens=True))

    @contextlib.contextmanager
    def running(self) -> Iterator[Ran]:
        """Around an answer: running out of GPU memory is said as TT404.

        `report` says the pace of the last answer whose tokens were put into what this yields.
        """
        ran, start = Ran(), time.perf_counter()
        try:
            yield ran
            self._pace = ran.tokens / (time.perf_counter() - start)
        except torch.OutOfMemoryError as error:
            said = f"{self.plan.runs} ran out of memory while {self.plan.model} was running"
            raise out_of_gpu_memory(said, error) from error

    def encode(self, messages: str | list[dict[str, Any]]) -> dict[str, Any]:
        """Model inputs on the device that runs, `input_ids` of shape [1, tokens] among them.

        Raises:
            RunningFault: TT607, if the messages hold images or sound and there is no processor.
        """
        return self._prompts.encode(messages, self.device)

    def check_length(self, input_ids: torch.Tensor, max_new_tokens: int) -> None:
        """Raises TT606 if a prompt of [batch, tokens] and its answer exceed the planned context."""
        asked = input_ids.shape[-1] + max_new_tokens
        if asked > self.plan.context:
            raise RunningFault(
                "TT606",
                f"{input_ids.shape[-1]} tokens of prompt and {max_new_tokens} of answer are "
                f"{asked - self.plan.context} more than the planned context of {self.plan.context}",
                fix=f"plan with a context of {asked}, or ask for fewer tokens",
            )

    def report(self) -> Report:
        """Planned against measured bytes for each tier, and what the adapters changed."""
        self._check_open()
        applied = {name: one for name, one in self.applied.items() if name in self.adapters}
        return measure(self.plan, self.model, self._rooms, applied, self._pace, self.shelf)

    def read_gbps(self) -> float:
        """Bandwidth at which the streamed units come now, in 1e9 bytes a second: each once."""
        self._check_open()
        return self._rooms.read_gbps()

    def save_quantized(self, folder: str | Path, *, progress: Progress | None = None) -> Saved:
        """Writes the base as it is quantized, without adapters: a checkpoint for transformers too.

        `progress` is called with the name of each file when it is written.

        Raises:
            FormatFault: TT516, nothing is quantized, or `folder` is there already.
            TrimtabError: TT105, TT205, TT403, TT514: what it says; nothing is left behind.
        """
        self._check_open()
        with self._gate.passing():
            weights = Weights(self._modules, self._gate.units, self._rooms)
            return save(folder, self.plan, weights, progress=progress)

    def close(self) -> None:
        """Frees all that the placement holds: weights, slabs, slots, files.

        The model that was had from it is of no use afterwards. Closing twice does nothing.
        """
        with contextlib.ExitStack() as last:
            # Each is done, whatever becomes of those before it.
            last.callback(self._modules.clear)
            last.callback(self._switch.let_go)
            last.callback(self._let_go)
            last.callback(self._shutdown.close)
            last.callback(self.steps.clear)
            last.callback(self._gate.close)

    def _let_go(self) -> None:
        model, self.model = self.model, None
        if model is not None:
            allow_merging(model)

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._gate.closed:
            raise PlacementFault("TT208", f"the placement of {self.plan.model} is closed")

    def _check_adapter(self, name: str) -> None:
        self._check_open()
        if name not in self.adapters:
            loaded = ", ".join(self.adapters) or "none"
            raise AdapterFault("TT311", f"no adapter named {name!r} is loaded; loaded: {loaded}")
