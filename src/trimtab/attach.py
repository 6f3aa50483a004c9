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
from trimtab.adapted import Undo, base_of, base_parameters, inner
from trimtab.adapters import AdapterHeader, read_adapter
from trimtab.apply import ReadBase, fit_model, put_onto
from trimtab.compat import READS_BASE
from trimtab.errors import AdapterFault, FormatFault, PlacementFault, RunningFault
from trimtab.fit import Fit
from trimtab.formats import by_name
from trimtab.guard import Source, guard_class, stand_in
from trimtab.proof import Applied
from trimtab.swapping import Swap
from trimtab.switching import Switch

_CACHED = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds that are keys and values before those of the prompt."""


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
    `load_adapter` then works the same way for further adapters, `set_adapter` takes no longer with
    many of them, and `swap_adapter(name, source)` puts another adapter into the place of one.

    Args:
        base_model: a transformers model, or the `PeftModel` that an earlier call returned.
        adapter: the folder or hub name of an adapter.
        name: its name in the model.
        allow_unused: leave out tensors of the file that match nothing, instead of an error.
        allow_other_base: accept an adapter that names another base model.

    Returns:
        The `PeftModel`, in evaluation mode.

    Raises:
        AdapterFault: TT3nn, an adapter that does not fit this base; TT314, a prefix on a map that
            names no GPU.
        FormatFault: TT513, a 4-bit base that has run on a CPU with AVX512-BF16.
        PlacementFault: TT204, a quantized layer that is offloaded; TT207, a layer without weights
            that accelerate knows nothing of. The model is then as it was.

    Example:
        >>> base = AutoModelForCausalLM.from_pretrained(  # doctest: +SKIP
        ...     "me/base", device_map="auto", offload_folder="offload")
        >>> model = trimtab.attach(base, "me/sql-lora")  # doctest: +SKIP
    """
    model, _ = _put(base_model, read_adapter(adapter), name, allow_unused, allow_other_base)
    return model


def _put(
    model: nn.Module,
    header: AdapterHeader,
    name: str,
    allow_unused: bool,
    allow_other_base: bool,
) -> tuple[PeftModel, Applied]:
    base = base_of(model)
    refuse_packed(base)
    decided = fit_model(model, header, allow_unused=allow_unused, allow_other_base=allow_other_base)
    offloaded = find_offloaded(base)
    _refuse(base, decided, offloaded)
    with stand_ins(offloaded):
        adapted, applied = put_onto(model, decided, name, read_base=reader(base, offloaded))
    # Further adapters are put onto it when it has run.
    foreign.keep_four_bit_unpacked(base)
    _settle(adapted, bool(offloaded))
    return adapted, applied


def refuse_packed(base: nn.Module) -> None:
    """Raises TT513 if weights are no longer as they were loaded: PEFT would spoil them."""
    if packed := foreign.packed_for_cpu(base):
        raise FormatFault(
            "TT513",
            f"{len(packed)} 4-bit layers are repacked for this CPU already, {packed[0]} among them",
            why="bitsandbytes does so in the first forward, and PEFT's state_dict then breaks them",
            fix="load the base again and attach the adapter before its first forward",
        )


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


def reader(base: nn.Module, offloaded: list[Offloaded]) -> ReadBase:
    """Reads the base's parameters by name, wherever they are."""
    reads = {one.name: one for one in offloaded}
    own = {full: parameter for full, _, _, parameter in base_parameters(base)}
    return lambda full: reads[full].read() if full in reads else own[full].detach()


@contextlib.contextmanager
def stand_ins(offloaded: list[Offloaded]) -> Iterator[None]:
    """While inside, offloaded parameters have their shape, dtype and device, and no bytes.

    What reads one gets a private copy of what accelerate holds; a copy of its module has no hook,
    which would bring the base's weight into it.
    """
    kept = [(one, getattr(one.module, one.last)) for one in offloaded]
    made: dict[int, nn.Parameter] = {}  # a tied parameter has one stand-in
    for one, parameter in kept:
        if id(parameter) not in made:
            made[id(parameter)] = _stand_in(one, parameter)
    try:
        with foreign.hooks_off([one.module for one in offloaded]):
            for one, parameter in kept:
                setattr(one.module, one.last, made[id(parameter)])
            yield
    finally:
        for one, parameter in kept:
            # PEFT freezes the base: accelerate copies the flag to what it brings in.
            if not made[id(parameter)].requires_grad:
                parameter.requires_grad_(False)
            setattr(one.module, one.last, parameter)


def _stand_in(one: Offloaded, parameter: nn.Parameter) -> nn.Parameter:
    def read(part: str | None = None) -> dict[str, torch.Tensor]:
        return {"data": one.read().to(one.device, copy=True)}

    data = stand_in(tuple(parameter.shape), parameter.dtype, one.device)
    made: Any = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made._trim_source = Source(one.name, by_name("plain"), None, read, "data")
    made.__class__ = guard_class(nn.Parameter)
    fresh: nn.Parameter = made
    return fresh


def _refuse(base: nn.Module, decided: Fit, offloaded: list[Offloaded]) -> None:
    """What cannot work on offloaded layers, before anything is changed."""
    header = decided.header
    touched = set(decided.modules)
    _refuse_unknown(base, touched)
    places = getattr(base, "hf_device_map", {}).values()
    if header.peft_type in _CACHED and len(places) > 1 and {"cpu", "disk"}.issuperset(places):
        raise AdapterFault(
            "TT314",
            f"{header.source} ({header.peft_type}) cannot run on a base that is mapped to"
            f" {' and '.join(sorted(set(places)))} only",
            why="PEFT puts its keys and values where the map says, and takes no map without a GPU",
            fix="use trimtab.load, or a base that is on one device",
        )
    for one in offloaded:
        if one.name.rpartition(".")[0] in touched and foreign.is_bitsandbytes(one.module):
            raise PlacementFault(
                "TT204",
                f"{one.name} is quantized, and accelerate has offloaded it",
                why="its quantization state does not come back with its bytes",
                fix="trimtab.load streams quantized layers, or keep the layer on a GPU",
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
    model.swap_adapter = functools.partial(_swap_adapter, model)
    if not hasattr(model, "_trim_switch"):
        model._trim_switch = Switch()
    model._trim_switch.take_over(model)
    if not offloads:
        return
    model.add_adapter = functools.partial(_add_adapter, model)
    tuner = model.base_model
    if isinstance(tuner, BaseTuner):
        for refused in ("merge_adapter", "merge_and_unload"):
            setattr(tuner, refused, _refuse_merge)
        if hasattr(tuner, "add_weighted_adapter"):
            tuner.add_weighted_adapter = functools.partial(_add_weighted, model)
    for _, _, layer in foreign.adapter_layers(model):
        if isinstance(layer, BaseTunerLayer):
            _lift(layer)


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


def _swap_adapter(
    model: PeftModel,
    adapter_name: str,
    model_id: str | Path,
    *,
    allow_unused: bool = False,
    allow_other_base: bool = False,
) -> Applied:
    """`Placement.swap_adapter`, of an attached model."""
    if adapter_name not in model.peft_config:
        raise AdapterFault("TT311", f"there is no adapter {adapter_name!r}")
    decided = fit_model(
        model,
        read_adapter(model_id),
        allow_unused=allow_unused,
        allow_other_base=allow_other_base,
    )
    base = base_of(model)
    return Swap(model, decided, adapter_name, reader(base, find_offloaded(base))).carry_out()


def _add_adapter(
    model: PeftModel, adapter_name: str, peft_config: PeftConfig, **options: Any
) -> None:
    """PEFT's `add_adapter`, of an untrained adapter; it may read the base, and not rewrite it."""
    start = getattr(peft_config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(READS_BASE):
        raise AdapterFault(
            "TT308",
            f"a new adapter with init_lora_weights={start!r} would rewrite weights that are"
            " offloaded",
            fix="add one that starts otherwise, or load a saved adapter",
        )
    with _injecting(model, adapter_name):
        type(model).add_adapter(model, adapter_name, peft_config)
        foreign.cast_adapter(model, adapter_name)


def _add_weighted(
    model: PeftModel, adapters: list[str], weights: list[float], adapter_name: str, **options: Any
) -> None:
    """PEFT's `add_weighted_adapter`: the combination lands where its layers run."""
    tuner = model.base_model
    with _injecting(model, adapter_name):
        type(tuner).add_weighted_adapter(tuner, adapters, weights, adapter_name, **options)


@contextlib.contextmanager
def _injecting(model: PeftModel, name: str) -> Iterator[None]:
    """Around PEFT's making of an adapter; if it fails, the model is what it was."""
    with stand_ins(find_offloaded(base_of(model))):
        undo = Undo(model, name)
        try:
            yield
        except BaseException:
            undo()
            raise
    _settle(model, True)


def _refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    raise AdapterFault(
        "TT309",
        "an adapter cannot be merged into a model with offloaded layers",
        why="the change would be lost when accelerate brings the layer in again",
        fix="trimtab merge writes a merged checkpoint",
    )
