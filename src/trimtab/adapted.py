"""A model with adapters: the base's parameters, an adapter's weights, the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from peft.tuners.adaption_prompt import AdaptionPromptModel
from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from trimtab.adapters import AdapterHeader

_PROMPTED = AdaptedAttention | AdaptedAttentionGPT
"""What an adaption prompt puts around an attention."""


def adapter_state(
    model: nn.Module, header: AdapterHeader, name: str, *, buffers: bool = True
) -> dict[str, torch.Tensor]:
    """The weights of one adapter in a model, under the keys that PEFT saves them under.

    Nothing of the base is read, and no `state_dict` is made.
    """

    def holds(parts: list[str]) -> bool:
        if header.is_prompt:
            return parts[-1] == "prompt_encoder"
        return parts[-1] == "modules_to_save" or any(header.is_own(part) for part in parts)

    found: dict[str, torch.Tensor] = {}
    named: list[tuple[str, torch.Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    if buffers:
        named += model.named_buffers(remove_duplicate=False)
    for full, tensor in named:
        if header.peft_type == "ADAPTION_PROMPT":  # one at a time is in the model, without a name
            if full.rpartition(".")[2].startswith("adaption_"):
                found[full] = tensor
            continue
        parts = full.split(".")
        at = next((n for n in range(1, len(parts)) if parts[n] == name and holds(parts[:n])), 0)
        if at and parts[at - 1] == "prompt_encoder":
            found |= _prompt_state(model, header, name)
        elif at:
            kept = parts[: at - (parts[at - 1] == "modules_to_save")] + parts[at + 1 :]
            found[".".join(kept)] = tensor
    return found


def _prompt_state(model: nn.Module, header: AdapterHeader, name: str) -> dict[str, torch.Tensor]:
    """What PEFT saves of a prompt: its embedding, which may be made of parts, and what is in it."""
    encoder: nn.Module = model.get_submodule("prompt_encoder")[name]  # type: ignore[index]
    own = {key: one for key, one in encoder.named_parameters() if key in header.tensors}
    return {"prompt_embeddings": encoder.embedding.weight, **own}  # type: ignore[union-attr, dict-item]


def base_of(model: nn.Module) -> nn.Module:
    """The transformers model, inside PEFT's or by itself."""
    if not isinstance(model, PeftModel):
        return model
    # Not get_base_model(), which fails when all adapters have been deleted.
    tuner: nn.Module = model.base_model
    return tuner.model if isinstance(tuner, BaseTuner | AdaptionPromptModel) else tuner


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every parameter of the base by the base's own names, with its unquantized shape."""
    return {name: true_shape(owner, last, one) for name, owner, last, one in base_parameters(model)}


def base_parameters(
    model: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Name, module, name in the module, and parameter of all that is the base's, ties repeated."""
    module = inner(base_of(model))
    for last, one in module.named_parameters(recurse=False, remove_duplicate=False):
        yield f"{prefix}{last}", module, last, one
    for child_name, child in module.named_children():
        yield from base_parameters(child, f"{prefix}{child_name}.")


def true_shape(module: nn.Module, last: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight before it was packed by a quantizer."""
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if last == "weight" and isinstance(rows, int) and isinstance(columns, int):
        return (rows, columns)
    return tuple(parameter.shape)


def inner(module: nn.Module) -> nn.Module:
    """The base's own module inside PEFT's wrappers."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | _PROMPTED):
        if isinstance(module, BaseTunerLayer):
            module = module.get_base_layer()
        elif isinstance(module, _PROMPTED):
            module = module.model
        else:
            module = getattr(module, "token_adapter", None) or module.original_module
    return module


def unwrap(base: nn.Module) -> None:
    """Puts the base's own modules back in the place of PEFT's, all adapters gone."""
    for module in list(base.modules()):
        for name, child in module.named_children():
            if (own := inner(child)) is not child:
                setattr(module, name, own)
    forget_config(base)


def delete(model: PeftModel, name: str) -> None:
    """`delete_adapter`, also of prompts, which peft 0.18 cannot delete."""
    if model.peft_config[name].is_prompt_learning:
        for held in (model.peft_config, model.prompt_encoder, model.prompt_tokens):
            if name in held:
                del held[name]
    else:
        model.delete_adapter(name)


def forget_config(base: nn.Module) -> None:
    """Removes what PEFT's tuner notes on the base."""
    if "peft_config" in vars(base):
        delattr(base, "peft_config")


@dataclass
class Undo:
    """Puts a model back to what it was before an adapter was injected."""

    model: nn.Module
    name: str
    children: list[tuple[nn.Module, str, nn.Module]] = field(init=False)
    trained: list[tuple[nn.Parameter, bool]] = field(init=False)
    training: list[tuple[nn.Module, bool]] = field(init=False)
    had_config: bool = field(init=False)

    def __post_init__(self) -> None:
        modules = list(self.model.modules())
        self.children = [(m, name, child) for m in modules for name, child in m.named_children()]
        self.trained = [(one, one.requires_grad) for one in self.model.parameters()]
        self.training = [(one, one.training) for one in modules]
        self.had_config = hasattr(base_of(self.model), "peft_config")

    def __call__(self) -> None:
        if isinstance(self.model, PeftModel):
            self._delete(self.model)
        for module, name, child in self.children:
            setattr(module, name, child)
        for module, training in self.training:
            module.training = training
        for parameter, required in self.trained:
            parameter.requires_grad_(required)
        if not self.had_config:
            forget_config(base_of(self.model))

    def _delete(self, model: PeftModel) -> None:
        """PEFT forgets the name of an adapter that it could not inject, but not its layers."""
        rest = [one for one in model.peft_config if one != self.name]
        for module in list(model.modules()):
            with contextlib.suppress(ValueError, KeyError, AttributeError, RuntimeError):
                if isinstance(module, BaseTunerLayer):
                    module.delete_adapter(self.name)
                elif isinstance(module, AuxiliaryTrainingWrapper):
                    module.delete_adapter(self.name, new_active_adapters=rest[:1])
        for held in ("peft_config", "prompt_encoder", "prompt_tokens"):
            if self.name in getattr(model, held, ()):
                del getattr(model, held)[self.name]
