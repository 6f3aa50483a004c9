"""One contract for every storage format, against what bitsandbytes really makes."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import pytest
import torch

import tiny
from quantized import Made, make
from trimtab.errors import FormatFault
from trimtab.formats import (
    ALIGNMENT,
    DTYPE_BYTES,
    FORMATS,
    by_name,
    moving_bytes,
    resident_bytes,
    widened_bytes,
)
from trimtab.guard import stand_in

FOUR_BIT = ("nf4", "nf4-dq", "fp4", "fp4-dq")
ODD = [(3, 7), (1, 1)] if version("bitsandbytes") >= "0.50" else []
"""An odd number of weights: bitsandbytes 0.49 cannot pack one on a CPU."""
SHAPES = [(64, 128), (256, 64), (5, 64), (3, 6), (1030, 65), *ODD]
"""(rows, columns): whole blocks, parts of blocks, more than one nested block."""


class Books:
    """What a placement's `share` does, and how often it was asked."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.asked = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        for one in self.kept:
            if torch.equal(one, tensor):
                return one
        self.kept.append(tensor.clone())
        return self.kept[-1]


def split(made: Made, name: str, books: Books | None = None) -> tuple[dict[str, torch.Tensor], Any]:
    return FORMATS[name].split(made.module, made.weight, books or Books())


def parked(made: Made, name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Releases the layer; what stands for its tensors."""
    guards = {key: stand_in(one.shape, one.dtype, one.device) for key, one in parts.items()}
    FORMATS[name].release(made.module, made.weight, next(iter(guards.values())), guards)
    return guards


def fields(state: Any) -> dict[str, Any]:
    """All that a QuantState holds, tensors as they are."""
    if state is None:
        return {}
    return {
        **{key: value for key, value in vars(state).items() if key != "state2"},
        **{f"state2.{key}": value for key, value in fields(state.state2).items()},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)


formats = pytest.mark.parametrize("name", FORMATS)
devices = pytest.mark.parametrize("device", tiny.DEVICES)


@devices
@pytest.mark.parametrize("shape", SHAPES)
@formats
def test_the_layout_is_what_the_library_makes(
    name: str, shape: tuple[int, int], device: str
) -> None:
    made = make(name, shape, device)
    parts, _ = split(made, name)
    dtype = "bfloat16" if name == "plain" else "float32"
    layout = FORMATS[name].layout(shape, dtype)
    assert [(one.key, one.shape, one.dtype, one.nbytes) for one in layout] == [
        (key, tuple(one.shape), str(one.dtype).removeprefix("torch."), one.nbytes)
        for key, one in parts.items()
    ]
    aligned = sum(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in parts.values())
    assert moving_bytes(name, shape, dtype) == aligned


@devices
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_scales_have_no_more_digits_than_the_weights_had(
    name: str, dtype: torch.dtype, shape: tuple[int, int], device: str
) -> None:
    parts, _ = split(make(name, shape, device, dtype=dtype), name)
    packed, scales = FORMATS[name].layout(shape, "float32", str(dtype).removeprefix("torch."))
    assert (packed.rests, scales.rests) == ("", str(dtype).removeprefix("torch."))
    assert scales.dtype == "float32"
    assert 2 * scales.resting_bytes == scales.nbytes == parts["absmax"].nbytes
    short = parts["absmax"].to(dtype)
    assert torch.equal(short.float(), parts["absmax"])
    assert moving_bytes(name, shape, "float32", scales.rests) < resident_bytes(
        name, shape, "float32"
    ) or (parts["absmax"].nbytes <= ALIGNMENT)
    assert widened_bytes(name, shape, "float32", scales.rests) >= scales.nbytes
    assert widened_bytes(name, shape, "float32") == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("known", [None, "float32", "bfloat16", "int4"])
def test_only_scales_of_16_bit_weights_rest_in_a_smaller_dtype(
    name: str, known: str | None
) -> None:
    layout = FORMATS[name].layout((64, 128), "bfloat16", known)
    short = [part.key for part in layout if part.rests]
    assert short == (["absmax"] if known == "bfloat16" and name in ("nf4", "fp4") else [])


@devices
@formats
def test_the_first_part_becomes_the_data_of_the_parameter(name: str, device: str) -> None:
    made = make(name, (64, 128), device)
    parts, _ = split(made, name)
    assert next(iter(parts.values())).data_ptr() == made.weight.data_ptr()


@devices
@pytest.mark.parametrize("shape", [(64, 128), (96, 64)])
@formats
def test_a_weight_computes_the_same_from_other_memory(
    name: str, shape: tuple[int, int], device: str
) -> None:
    made = make(name, shape, device)
    wanted = make(name, shape, device).out()
    parts, recipe = split(made, name)
    moved = {key: one.clone() for key, one in parts.items()}
    for _ in range(3):
        parked(made, name, parts)
        assert all(one.untyped_storage().nbytes() <= 4 for one in tensors_of(made))
        views = {key: one.clone() for key, one in moved.items()}
        FORMATS[name].bind(made.module, made.weight, FORMATS[name].join(views, recipe))
        assert torch.equal(made.out(), wanted)
        assert made.weight.data_ptr() == next(iter(views.values())).data_ptr()
        assert all(same(views[key], one) for key, one in moved.items())


def tensors_of(made: Made) -> list[torch.Tensor]:
    """Every tensor that a layer holds but its bias."""
    state = getattr(made.module, "state", None)
    held = [made.weight.data, *(getattr(made.weight, key, None) for key in ("CB", "SCB"))]
    held += [state.CB, state.SCB] if state is not None else []
    for holder in (made.weight, made.module):
        held += fields(getattr(holder, "quant_state", None)).values()
    return [one for one in held if isinstance(one, torch.Tensor)]


@devices
@pytest.mark.parametrize("name", FOUR_BIT)
def test_the_original_state_is_never_changed(name: str, device: str) -> None:
    made = make(name, (64, 128), device)
    state = made.weight.quant_state
    before = copy.deepcopy(fields(state))
    parts, recipe = split(made, name)
    joined = FORMATS[name].join({key: one.clone() for key, one in parts.items()}, recipe)
    parked(made, name, parts)
    FORMATS[name].bind(made.module, made.weight, joined)
    made.out()
    parked(made, name, parts)
    assert joined[1] is not state
    after = fields(state)
    assert before.keys() == after.keys()
    assert all(same(before[key], after[key]) for key in before)


@devices
@pytest.mark.parametrize("name", FOUR_BIT)
def test_a_joined_state_says_all_that_the_original_says(name: str, device: str) -> None:
    made = make(name, (64, 128), device)
    parts, recipe = split(made, name)
    _, state = FORMATS[name].join({key: one.clone() for key, one in parts.items()}, recipe)
    theirs, ours = fields(made.weight.quant_state), fields(state)
    # A double-quantized state's inner one has a quant_type of None in both.
    assert theirs.keys() == ours.keys()
    assert {key for key in theirs if not same(theirs[key], ours[key])} == set()
    packed = made.weight.quant_state.as_dict(packed=True)
    assert state.as_dict(packed=True).keys() == packed.keys()


@devices
@pytest.mark.parametrize("name", FOUR_BIT)
def test_code_books_are_shared_and_counted(name: str, device: str) -> None:
    books = Books()
    recipes = [split(make(name, (64, 64), device, seed), name, books)[1] for seed in (1, 2, 3)]
    assert len({id(one.code) for one in recipes}) == 1
    assert len({id(one.nested_code) for one in recipes}) == 1
    assert sum(one.nbytes for one in books.kept) == FORMATS[name].constant_bytes((64, 64))
    assert books.asked == 3 * len(books.kept)


@pytest.mark.parametrize("name", ["plain", "int8"])
def test_other_formats_have_no_constants(name: str) -> None:
    books = Books()
    split(make(name, (64, 64), "cpu"), name, books)
    assert (FORMATS[name].constant_bytes((64, 64)), books.asked) == (0, 0)


@devices
def test_int8_leaves_no_copy_that_the_next_forward_would_take(device: str) -> None:
    made = make("int8", (64, 128), device)
    parts, recipe = split(made, "int8")
    joined = FORMATS["int8"].join({key: one.clone() for key, one in parts.items()}, recipe)
    FORMATS["int8"].bind(made.module, made.weight, joined)
    assert made.weight.CB is None
    assert made.weight.SCB is None
    made.out()
    guards = parked(made, "int8", parts)
    assert made.module.state.CB is guards["CB"]
    assert made.module.state.SCB is guards["SCB"]
    assert (made.weight.CB, made.weight.SCB) == (None, None)


@devices
def test_int8_scales_are_found_after_a_forward_too(device: str) -> None:
    fresh, used = make("int8", (64, 128), device), make("int8", (64, 128), device)
    used.out()
    assert used.weight.SCB is None
    theirs, ours = split(fresh, "int8")[0], split(used, "int8")[0]
    assert all(torch.equal(theirs[key], ours[key]) for key in ("CB", "SCB"))


@devices
@pytest.mark.parametrize("name", FOUR_BIT)
def test_a_released_layer_has_no_state(name: str, device: str) -> None:
    made = make(name, (64, 128), device)
    parts, _ = split(made, name)
    parked(made, name, parts)
    assert made.module.quant_state is None
    assert made.weight.quant_state is None


@pytest.mark.parametrize("name", ["gptq", "", "NF4"])
def test_an_unknown_format_is_named(name: str) -> None:
    with pytest.raises(
        FormatFault, match=f"the storage format {name!r} is not supported"
    ) as caught:
        by_name(name)
    assert caught.value.code == "TT509"
    assert caught.value.fix == "one of plain, nf4, nf4-dq, fp4, fp4-dq, int8"


def test_dtype_bytes_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES
