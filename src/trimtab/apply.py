"""The one route by which an adapter is put onto a model: PEFT injects, this fills and proves."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from peft import PeftConfig, PeftModel, set_peft_model_state_dict
from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from trimtab import foreign, foreign_peft
from trimtab.adapted import (
    Undo,
    adapter_state,
    base_of,
    base_parameters,
    delete,
    shapes_of,
    unwrap,
)
from trimtab.adapters import AdapterHeader, load_tensors
from trimtab.compat import known_fields
from trimtab.errors import AdapterFault
from trimtab.fit import Fit, fit, three
from trimtab.proof import Applied, account, check_injected, same
from trimtab.trial import refused_on_quantized, try_layers

ReadBase = Callable[[str], torch.Tensor]
"""Gives a parameter of the base by its name."""


def load_onto(
    model: nn.Module,
    header: AdapterHeader,
    name: str = "default",
    device: torch.device | str | None = None,
    *,
    base_name: str | None = None,
    allow_unused: bool = False,
    allow_other_base: bool = False,
    read_base: ReadBase | None = None,
) -> tuple[PeftModel, Applied]:
    """Puts an adapter onto a base, or onto a `PeftModel` beside its others.

    The weights are in 32 bits, equal to the file. The adapter is frozen; the first one is active, a
    further one waits for `set_adapter`. If anything fails, the model is what it was.

    Args:
        model: the base, or the `PeftModel` that an earlier call returned.
        header: what `read_adapter` returned.
        name: the adapter's name in the model, without dots.
        device: where all of the adapter goes; None: each weight to the device of its layer.
        base_name: hub name or folder of the base; None: what the model says.
        allow_unused: see `trimtab.fit.fit`.
        allow_other_base: see `trimtab.fit.fit`.
        read_base: reads a parameter of the base, if the model's own is not to be read.

    Returns:
        The `PeftModel`, in evaluation mode, and the proof.

    Raises:
        AdapterFault: all of `trimtab.fit.fit`; TT310 if the file holds other values for tensors of
            the base; TT311 if the name is taken; TT312 if tensors are missing; TT315 if PEFT
            refuses the adapter; TT317 if it does not compute on the base's quantized layers.

    Example:
        >>> model, applied = load_onto(base, read_adapter("./sql-lora"), "sql")  # doctest: +SKIP
    """
    decided = fit_model(
        model,
        header,
        base_name=base_name,
        allow_unused=allow_unused,
        allow_other_base=allow_other_base,
    )
    return put_onto(model, decided, name, device, read_base=read_base)


def fit_model(
    model: nn.Module,
    header: AdapterHeader,
    *,
    base_name: str | None = None,
    allow_unused: bool = False,
    allow_other_base: bool = False,
) -> Fit:
    """`trimtab.fit.fit` with the facts of a loaded model and of the installed PEFT."""
    return fit(
        header,
        shapes_of(model),
        base_name or getattr(base_of(model), "name_or_path", None),
        ties=_ties(model),
        known_fields=known_fields(header),
        allow_unused=allow_unused,
        allow_other_base=allow_other_base,
    )


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """The base's parameters that are one under two names."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(one), name)) for name, _, _, one in base_parameters(model)]
    return [pair for pair in pairs if pair[0] != pair[1]]


def put_onto(
    model: nn.Module,
    decided: Fit,
    name: str,
    device: torch.device | str | None = None,
    *,
    read_base: ReadBase | None = None,
) -> tuple[PeftModel, Applied]:
    """Carries out a `Fit`; see `load_onto`."""
    header = decided.header
    _check_name(model, name)
    if isinstance(model, PeftModel) and model.peft_config and header.peft_type == "ADAPTION_PROMPT":
        raise AdapterFault(
            "TT314",
            f"{header.source} is an adaption prompt, and there is an adapter already",
            why="PEFT keeps one at a time in the model, without its name, and would mix them up",
            fix="remove the other adapter first",
        )
    tensors = load_tensors(header)
    check_base_tensors(model, decided, tensors, read_base)
    given = {here: tensors[key] for key, here in decided.keys.items()}
    with _alone(model, header):
        undo = Undo(model, name)
        try:
            with refused_on_quantized(model, decided), peft_refusals(header):
                config = peft_config(decided)
                adapted = _inject(model, header, config, name)
                check_injected(adapted, decided, given, name)
                if device is not None:
                    for weight in adapter_state(adapted, header, name).values():
                        weight.data = weight.data.to(device)
                set_peft_model_state_dict(adapted, dict(given), adapter_name=name)
                adapted.eval().requires_grad_(False)
            applied = account(adapted, decided, given, name)
            try_layers(adapted, header, name)
            return adapted, applied
        except BaseException:
            undo()
            raise


def _alone(model: nn.Module, header: AdapterHeader) -> contextlib.AbstractContextManager[None]:
    """While inside, a LoRA does not see the others: it loads as fast beside fifty as beside one."""
    if not isinstance(model, PeftModel) or header.peft_type != "LORA":
        return contextlib.nullcontext()
    arrows = (getattr(one, "arrow_config", None) for one in model.peft_config.values())
    if header.target_parameters or header.config.get("arrow_config") or any(arrows):
        return contextlib.nullcontext()
    return foreign_peft.adapters_hidden([layer for _, _, layer in foreign.adapter_layers(model)])


def remove(model: PeftModel, name: str) -> nn.Module:
    """Takes an adapter off; returns the base itself, as it was, when it was the last one.

    Raises:
        AdapterFault: TT311, if there is none of that name.
    """
    names = tuple(model.peft_config)
    if name not in names:
        raise AdapterFault("TT311", f"there is no adapter {name!r}", fix=f"one of {three(names)}")
    if len(names) == 1:
        base = base_of(model)
        unwrap(base)
        return base
    if name in model.active_adapters:
        # PEFT would choose another one itself, with a warning.
        model.set_adapter(next(one for one in names if one != name))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    delete(model, name)
    kept: nn.Module = model
    return kept


def _check_name(model: nn.Module, name: str) -> None:
    taken = tuple(model.peft_config) if isinstance(model, PeftModel) else ()
    if name in taken:
        raise AdapterFault("TT311", f"there is an adapter {name!r} already", fix="remove it first")
    if not name or "." in name:
        raise AdapterFault(
            "TT311", f"{name!r} cannot be an adapter's name", fix="leave out the dots"
        )
    if not isinstance(model, PeftModel) and any(
        isinstance(one, BaseTunerLayer) for one in model.modules()
    ):
        raise AdapterFault(
            "TT311",
            "the base has adapter layers already, without PEFT's model around it",
            why="transformers' load_adapter or inject_adapter_in_model was used on it",
            fix="give the base without them, or the PeftModel",
        )


def check_base_tensors(
    model: nn.Module,
    decided: Fit,
    tensors: Mapping[str, torch.Tensor],
    read_base: ReadBase | None,
) -> None:
    """Tensors of the base in the file are dropped if the base has the same, else refused."""
    if not decided.base_tensors:
        return
    own = {name: one for name, _, _, one in base_parameters(model)}
    for key, name in decided.base_tensors.items():
        base = read_base(name) if read_base else own[name].detach()
        if not same(base, tensors[key]):
            raise AdapterFault(
                "TT310",
                f"{decided.header.source} holds its own values of {name}, a tensor of the base",
                why=_why_own_values(decided.header, name),
                fix="trimtab merge makes a model of the base and this adapter, which loads in any"
                " format",
            )


def _why_own_values(header: AdapterHeader, name: str) -> str:
    if name.endswith(".bias"):
        return (
            f"it was trained with bias={header.config.get('bias')!r}: PEFT would write such biases"
            " over the base's, for every other adapter too, and not take them back when the"
            " adapter is disabled or removed"
        )
    return (
        "the table or the weight was trained, or another model was saved with it: to put it in"
        " would change the base for every other adapter, and with none"
    )


def peft_config(decided: Fit) -> PeftConfig:
    fields = dict(decided.config)
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[fields["peft_type"]]
    config: PeftConfig = kind.from_peft_type(**kind.check_kwargs(**fields))
    config.inference_mode = True
    return config


def _inject(model: nn.Module, header: AdapterHeader, config: PeftConfig, name: str) -> PeftModel:
    """The layers of a new adapter, in 32 bits; `low_cpu_mem_usage` would round to the base's 16."""
    if isinstance(model, PeftModel):
        alone = not model.peft_config
        # Not the instance's own, which an attached model has.
        type(model).add_adapter(model, name, config, low_cpu_mem_usage=False)
        foreign.cast_adapter(model, name)
        if alone:  # PEFT still calls an adapter active that has been deleted
            model.set_adapter(name)
            for weight in adapter_state(model, header, name, buffers=False).values():
                weight.requires_grad_(False)
        return model
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    return kind(model, config, name, autocast_adapter_dtype=True, low_cpu_mem_usage=False)


@contextlib.contextmanager
def peft_refusals(header: AdapterHeader) -> Iterator[None]:
    """Translates what PEFT raises; running out of memory is not PEFT's doing."""
    refusals = (
        ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError,
        IndexError, AssertionError, ImportError, ArithmeticError, NameError,
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            # PEFT fears for adapters named "a" or "lo", which `lora_` contains; `account` knows.
            warnings.filterwarnings("ignore", "Adapter name .* should not be contained")
            yield
    except torch.OutOfMemoryError:
        raise
    except refusals as exc:
        said = (str(exc) or type(exc).__name__).strip().splitlines()[0]
        raise AdapterFault(
            "TT315",
            f"PEFT refused {header.source}",
            why=f"{type(exc).__name__}: {said}",
            fix="check adapter_config.json against the installed PEFT and this model",
        ) from exc
