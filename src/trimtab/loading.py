"""transformers' own loader, called so that it loads once, and what it says checked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trimtab import foreign
from trimtab.complete import check_files, wrong_shape
from trimtab.errors import (
    EnvironmentFault,
    FormatFault,
    MemoryFault,
    TrimtabError,
    chain,
    first_line,
    first_three,
)
from trimtab.plan import Plan
from trimtab.quantize import quantization_config
from trimtab.readahead import read_ahead
from trimtab.uploads import uploading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trimtab.checkpoint import Checkpoint
    from trimtab.outline import Outline
    from trimtab.rooms import Rooms


def load_model(
    checkpoint: Checkpoint, outline: Outline, plan: Plan, rooms: Rooms
) -> PreTrainedModel:
    """The model on the device that runs; weights that have a home in `rooms` go there.

    Raises:
        FormatFault: TT505 missing tensors, TT506 tensors of the wrong shape.
        MemoryFault: TT404, the device has less memory than the plan was made for.
    """
    from trimtab.skeleton import model_class_of

    check_files(checkpoint, outline)
    model_class = model_class_of(checkpoint)
    asked = where_and_how(checkpoint, model_class, plan, rooms)
    with (
        translated(plan),
        foreign.quiet_transformers(),
        reading_ahead(checkpoint, plan),
        uploading(rooms.device),
    ):
        model, said = model_class.from_pretrained(
            checkpoint.folder or checkpoint.source,
            dtype=getattr(torch, plan.dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else it raises with a table and no names
            **asked,
        )
    check_loaded(said, plan, {alias for alias, _ in outline.ties})
    return model


def where_and_how(
    checkpoint: Checkpoint, model_class: type[PreTrainedModel], plan: Plan, rooms: Rooms
) -> dict[str, Any]:
    """What `from_pretrained` is asked for: a device map, and how what is quantized is.

    With a GPU a looked-up table goes straight to host memory, since it may be larger than all that
    the GPU has; bitsandbytes' quantizers want that allowed, though no table is quantized. How a
    stored quantized checkpoint is loaded is taken from its config alone.
    """
    from trimtab.skeleton import config_of

    device_map: dict[str, Any] = {"": rooms.device}
    asked: dict[str, Any] = {"device_map": device_map}
    split = rooms.device.type == "cuda" and bool(rooms.tables)
    if split:
        device_map.update(dict.fromkeys(rooms.tables, "cpu"))
    if checkpoint.quantization is None:
        quantization = quantization_config(plan.quant, plan.dtype)
        if split and quantization is not None:
            quantization.llm_int8_enable_fp32_cpu_offload = True
        asked["quantization_config"] = quantization
    elif split:
        config: Any = config_of(checkpoint, model_class)
        config.quantization_config = {
            **checkpoint.quantization, "llm_int8_enable_fp32_cpu_offload": True
        }  # fmt: skip
        asked["config"] = config
    return asked


def reading_ahead(checkpoint: Checkpoint, plan: Plan) -> contextlib.AbstractContextManager[None]:
    """While inside, the files come into half of the RAM that the plan leaves, ahead of the loader.

    For a GPU: on a CPU the threads would take what a quantizer needs, and what is not quantized may
    stay in the mapped files.
    """
    import psutil

    if plan.runs == "cpu":
        return contextlib.nullcontext()
    spare = psutil.virtual_memory().available - plan.totals.get("cpu", 0)
    return read_ahead(checkpoint, int(spare) // 2)


def check_loaded(said: Mapping[str, Any], plan: Plan, tied: set[str]) -> None:
    """Raises if the loader left a parameter without its weights."""
    missing = sorted(set(said["missing_keys"]) - tied)
    if missing:
        raise FormatFault(
            "TT505",
            f"{plan.model} lacks {len(missing)} tensors that {plan.architecture} needs: "
            f"{first_three(missing)}",
            why="transformers fills them with random numbers and warns",
            fix="use the versions that the checkpoint was written with, or download it again",
            tensors=missing,
        )
    if said["mismatched_keys"]:
        name, found, wanted = min(said["mismatched_keys"], key=lambda one: one[0])
        raise wrong_shape(name, found, wanted, plan.model)
    if said.get("error_msgs"):
        raise FormatFault("TT502", f"{plan.model} cannot be loaded: {said['error_msgs']}")


@contextlib.contextmanager
def translated(plan: Plan) -> Iterator[None]:
    """The one boundary at which what transformers raises while loading becomes trimtab's."""
    try:
        yield
    except TrimtabError:
        raise
    except torch.OutOfMemoryError as error:
        said = f"the GPU ran out of memory while loading {plan.model}"
        raise out_of_gpu_memory(said, error) from error
    except ImportError as error:
        raise EnvironmentFault(
            "TT101", f"loading {plan.model} needs a package: {first_line(error)}"
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        for cause in chain(error):
            if isinstance(cause, TrimtabError):
                raise cause from None
        raise FormatFault(
            "TT502",
            f"{plan.model} cannot be loaded: {type(error).__name__}: {first_line(error)}",
            fix="`trimtab explain` reads the traceback (TRIMTAB_DEBUG=1 shows it)",
        ) from error


def out_of_gpu_memory(what: str, error: torch.OutOfMemoryError) -> MemoryFault:
    """What running out of GPU memory is said as, wherever it happens."""
    return MemoryFault(
        "TT404",
        what,
        why=first_line(error),
        fix="another program may use the GPU: plan again with a smaller --gpu",
    )


def settle(model: PreTrainedModel, plan: Plan) -> contextlib.ExitStack:
    """Makes a loaded model ready to run; the stack undoes what is not the model's own."""
    undo = contextlib.ExitStack()
    model.eval().requires_grad_(False)
    # transformers compiles a model with a static cache, and cannot see that layers are streamed.
    model.generation_config.disable_compile = True
    undo.enter_context(quiet_casts())
    if plan.runs == "cpu":
        foreign.keep_four_bit_unpacked(model)
    return undo


@contextlib.contextmanager
def quiet_casts() -> Iterator[None]:
    """bitsandbytes says of each int8 product in bfloat16 that it casts: thousands of lines."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")

    def wanted(record: logging.LogRecord) -> bool:
        return "inputs will be cast" not in record.getMessage()

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
