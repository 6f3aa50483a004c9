"""The decode step as one CUDA graph, its copies in it, for whoever calls the model with one token.

A step is captured when it repeats: the first call of a kind runs eagerly, the second is captured,
all further ones are replayed. A kind is: shapes of the inputs, active adapters, which sliding
windows are full, and what the ring's slots hold (the ring turns, so a model has up to as many
graphs as slots). Everything else runs eagerly, and `refusals` says why.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab import caches, foreign, foreign_generate, foreign_peft
from trimtab.activity import ActiveAdapters, applies
from trimtab.errors import chain, first_line
from trimtab.lora import Shortcuts
from trimtab.plan import STREAMED, Plan
from trimtab.replay import (
    CudaRecorder,
    Recorder,
    describe_inputs,
    is_tensor,
    private_output,
    with_leaves,
)
from trimtab.sampling import sample
from trimtab.stream import Ring

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trimtab.rooms import Rooms

GRAPHS = 24
"""Captured steps that are kept, least recently used first out: 12 adapters with 2 slots."""

SHORTEST = 256
"""Tokens of the smallest cache."""

WASTE = 4
"""A cache so many times larger than is asked for is used all the same: a new one costs captures."""


@dataclass
class Step:
    """A captured step: where its inputs lie, what it returns, what the ring holds after it."""

    inputs: list[torch.Tensor]
    output: Any
    replay: Callable[[], None]
    held: tuple[int | None, ...]
    configs: list[Any]
    """Those of the adapters: while they are held, no other has their identity."""


class Steps:
    """The captured decode steps of one placed model.

    Args:
        model: the transformers model.
        ring: its ring.
        recorder: what captures; None where nothing can be (a CPU runs, a unit rests on the disk or
            in memory that could not be pinned), for the reason `unable`.
        context: tokens that the placement's own static cache holds for each sequence.
        batch: the most sequences that it holds.
        shortcuts: what plain LoRAs are computed with in captured steps; None: PEFT's own way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ring: Ring,
        recorder: Recorder | None,
        unable: str,
        context: int,
        batch: int,
        shortcuts: Shortcuts | None = None,
    ) -> None:
        self._model = model
        self.shortcuts = shortcuts
        self._ring = ring
        self.recorder = recorder
        self._unable = unable
        self._context = context
        self._batch = batch
        self.cache: Any = None
        self._cached = (0, 0)
        """Sequences and tokens of the cache."""
        self._lay: dict[str, tuple[int, ...]] = {}
        """Where the weights of each adapter were in memory."""
        self._looked = False
        """Whether this answer has looked at where they are."""
        self._argument = caches.cache_argument(model)
        self._adapters = ActiveAdapters(model)
        self._steps: OrderedDict[Any, Step] = OrderedDict()
        self._met: set[Any] = set()
        self._generating = threading.Lock()
        self.refusals: Counter[str] = Counter()
        self.captured = 0
        self.replayed = 0
        self.shortened = 0
        """Layers of the last captured step whose LoRA took the shortcut."""

    # ------------------------------------------------------------------------------- generate

    def generate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with the placement's own cache where that can be had."""
        if self.recorder is None:
            self.refusals[self._unable or "nothing records"] += 1
            return own(*args, **kwargs)
        try:
            kwargs, config = foreign_generate.resolved(self._model, own, args, kwargs)
        except Exception:
            return own(*args, **kwargs)  # it says what is wrong with them
        why = self._no_cache(kwargs, config)
        if why or not self._generating.acquire(blocking=False):
            self.refusals[why or "another generate is using the cache"] += 1
            return own(**kwargs)
        try:
            self._looked = False
            given = prompt_of(kwargs)
            length = self._tokens(given.shape[1], kwargs, config)
            if not config.stop_strings and not config.token_healing:  # they want the tokenizer
                streamer = kwargs.get("streamer")
                kwargs["custom_generate"] = functools.partial(sample, streamer=streamer)
            # What is made inside an inference_mode block, the cache among it, could not be written
            # to outside.
            with torch.inference_mode(False), torch.no_grad():
                kwargs[self._argument] = self._fresh_cache(given.shape[0], length)
                return own(**kwargs)
        finally:
            self._generating.release()

    def _no_cache(self, kwargs: Mapping[str, Any], config: Any) -> str:
        given = prompt_of(kwargs)
        if not isinstance(given, torch.Tensor) or given.ndim != 2:
            return "generate was not given input_ids"
        if why := _asks_for_another(kwargs, config):
            return why
        if why := self._no_graph():
            return why
        length = self._tokens(given.shape[1], kwargs, config)
        if length > self._context or given.shape[0] > self._batch:
            return "the prompt and its answer are longer, or more, than planned"
        return ""

    def _no_graph(self) -> str:
        """What no captured step of the model would do as it is done eagerly."""
        if not foreign_generate.takes_static_cache(self._model):
            return "the model takes no static cache alone"
        if foreign_generate.prepares_inputs_elsewhere(self._model):
            return "the adapter adds tokens to the prompt"
        if foreign.has_adaption_prompt(self._model):
            return "the adapter takes the place of modules"
        if foreign.has_own_hooks(self._model):
            return "hooks of the program's want to see each token"
        if torch.is_autocast_enabled(self._model.device.type):
            return "autocast computes in other dtypes than the cache has"
        return ""

    def _tokens(self, prompt: int, kwargs: Mapping[str, Any], config: Any) -> int:
        """The most tokens that a prompt of so many and its answer may have, in any transformers.

        A length that is not asked for, but the model's or transformers' own, may be added to the
        prompt's.
        """
        if config.max_new_tokens is not None:
            return prompt + int(config.max_new_tokens)
        asked = kwargs.get("max_length")
        if asked is None:
            asked = getattr(kwargs.get("generation_config"), "max_length", None)
        return int(asked) if asked else prompt + int(config.max_length or 20)

    def _forget_moved(self) -> None:
        """Lets go of the captured steps of adapters whose weights were moved: by PEFT's hotswap."""
        for name, where in foreign_peft.adapter_memory(self._adapters.layers()).items():
            if self._lay.get(name, where) != where:
                self.forget_adapter(name)
            self._lay[name] = where
        self._looked = True

    def _fresh_cache(self, batch: int, length: int) -> Any:
        """An empty cache for so many tokens, of a size that others share: attention reads it whole
        for each token, and a step is captured for each size."""
        size = min(self._context, max(SHORTEST, 1 << (length - 1).bit_length()))
        held = self._cached
        if self.cache is None or held[0] != batch or not size <= held[1] <= WASTE * size:
            self.clear()
            # In this order: an interrupt may come between.
            self._cached = (batch, size)
            self.cache = caches.static_cache(self._model, size)
        else:
            self.cache.reset()
        return self.cache

    # ----------------------------------------------------------------------------------- steps

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward: replayed, captured, or as it is."""
        why = self._no_step(args, kwargs)
        if why:
            self.refusals[why] += 1
            return own(*args, **kwargs)
        leaves: list[torch.Tensor] = []
        state = self._adapters.state()
        if any(isinstance(one[-1], str) for one in state):
            # No graph may: it would fail, and nothing be captured any more.
            self.refusals["rows of a mixed batch are picked by the host"] += 1
            return own(*args, **kwargs)
        if not self._looked:
            self._forget_moved()
        kind = (
            describe_inputs(kwargs, leaves),
            state,
            caches.full_windows(self.cache),
            self._model.training,
        )
        if kind not in self._met:
            # It warms up what the first use of a kernel allocates, which no graph may.
            self._met.add(kind)
            return own(*args, **kwargs)
        key = (kind, self._ring.ready())
        step = self._steps.get(key)
        if step is None:
            step = self._capture(own, kwargs, leaves)
            if step is None:
                return own(*args, **kwargs)
            self._steps[key] = step
            if len(self._steps) > GRAPHS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._replay(step, leaves)

    def _no_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        if self.recorder is None:
            return self._unable or "nothing records"
        given = kwargs.get("input_ids")
        if args or not isinstance(given, torch.Tensor) or given.shape[-1] != 1:
            return "more than one token at a time"
        if self.cache is None or kwargs.get(self._argument) is not self.cache:
            return "the cache is not the placement's own"
        if torch.is_grad_enabled():
            return "gradients are wanted"
        if any(one.ndim == 2 and one.shape[1] > 1 for one in kwargs.values() if is_tensor(one)):
            return "an input grows with each token"
        asked = ("labels", "output_attentions", "output_hidden_states", "inputs_embeds")
        if any(kwargs.get(name) not in (None, False) for name in asked):
            return "more than logits is wanted"
        return ""

    def _capture(
        self, own: Callable[..., Any], kwargs: dict[str, Any], leaves: list[torch.Tensor]
    ) -> Step | None:
        assert self.recorder is not None
        inputs = [one.clone() for one in leaves]
        given = with_leaves(kwargs, inputs)
        lengths = caches.window_lengths(self.cache)
        handled = sys.exception()
        self._ring.fence()

        def work() -> Any:
            with self._ring.recorded():
                return own(**given)

        try:
            with self._shortcuts() as self.shortened:
                output, replay = self.recorder.capture(work)
            held = self._ring.held
        except Exception as error:
            # What the failed recording says may have come of an interrupt.
            for cause in chain(error):
                if not isinstance(cause, Exception) and cause is not handled:
                    raise cause from None
            # Whatever cannot be captured: nothing has run, and the caller runs it eagerly.
            self._unable = f"capturing failed: {first_line(error)}"
            self.refusals[self._unable] += 1
            self.recorder = None
            return None
        finally:
            # Nothing was computed: what the host counted on the way is counted with the replay.
            self._ring.lose()
            caches.set_window_lengths(self.cache, lengths)
        if self.shortcuts is not None and self.shortcuts.fault:
            self.refusals[f"LoRA in two kernels: {self.shortcuts.fault}"] = 1
        self.captured += 1
        return Step(inputs, output, replay, held, self._adapters.configs)

    def _shortcuts(self) -> contextlib.AbstractContextManager[int]:
        if self.shortcuts is None:
            return contextlib.nullcontext(0)
        return self.shortcuts.taken(self._adapters.layers(), self._model.dtype)

    def _replay(self, step: Step, leaves: list[torch.Tensor]) -> Any:
        for target, source in zip(step.inputs, leaves, strict=True):
            target.copy_(source)
        lengths = [one + 1 for one in caches.window_lengths(self.cache)]
        self._ring.fence()
        # What an interrupt leaves, wherever it comes: slots of which nothing is known.
        self._ring.lose()
        step.replay()
        self._ring.turned(step.held)
        caches.set_window_lengths(self.cache, lengths)
        self.replayed += 1
        return private_output(step.output)

    def clear(self) -> None:
        """Lets go of every captured step and of the cache."""
        self._steps.clear()
        self._met.clear()
        self.cache = None

    def forget_adapter(self, name: str) -> None:
        """Lets go of the captured steps that apply an adapter: its weights have left."""
        # Another thread's generate may let go of all of them meanwhile.
        for key in [key for key in list(self._steps) if applies(key[0][1], name)]:
            self._steps.pop(key, None)


def prompt_of(kwargs: Mapping[str, Any]) -> Any:
    """The token ids that `generate` was given, by either of their names."""
    given = kwargs.get("inputs")
    return kwargs.get("input_ids") if given is None else given


def _asks_for_another(kwargs: Mapping[str, Any], config: Any) -> str:
    """Why a request needs another cache or another loop than the placement's own."""
    if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
        return "generate was given a cache"
    if config.cache_implementation is not None or config.use_cache is False:
        return "generate was asked for another cache"
    if kwargs.get("custom_generate") is not None:
        return "generate was asked for another loop"
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        return "beams and several answers reorder the cache"
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode == "assisted_generation":
        return "assisted decoding crops the cache"
    if mode not in ("greedy_search", "sample") or kwargs.get("synced_gpus"):
        return "generate was asked for another loop"
    if config.return_dict_in_generate:
        return "the cache would be handed out"
    if config.prefill_chunk_size and foreign_generate.chunks_leave_gaps():
        return "chunks of a prompt leave gaps in a static cache"
    return ""


def lora_shortcuts(device: torch.device) -> Shortcuts | None:
    """The kernels of a CUDA device; None where Triton, which comes with torch on Linux, is not."""
    try:
        from trimtab.lora_kernels import Kernels
    except ImportError:
        return None
    return Shortcuts(Kernels(device))


def steps_of(plan: Plan, model: PreTrainedModel, rooms: Rooms) -> Steps:
    """The decode steps of a model, captured where its device and its tiers let them be."""
    assert rooms.ring is not None
    unable = ""
    if rooms.device.type != "cuda":
        unable = "a CPU runs"
    elif any(unit.rests == "disk" for unit in plan.of_mode(STREAMED)):
        unable = "streamed layers rest on the disk, which the host must read"
    elif rooms.pageable:
        unable = "memory could not be pinned"
    elif plan.quant == "int8":
        unable = "int8 products look for outliers on the host"
    recorder = None if unable else CudaRecorder(rooms.device)
    shortcuts = lora_shortcuts(rooms.device) if recorder else None
    return Steps(model, rooms.ring, recorder, unable, plan.context, plan.batch, shortcuts)
