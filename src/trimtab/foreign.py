"""Private names of other libraries that trimtab touches, with the versions they were tested on.

Those of `generate` are in `foreign_generate.py`, and PEFT's for many adapters in `foreign_peft.py`.

Tested: transformers 5.1.0, 5.5.4, 5.24.0; peft 0.18.1, 0.19.1, 0.21.2; accelerate 1.12.0, 1.13.0,
1.15.0; bitsandbytes 0.49.2, 0.50.2.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def drop_mixed_batch_hooks(model: torch.nn.Module) -> None:
    """Removes the hooks that PEFT leaves behind when a mixed batch raises (peft 0.18 to 0.21)."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key, hook in list(hooks.items()):
            name = getattr(getattr(hook, "func", hook), "__name__", "")
            if name in ("_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook"):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


_LOADING = threading.Lock()
"""What `watched_load` replaces is replaced for the whole process: one load at a time."""


@contextlib.contextmanager
def watched_load(on_skeleton: Callable[[PreTrainedModel], None]) -> Iterator[None]:
    """While inside, this thread's `from_pretrained` loads in order and places nothing.

    `on_skeleton` gets the model when its layers have been replaced for quantization and before
    its weights come. The loader's threads are off (`HF_DEACTIVATE_ASYNC_LOAD`), nothing is
    allocated to warm up (`caching_allocator_warmup`), and a map of more than one device leaves no
    hooks (`accelerate_dispatch`). Other threads' loads go their usual way.
    """
    from transformers import modeling_utils

    this_thread = threading.get_ident()

    def instead_of_warm_up(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != this_thread:
            warm_up(model, *args, **kwargs)
        else:
            on_skeleton(model)

    def instead_of_dispatch(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != this_thread:
            dispatch(*args, **kwargs)

    with _LOADING, environment_variable("HF_DEACTIVATE_ASYNC_LOAD", "1"):
        warm_up = modeling_utils.caching_allocator_warmup
        dispatch = modeling_utils.accelerate_dispatch
        modeling_utils.caching_allocator_warmup = instead_of_warm_up
        modeling_utils.accelerate_dispatch = instead_of_dispatch
        try:
            yield
        finally:
            modeling_utils.caching_allocator_warmup = warm_up
            modeling_utils.accelerate_dispatch = dispatch


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def is_loaded(parameter: torch.Tensor) -> bool:
    """Whether transformers' loader has filled the parameter, and will not initialise it."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def skeleton(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model on `meta`, made as `from_pretrained` makes it: no storage, ties not yet tied.

    `get_init_context` takes three arguments in transformers 5.1, four in 5.24.
    """
    further = len(inspect.signature(model_class.get_init_context).parameters) - 3
    contexts = model_class.get_init_context(dtype, True, False, *([None] * further))
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return model_class(config)


def decoded_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values as transformers reads them from JSON, which has no word for infinity."""
    from transformers import PreTrainedConfig

    found: dict[str, Any] = PreTrainedConfig._decode_special_floats(dict(config))
    return found


def convert_to_quantized(
    model: PreTrainedModel, quantization: Any, *, stored: bool, dtype: torch.dtype
) -> None:
    """Swaps the skeleton's linears for quantized ones as `from_pretrained` would.

    `AutoHfQuantizer` and `preprocess_model` are the loader's own; `stored` says that the
    checkpoint holds quantized weights already.
    """
    import torch
    from transformers.quantizers.auto import AutoHfQuantizer

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        AutoHfQuantizer.from_config(quantization, pre_quantized=stored).preprocess_model(
            model=model, dtype=dtype, device_map=None, checkpoint_files=None, use_kernels=False
        )
    finally:
        torch.set_default_dtype(before)


def kept_in_float32(model: PreTrainedModel, dtype: str) -> re.Pattern[str] | None:
    """What to search parameter names for: the loader keeps those in float32 for this dtype."""
    import torch

    globs = [glob.replace("*", ".*") for glob in model._get_dtype_plan(getattr(torch, dtype))]
    return re.compile("|".join(f"(?:{glob})" for glob in globs)) if globs else None


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Alias to owner of each tied parameter (`all_tied_weights_keys`)."""
    return dict(model.all_tied_weights_keys)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers' progress bars and load reports are off; trimtab says both in its own way."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def keep_four_bit_unpacked(model: torch.nn.Module) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights in place on a CPU with AVX512-BF16.

    The repacked state does not survive a `state_dict`, which PEFT calls for each adapter
    (bitsandbytes 0.49.2 to 0.50.2).
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def packed_for_cpu(model: torch.nn.Module) -> list[str]:
    """Names of 4-bit layers that bitsandbytes has repacked in place, in their first forward."""
    return [
        name
        for name, module in model.named_modules()
        if getattr(
            getattr(getattr(module, "weight", None), "quant_state", None),
            "packing_format_for_cpu",
            False,
        )
    ]


def cast_adapter(model: Any, name: str) -> None:
    """Makes an injected adapter's 16-bit weights 32-bit, as `PeftModel.from_pretrained` does.

    `add_adapter` of peft 0.18 leaves them in the base's 16 bits; from 0.19 this changes nothing.
    """
    if hasattr(model.base_model, "_cast_adapter_dtype"):
        model.base_model._cast_adapter_dtype(adapter_name=name, autocast_adapter_dtype=True)


def offload_hook(module: torch.nn.Module) -> Any:
    """accelerate's hook that brings the module's parameters in for its forward; None if none.

    Several hooks on one module stand in a `SequentialHook`.
    """
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False) and hasattr(one, "weights_map"):
            return one
    return None


@contextlib.contextmanager
def hooks_off(modules: list[torch.nn.Module]) -> Iterator[None]:
    """While inside, accelerate's hooks are off these modules, and the modules' copies have none."""
    kept = []
    try:
        for module in modules:
            held = vars(module)
            own = {name: held[name] for name in _HOOKED if name in held}
            kept.append((held, own))  # first, for an interrupt may come between
            for name in own:
                del held[name]
        yield
    finally:
        for held, own in kept:
            held.update(own)


_HOOKED = ("_hf_hook", "_old_forward", "forward")
"""What accelerate's `add_hook_to_module` sets on a module."""


def is_bitsandbytes(module: torch.nn.Module) -> bool:
    """Whether the module is one of bitsandbytes' quantized layers, without importing it."""
    return any(one.__module__.startswith("bitsandbytes.") for one in type(module).__mro__)


def adapter_layers(model: torch.nn.Module) -> list[tuple[Mapping[str, Any], str, Any]]:
    """PEFT's layers and wrappers, each with the children it is among and its name there.

    What they hold for each adapter is not walked: it would take longer with each adapter.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: list[tuple[Mapping[str, Any], str, Any]] = []

    def walk(module: Any) -> None:
        adapters: tuple[str, ...] = ()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            adapters = (*module.adapter_layer_names, *module.other_param_names)
        for name, child in module._modules.items():
            if child is None or name in adapters:
                continue
            if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
                found.append((module._modules, name, child))
            walk(child)

    walk(model)
    return found


def applied_adapters(layer: Any, ids: Mapping[str, int]) -> tuple[Any, ...]:
    """Which adapters a PEFT layer applies, and how strongly: equal for calls that are the same.

    `ids` tell adapters of the same name apart. In a mixed batch a hook gives the layer an adapter
    for each row.
    """
    if layer._disable_adapters:
        return (True,)
    choice, scaling = layer._active_adapter, vars(layer).get("scaling", {})
    names = (choice,) if isinstance(choice, str) else choice
    told: tuple[Any, ...] = (False, *[(one, ids.get(one), scaling.get(one)) for one in names])
    if layer._forward_pre_hooks:
        rows = [getattr(hook, "keywords", {}) for hook in layer._forward_pre_hooks.values()]
        told += (repr(rows),)
    return told


def key_conversions(model: PreTrainedModel) -> list[Any]:
    """What the loader does to a checkpoint's keys on their way to the model's names."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def renamed_key(
    key: str, model: PreTrainedModel, conversions: list[Any], known: dict[str, Any]
) -> tuple[str, str | None]:
    """The parameter that the loader makes of a checkpoint's key, as `from_pretrained` finds it.

    `known` is the model's state dict. If the tensor is converted, not only renamed, the name is
    that of the first parameter that comes of it, and the second value says which pattern matched.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    prefix = model.base_model_prefix
    name, pattern = rename_source_key(key, renamings, converters, prefix, known)
    if name not in known and key in known:
        name, pattern = rename_source_key(key, [], [], prefix, known)
    return name, pattern


def natural_order(key: str) -> Any:
    """The order in which the loader takes a checkpoint's keys: experts by number."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(key)


def convert_tensors(
    model: PreTrainedModel,
    conversions: list[Any],
    name: str,
    tensors: list[tuple[str, str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The parameters that the loader makes of tensors whose first parameter is `name`.

    `tensors` are (key, pattern that matched, tensor), in natural order.
    """
    import copy

    from transformers.core_model_loading import WeightConverter

    pattern = tensors[0][1]
    converter: Any = next(
        one
        for one in reversed(conversions)
        if isinstance(one, WeightConverter) and pattern in one.source_patterns
    )
    converter = copy.deepcopy(converter)
    for key, matched, tensor in tensors:
        converter.add_tensor(name, key, matched, tensor)
    made = converter.convert(name, model=model, config=model.config)
    return {to: one[0] if isinstance(one, list) else one for to, one in made.items()}


def reverted_tensors(
    model: PreTrainedModel, conversions: list[Any], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Parameters as a checkpoint holds them, by key, as `save_pretrained` writes them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if all(hasattr(one, "was_used") for one in conversions):
        used = [one for one in conversions if one.was_used()]
    else:  # before transformers 5.10 or so; names of TensorFlow's time are not written again
        used = list(get_model_conversion_mapping(model, add_legacy=False))
    model._weight_conversions = used
    try:
        return dict(revert_weight_conversion(model, tensors))
    finally:
        del model._weight_conversions


@contextlib.contextmanager
def only_adapter(layer: Any, name: str) -> Iterator[None]:
    """While inside, a PEFT layer applies that adapter, and no flag of its weights changes."""
    before = layer._active_adapter, layer._disable_adapters
    layer._active_adapter, layer._disable_adapters = [name], False
    try:
        yield
    finally:
        layer._active_adapter, layer._disable_adapters = before


def has_input_hooks(layer: torch.nn.Module) -> bool:
    """Whether something changes the inputs of the layer: PEFT does, for a mixed batch."""
    return bool(layer._forward_pre_hooks)


def has_adaption_prompt(model: torch.nn.Module) -> bool:
    """Whether PEFT has put its own modules in the place of attentions (peft 0.18 to 0.21)."""
    names = ("AdaptedAttention", "AdaptedAttentionGPT")
    return any(type(one).__name__ in names for one in model.modules())


def has_own_hooks(model: torch.nn.Module) -> bool:
    """Whether modules below the model have hooks of neither transformers nor PEFT."""
    return any(
        not str(getattr(hook, "func", hook).__module__).startswith(("transformers.", "peft."))
        for module in model.modules()
        if module is not model
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
