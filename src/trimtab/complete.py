"""Whether a checkpoint's files hold what a model needs of them, by their headers alone.

What the loader says by itself is left to it: a plain tensor that is missing or of the wrong shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.checkpoint import Checkpoint
from trimtab.errors import FormatFault, first_three
from trimtab.outline import Outline
from trimtab.quantize import is_part, part_names


def check_files(checkpoint: Checkpoint, outline: Outline) -> None:
    """Compares the tensors of a checkpoint with an outline of it.

    Raises:
        FormatFault: TT505, a weight that is stored quantized lacks a part; TT506, one that is to be
            quantized has the wrong shape; TT509, the config says nothing of quantized weights.
    """
    if checkpoint.quantization is not None:
        _check_parts(checkpoint, outline)
        return
    part = next((key for key in checkpoint.tensors if is_part(key)), None)
    if part is not None:
        raise FormatFault(
            "TT509",
            f"{checkpoint.source} holds {part}, a part of a quantized weight, and its config has "
            "no quantization_config",
            why="the packed bytes would be taken for weights",
            fix="take the config.json that was written with these files",
        )
    _check_shapes(checkpoint, outline)


def _check_shapes(checkpoint: Checkpoint, outline: Outline) -> None:
    """Raises if a tensor that is to be quantized has the wrong shape: quantizers take any."""
    for spec in outline.weights:
        tensor = checkpoint.tensors.get(spec.name)
        if tensor is None or spec.storage == "plain":
            continue
        # GPT-2 and its like store them the other way round, and the loader turns them.
        if tensor.shape not in (spec.shape, spec.shape[::-1]):
            raise wrong_shape(spec.name, tensor.shape, spec.shape, checkpoint.source)


def _check_parts(checkpoint: Checkpoint, outline: Outline) -> None:
    """Raises if a weight that is stored quantized lacks a part: the loader would name none."""
    missing = []
    for spec in outline.weights:
        if spec.storage == "plain":
            continue
        parts = part_names(spec.name, spec.storage)
        lacking = [one for one in parts if one not in checkpoint.tensors]
        # Where the loader renames weights, all are elsewhere.
        if len(lacking) < len(parts):
            missing += lacking
    if missing:
        raise FormatFault(
            "TT505",
            f"{checkpoint.source} lacks {len(missing)} tensors of its quantized weights: "
            f"{first_three(missing)}",
            why="its files were not written whole, or its config.json is another checkpoint's",
            fix="download the checkpoint again, or write it again with save_quantized",
            tensors=missing,
        )


def wrong_shape(name: str, found: Sequence[int], wanted: Sequence[int], model: str) -> FormatFault:
    return FormatFault(
        "TT506",
        f"{name} has the shape {list(found)} in {model}, the config asks for {list(wanted)}",
        fix="use the config that belongs to these weights",
    )
