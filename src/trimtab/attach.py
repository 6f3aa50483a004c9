"""Adapters onto a base that transformers or accelerate has placed already; nothing is placed again.

Layers that accelerate keeps in host memory or on disk have parameters on `meta` between their
forwards. While PEFT makes its layers beside them, each such parameter is replaced by a stand-in of
the true shape and dtype on the device where the layer runs, so that the adapter lands there. The
hooks, the device map and the offload files are not touched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn

from trimtab import foreign
from trimtab.adapted import base_of, base_parameters, inner
from trimtab.adapters import AdapterHeader, read_adapter
from trimtab.apply import Applied, fit_model, put_onto
from trimtab.errors import AdapterFault, PlacementFault, RunningFault
from trimtab.fit import Fit, three

_LOADS_BLIND = frozenset(
    ("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "FOURIERFT", "VBLORA", "ROAD")
)
"""Kinds that compute nothing from the base's weights that the adapter's file does not replace."""


@dataclass(frozen=True)
class Offloaded:
    """A parameter that accelerate brings in for each forward of its module.

    `name` is the parameter's full name in the base, `last` its name in `module`, `hook`
    accelerate's, which reads it from host memory or a file and puts it on `device`.
    """

    name: str
    module: nn.Module
    last: str
    hook: Any
    device: torch.device

    def read(self) -> torch.Tensor:
        tensor: torch.Tensor = self.hook.weights_map[self.last]
        return tensor


def attach(
    base_model: nn.Module,
    adapter: str | Path | AdapterHeader,
    name: str = "default",
    allow_unused: bool = False,
    allow_other_base: bool = False,
) -> PeftModel:
    """Puts an adapter onto a model that is placed already, and leaves the placement as it is.

    The base may be on one device, spread over several GPUs, or partly offloaded to host memory or
    disk by `device_map`. The adapter's weights go where their layer runs, in 32 bits. The model's
    `load_adapter` then works the same way for further adapters.

    Args:
        base_model: a transformers model, or the `PeftModel` that an earlier call returned.
        adapter: the folder or hub name of an adapter.
        name: its name in the model.
        allow_unused: leave out tensors of the file that match nothing, instead of an error.
        allow_other_base: accept an adapter that names another base model.

    Returns:
        The `PeftModel`, in evaluation mode.

    Raises:
        AdapterFault: TT3nn, an adapter that does not fit this base, or that cannot be loaded
            while the layers it changes are offloaded.
        PlacementFault: TT204, a quantized layer that is offloaded; TT207, a layer without weights
            that accelerate knows nothing of. The model is then as it was.

    Example:
        >>> base = AutoModelForCausalLM.from_pretrained(  # doctest: +SKIP
        ...     "me/base", device_map="auto", offload_folder="offload")
        >>> model = trimtab.attach(base, "me/sql-lora")  # doctest: +SKIP
    """
    header = adapter if isinstance(adapter, AdapterHeader) else read_adapter(adapter)
    model, _ = _put(base_model, header, name, allow_unused, allow_other_base)
    return model


def _put(
    model: nn.Module,
    header: AdapterHeader,
    name: str,
    allow_unused: bool,
    allow_other_base: bool,
) -> tuple[PeftModel, Applied]:
    base = base_of(model)
    decided = fit_model(model, header, allow_unused=allow_unused, allow_other_base=allow_other_base)
    offloaded = find_offloaded(base)
    _refuse(base, decided, offloaded)
    reads = {one.name: one for one in offloaded}
    own = {full: parameter for full, _, _, parameter in base_parameters(base)}

    def read_base(full: str) -> torch.Tensor:
        return reads[full].read() if full in reads else own[full].detach()

    with stand_ins(offloaded):
        adapted, applied = put_onto(model, decided, name, read_base=read_base)
    _settle(adapted, bool(offloaded))
    return adapted, applied


def find_offloaded(base: nn.Module) -> list[Offloaded]:
    """The base's parameters on `meta` that accelerate's hook on their own module brings in."""
    found = []
    for name, module, last, parameter in base_parameters(base):
        hook = foreign.offload_hook(module) if parameter.is_meta else None
        if hook is not None and not hook.place_submodules:
            found.append(Offloaded(name, module, last, hook, _device(hook.execution_device)))
    return found


def _device(named: Any) -> torch.device:
    """accelerate names GPUs by number, too."""
    return torch.device("cuda", named) if isinstance(named, int) else torch.device(named)


@contextlib.contextmanager
def stand_ins(offloaded: list[Offloaded]) -> Iterator[None]:
    """While inside, offloaded parameters have their shape, dtype and device, and no bytes."""
    kept = [(one, getattr(one.module, one.last)) for one in offloaded]
    made: dict[int, nn.Parameter] = {}  # a tied parameter has one stand-in
    for one, parameter in kept:
        if id(parameter) not in made:
            fill = float("nan") if parameter.is_floating_point() else 0
            element = torch.full((), fill, dtype=parameter.dtype, device=one.device)
            made[id(parameter)] = nn.Parameter(
                element.expand(parameter.shape), requires_grad=parameter.requires_grad
            )
    try:
        for one, parameter in kept:
            setattr(one.module, one.last, made[id(parameter)])
        yield
    finally:
        for one, parameter in kept:
            # PEFT freezes the base: accelerate copies the flag to what it brings in.
            if not made[id(parameter)].requires_grad:
                parameter.requires_grad_(False)
            setattr(one.module, one.last, parameter)


def _refuse(base: nn.Module, decided: Fit, offloaded: list[Offloaded]) -> None:
    """What cannot work on offloaded layers, before anything is changed."""
    header = decided.header
    touched = set(decided.modules)
    away = {one.name.rpartition(".")[0] for one in offloaded} & touched
    if header.is_prompt:
        away = {one.name.rpartition(".")[0] for one in offloaded}
    _refuse_unknown(base, touched)
    for one in offloaded:
        if one.name.rpartition(".")[0] in touched and foreign.is_bitsandbytes(one.module):
            raise PlacementFault(
                "TT204",
                f"{one.name} is quantized, and accelerate has offloaded it",
                why="its quantization state does not come back with its bytes",
                fix="trimtab.load streams quantized layers, or keep the layer on a GPU",
            )
    if not away:
        return
    if header.target_parameters:
        raise AdapterFault(
            "TT313",
            f"{header.source} adapts parameters of {len(away)} offloaded modules: {three(away)}",
            why="PEFT changes such a parameter without calling its module, whose weights are then"
            " not there",
            fix="use trimtab.load, or a device map that keeps these modules on a device",
        )
    copied = {decided.keys[key] for key in header.saved_keys if key in decided.keys}
    copied |= {key for key in decided.keys.values() if ".token_adapter." in key}
    saved = {name for name in away if any(f".{name}." in key for key in copied)}
    if saved or header.peft_type not in _LOADS_BLIND:
        raise AdapterFault(
            "TT308",
            f"{header.source} ({header.peft_type}) copies or computes from weights that are"
            f" offloaded: {three(saved or away)}",
            why="PEFT reads them while it loads the adapter, and they are not there",
            fix="use trimtab.load, or a device map that keeps these modules on a device",
        )


def _refuse_unknown(base: nn.Module, touched: set[str]) -> None:
    for name, module, _, parameter in base_parameters(base):
        if not parameter.is_meta or name.rpartition(".")[0] not in touched:
            continue
        hook = foreign.offload_hook(module)
        if hook is None or hook.place_submodules:
            raise PlacementFault(
                "TT207",
                f"{name} has no data, and no hook of accelerate on its module brings it in",
                why="the model was made on meta, or its blocks are offloaded as a whole",
                fix="load it with from_pretrained(device_map=...) and without"
                " preload_module_classes",
            )


def _settle(model: PeftModel, offloads: bool) -> None:
    """Makes what PEFT offers on this model fit its placement, from now on."""
    model.load_adapter = functools.partial(_load_adapter, model)
    if not offloads:
        return
    model.add_adapter = functools.partial(_add_adapter, model)
    if isinstance(model.base_model, BaseTuner):
        for refused in ("merge_adapter", "merge_and_unload"):
            setattr(model.base_model, refused, _refuse_merge)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            _lift(module)


def _lift(layer: BaseTunerLayer) -> None:
    """Brings the base's weight in around the whole of PEFT's layer, which may read it by itself."""
    base_layer = inner(layer)
    hook = foreign.offload_hook(base_layer)
    if hook is None or "forward" in vars(layer):
        return
    layer.forward = functools.partial(_lifted, hook, base_layer, layer.forward)
    layer.merge = _refuse_merge


def _lifted(hook: Any, base_layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not hook.offload:  # an outer layer of the same base layer has brought it in
        return forward(*args, **kwargs)
    try:
        hook.pre_forward(base_layer)
        hook.offload = False
        return forward(*args, **kwargs)
    finally:
        hook.offload = True
        hook.post_forward(base_layer, None)


def _load_adapter(
    model: PeftModel,
    model_id: str | Path,
    adapter_name: str,
    is_trainable: bool = False,
    *,
    allow_unused: bool = False,
    allow_other_base: bool = False,
    **options: Any,
) -> Applied:
    """Takes the place of PEFT's `load_adapter`, which would dispatch the model again.

    `options` of PEFT's that choose devices or dtypes are not needed here.
    """
    if is_trainable:
        raise RunningFault(
            "TT607", "an attached model is for inference", fix="load without is_trainable=True"
        )
    header = read_adapter(model_id)
    return _put(model, header, adapter_name, allow_unused, allow_other_base)[1]


def _add_adapter(
    model: PeftModel, adapter_name: str, peft_config: PeftConfig, **options: Any
) -> None:
    """PEFT's `add_adapter` for an untrained LoRA; other kinds would start from absent weights."""
    plain = peft_config.peft_type == "LORA" and peft_config.init_lora_weights in (
        True, False, "gaussian",
    )  # fmt: skip
    extras = ("use_dora", "modules_to_save", "target_parameters", "trainable_token_indices")
    wanted = [one for one in extras if getattr(peft_config, one, None)]
    if not plain or wanted:
        raise AdapterFault(
            "TT308",
            f"a new adapter with {', '.join(wanted) or peft_config.peft_type} would start from"
            " weights that are offloaded",
            fix="add a plain LoRA, or load a saved adapter",
        )
    with stand_ins(find_offloaded(base_of(model))):
        type(model).add_adapter(model, adapter_name, peft_config)
        foreign.cast_adapter(model, adapter_name)
    _settle(model, True)


def _refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    raise AdapterFault(
        "TT309",
        "an adapter cannot be merged into a model with offloaded layers",
        why="the change would be lost when accelerate brings the layer in again",
        fix="trimtab merge writes a merged checkpoint",
    )
