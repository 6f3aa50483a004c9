"""What the device that runs holds beside the weights, in bytes, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.formats import DTYPE_BYTES
from trimtab.outline import Outline
from trimtab.plan import WeightSpec

LOADING_FACTORS = {"int8": 2.5}
LOADING_FACTOR = 1.4
"""Of the largest quantized weight, while it loads: in 16 bits, and what it is quantized to. int8
takes a copy in float16 besides. Measured on a CPU: 1.3 for NF4, 1.4 with double quant, 2.5."""

FUSING_FACTOR = 2.5
"""Of the largest fused expert tensor: single experts, their concatenation, the stack (measured)."""

INT8_ON_CPU = 10
"""Bytes a weight while bitsandbytes multiplies with int8 on a CPU (measured, 0.49 and 0.50)."""


def kv_cache(outline: Outline, context: int, batch: int) -> int:
    """Keys and values of `context` tokens in `batch` sequences.

    A sliding layer keeps its window, a layer that reuses another's keys and values nothing.
    """
    item = DTYPE_BYTES[outline.dtype]
    return sum(
        2 * batch * min(context, layer.window or context) * layer.kv_heads * layer.head_dim * item
        for layer in outline.cache
        if not layer.shared
    )


def logits(outline: Outline, batch: int) -> int:
    """One row a sequence, in the dtype computed in and in float32, which sampling wants."""
    return batch * outline.vocab * (4 + DTYPE_BYTES[outline.dtype])


def activations(outline: Outline, context: int, batch: int) -> int:
    """The prefill's peak, the whole context in one forward.

    For each token: the residual, its norm (twice in float32), query, keys, values and the
    attention's result, about 6 hidden widths in the dtype and 2 in float32; three of the widest
    projection of a layer (gate, up, their product); three rows of each table that is wider than
    the model (per-layer inputs: the row, its projection, their sum). And for each sequence the
    attention mask, a byte a pair of tokens.
    """
    item = DTYPE_BYTES[outline.dtype]
    rows = 0
    for unit in outline.units:
        shapes = [one.shape for one in unit.weights if len(one.shape) == 2]
        if unit.kind == "table":
            rows += sum(shape[1] for shape in shapes if shape[1] > outline.hidden)
    token = outline.hidden * (6 * item + 2 * 4) + 3 * (_widest(outline) + rows) * item
    return batch * (context * token + context * context)


def adapting(outline: Outline, context: int, batch: int) -> int:
    """A low-rank adapter's input in float32, at the widest projection, for the whole context."""
    return batch * context * _widest(outline) * 4


def _widest(outline: Outline) -> int:
    """The largest width of a layer's projections, in or out."""
    shapes = (
        one.shape
        for unit in outline.units
        if unit.kind == "layer"
        for one in unit.weights
        if len(one.shape) == 2
    )
    return max([outline.hidden, *(max(shape) for shape in shapes)])


def decoding(weights: Iterable[WeightSpec], runs: str) -> int:
    """The largest quantized weight, decoded to multiply with it."""
    return max((_decoded(one, runs) for one in weights if one.storage != "plain"), default=0)


def _decoded(weight: WeightSpec, runs: str) -> int:
    if runs == "cpu" and weight.storage == "int8":
        return weight.numel * INT8_ON_CPU
    scales = weight.numel // 16 if weight.storage.endswith("-dq") else 0
    return weight.numel * DTYPE_BYTES[weight.dtype] + scales


def loading(weights: Iterable[WeightSpec], *, resident: bool) -> int:
    """What is on the device beside the finished weights while the loader fills them.

    A plain weight arrives as it will stay; it is beside the others only until it leaves.
    """
    return max((_loading(one, resident) for one in weights), default=0)


def _loading(weight: WeightSpec, resident: bool) -> int:
    nbytes = weight.numel * DTYPE_BYTES[weight.dtype]
    if weight.storage != "plain":
        return int(nbytes * LOADING_FACTORS.get(weight.storage, LOADING_FACTOR))
    stays = nbytes if resident else 0
    return int(nbytes * (FUSING_FACTOR if len(weight.shape) == 3 else 1)) - stays
