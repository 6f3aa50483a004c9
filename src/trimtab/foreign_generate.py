"""Private names of transformers' `generate`, as `foreign` has the others.

Tested: transformers 5.1.0, 5.5.4, 5.24.0; peft 0.18.1, 0.19.1, 0.21.2.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch


def resolved(
    model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The arguments of `generate` by name, and the generation config that it makes of them.

    What a config that was given leaves open is the model's own (transformers 5.1 to 5.24).
    """
    named = inspect.signature(generate).bind(*args, **kwargs).arguments
    further = named.pop("kwargs", {})
    others = ("tokenizer", "assistant_tokenizer", "trust_remote_code")
    options = {name: one for name, one in further.items() if name not in others}
    config, _ = model._prepare_generation_config(named.get("generation_config"), **options)
    return {**named, **further}, config


def chunks_leave_gaps() -> bool:
    """Whether a prompt in chunks leaves places of a static cache empty (transformers 5.1)."""
    return not _takes_lengths()


def _takes_lengths() -> bool:
    from transformers import GenerationMixin

    named = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "next_sequence_length" in named


def prefill(model: Any, input_ids: torch.Tensor, config: Any, inputs: dict[str, Any]) -> Any:
    """The model's output for a prompt, as transformers' `generate` asks for it (5.1 to 5.24)."""
    return model._prefill(input_ids, config, inputs)


def step_inputs(model: Any, input_ids: torch.Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a forward for the last of `input_ids` (transformers 5.1 to 5.24)."""
    last = {"next_sequence_length": 1} if _takes_lengths() else {}
    found: dict[str, Any] = model.prepare_inputs_for_generation(input_ids, **last, **inputs)
    return found


def longer_inputs(model: Any, output: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs`, their masks and positions a token longer (transformers 5.1 to 5.24)."""
    found: dict[str, Any] = model._update_model_kwargs_for_generation(output, inputs)
    return found


def decoding(model: Any) -> contextlib.AbstractContextManager[None]:
    """While inside, experts run in the way that is quick for single tokens (transformers 5)."""
    found: contextlib.AbstractContextManager[None] = model._optimize_model_for_decode()
    return found


def pad_token(config: Any) -> torch.Tensor | None:
    """The token for sequences that have ended, on their device (transformers 5.1 to 5.24)."""
    found: torch.Tensor | None = config._pad_token_tensor
    return found


def takes_static_cache(model: Any) -> bool:
    """Whether a static cache of keys and values is all that the model remembers by.

    Not with a recurrent state, where transformers has no static one for it, nor with an encoder.
    """
    return bool(model._can_compile_fullgraph) and not model.config.is_encoder_decoder


def prepares_inputs_elsewhere(model: torch.nn.Module) -> bool:
    """Whether somebody else makes the model's inputs while it generates: PEFT does, to put virtual
    tokens before them (peft 0.18 to 0.21)."""
    own = vars(model).get("prepare_inputs_for_generation")
    return own is not None and getattr(own, "__self__", None) is not model
