"""A parked weight answers truly or refuses: reads, writes, and a sweep over torch's functions."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import get_testing_overrides, resolve_name

import tiny
from quantized import Parked, park
from trimtab.errors import RunningFault, TrimtabError
from trimtab.formats import FORMATS
from trimtab.guard import guard_class, is_guarded, materialize, plain_class

every_format = pytest.mark.parametrize("name", FORMATS)
devices = pytest.mark.parametrize("device", tiny.DEVICES)
FOUR_BIT = ("nf4", "nf4-dq", "fp4", "fp4-dq")


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, NaN equal to NaN, tensors also in shape, dtype and layout."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a view is made anew, warnings and all
            one, other = (materialize(x) if is_guarded(x) else x for x in (one, other))
        if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
            return False
        if one.is_meta or other.is_meta:
            return one.is_meta == other.is_meta
        if one.layout is not torch.strided:
            return same(one.to_dense(), other.to_dense())
        both = [x.dequantize() if x.is_quantized else x.detach() for x in (one, other)]
        return torch.equal(*(torch.nan_to_num(x) if x.is_floating_point() else x for x in both))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one).__name__ == type(other).__name__ and repr(one) == repr(other)


def still_parked(layer: Parked) -> bool:
    """Neither the stand-in nor the store was touched."""
    twin = park_like(layer)
    return (
        is_guarded(layer.weight)
        and layer.made.module.weight is layer.parked.parameter
        and torch.equal(layer.slab.buffer, twin.slab.buffer)
        and same(layer.weight, twin.weight)
    )


def park_like(layer: Parked) -> Parked:
    rows, columns = layer.made.module.out_features, layer.made.module.in_features
    return park(layer.parked.storage.name, (rows, columns), layer.weight.device.type)


# ------------------------------------------------------------------------- what it seems to be


@devices
@every_format
def test_it_seems_to_be_the_weight_and_holds_one_element(name: str, device: str) -> None:
    layer = park(name, device=device)
    weight, true = layer.weight, layer.true
    assert type(weight).__name__ == type(true).__name__
    assert isinstance(weight, type(true))
    assert isinstance(weight, nn.Parameter)
    for fact in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad"):
        assert getattr(weight, fact) == getattr(true, fact), fact
    assert (weight.numel(), weight.element_size(), weight.size(), weight.dim(), len(weight)) == (
        true.numel(), true.element_size(), true.size(), true.dim(), len(true),
    )  # fmt: skip
    assert (weight.is_contiguous(), weight.stride(), weight.storage_offset()) == (
        True, true.stride(), 0,
    )  # fmt: skip
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == true.element_size()
        assert set(weight.stride()) == {0}
        one = weight.as_strided((1,), (1,))
    assert bool(one.isnan()) is true.is_floating_point()
    assert layer.slab.reads == 0


@every_format
def test_aliases_cost_no_read(name: str) -> None:
    layer = park(name)
    weight = layer.weight
    aliases = [weight.detach(), weight.data, weight.data.detach(), weight.to(weight.device)]
    aliases += [weight.to("cpu"), weight.to(weight.dtype), weight.cpu(), weight.to(weight)]
    assert layer.slab.reads == 1  # weight.to(other) reads the other
    assert all(is_guarded(one) and one.shape == weight.shape for one in aliases)
    weight.data = weight
    weight.data = weight.data
    assert still_parked(layer)
    assert all(same(one, layer.true.data) for one in aliases)


def test_classes_are_made_once_and_know_their_plain_class() -> None:
    assert guard_class(nn.Parameter) is guard_class(nn.Parameter)
    assert plain_class(guard_class(nn.Parameter)) is nn.Parameter
    assert plain_class(nn.Parameter) is nn.Parameter
    assert not is_guarded(nn.Parameter(torch.zeros(1)))


# ------------------------------------------------------------------------------------ reads

READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda w: w.clone(),
    "float": lambda w: w.float(),
    "data.float": lambda w: w.data.float(),
    "to another dtype": lambda w: w.to(torch.float64),
    "sum": lambda w: w.sum(),
    "item": lambda w: w[3, 0].item(),
    "tolist": lambda w: w.tolist(),
    "row": lambda w: w[3],
    "mask": lambda w: w[w > 0],
    "view": lambda w: w.view(-1),
    "turned": lambda w: w.t(),
    "turned.is_contiguous": lambda w: (w.t().is_contiguous(), w.t().stride()),
    "rows": lambda w: list(w[:3]),
    "chunks": lambda w: w.chunk(2),
    "iadd of another": lambda w: torch.zeros_like(w, dtype=torch.float64).add_(w),
    "copy into another": lambda w: torch.empty_like(w).copy_(w),
    "equal": lambda w: torch.equal(w, w.clone()),
    "isnan": lambda w: w.isnan().any(),
    "repr": lambda w: repr(w),
    "numpy": lambda w: w.detach().view(torch.uint8).numpy().tobytes(),
    "dlpack": lambda w: torch.from_dlpack(w),
    "stack": lambda w: torch.stack([w, w]),
    "where": lambda w: torch.where(w > 0, w, torch.zeros_like(w)),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "as_subclass": lambda w: w.as_subclass(torch.Tensor),
    "as_tensor": lambda w: torch.as_tensor(w) + 0,
    "aten": lambda w: torch.ops.aten.sum.default(w.double()),
    "deepcopy": lambda w: copy.deepcopy(w),
    "deepcopy of an alias": lambda w: copy.deepcopy(w.data),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "a parameter of its data": lambda w: nn.Parameter(w.data, requires_grad=False) + 0,
}


@pytest.mark.parametrize("read", READS)
@every_format
def test_a_read_gives_the_true_bytes(name: str, read: str) -> None:
    layer = park(name)
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        found, wanted = READS[read](layer.weight), READS[read](layer.true)
    assert same(found, wanted)
    assert layer.slab.reads > 0
    assert still_parked(layer)


@devices
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reads_in_computation(mode: Any, device: str) -> None:
    layer = park("plain", device=device)
    w, t, x = layer.weight, layer.true, layer.made.inputs
    ids = torch.tensor([0, 3, 3], device=device)
    with mode():
        assert same(functional.linear(x, w), functional.linear(x, t))
        assert same(x @ w.T, x @ t.T)
        assert same(torch.matmul(x, w.t()), torch.matmul(x, t.t()))
        assert same(functional.embedding(ids, w), functional.embedding(ids, t))
        assert same(torch.einsum("bi,oi->bo", x, w), torch.einsum("bi,oi->bo", x, t))
        assert same(layer.made.module(x), layer.twin.module(x))
        assert same(
            torch.func.functional_call(layer.made.module, {"weight": w}, (x,)), layer.twin.out()
        )


@devices
@pytest.mark.parametrize("name", FOUR_BIT)
def test_a_four_bit_weight_is_dequantized_from_the_true_state(name: str, device: str) -> None:
    import bitsandbytes as bnb

    layer = park(name, device=device)
    w, t, x = layer.weight, layer.true, layer.made.inputs
    dequantize = bnb.functional.dequantize_4bit
    assert same(dequantize(w.data, w.quant_state), dequantize(t.data, t.quant_state))
    assert same(layer.made.out(), layer.twin.out())
    assert is_guarded(w)
    call = torch.ops.bitsandbytes.dequantize_4bit
    fixed = (t.quant_state.blocksize, name[:3], t.quant_state.shape, t.quant_state.dtype)
    if not name.endswith("-dq"):
        assert same(
            call(w, w.quant_state.absmax, *fixed), call(t.data, t.quant_state.absmax, *fixed)
        )
    assert same(bnb.matmul_4bit(x, w.t(), w.quant_state), bnb.matmul_4bit(x, t.t(), t.quant_state))
    with pytest.raises(RunningFault, match="setting quant_state would write to"):
        w.quant_state = None


@devices
def test_an_int8_layer_computes_from_guarded_state(device: str) -> None:
    layer = park("int8", device=device)
    module = layer.made.module
    assert is_guarded(module.state.CB)
    assert same(module.state.CB.float() * module.state.SCB[:, None], layer.true.CB.float() * (
        layer.true.SCB[:, None]
    ))  # fmt: skip
    private = copy.deepcopy(layer.weight)
    assert same(private.SCB, layer.true.SCB)
    assert same(private.CB, layer.true.CB)


@every_format
def test_a_state_dict_has_lazy_aliases_that_save_the_true_bytes(name: str) -> None:
    layer, file, wanted = park(name), io.BytesIO(), io.BytesIO()
    state = layer.made.module.state_dict()
    assert is_guarded(state["weight"])
    assert layer.slab.reads <= 4 * name.endswith(("nf4", "fp4", "-dq"))  # the quantization state
    torch.save(state, file)
    torch.save(layer.twin.module.state_dict(), wanted)
    file.seek(0), wanted.seek(0)
    saved, true = (torch.load(one, weights_only=False) for one in (file, wanted))
    assert saved.keys() == true.keys()
    assert all(same(saved[key], true[key]) for key in true)


@every_format
def test_a_copied_layer_is_a_plain_layer_with_the_true_weight(name: str) -> None:
    layer = park(name)
    twin = copy.deepcopy(layer.made.module)
    assert not is_guarded(twin.weight)
    with torch.no_grad():
        assert same(twin(layer.made.inputs), layer.twin.out())
    assert still_parked(layer)


# ------------------------------------------------------------------------------------ writes

WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda w: w.copy_(torch.zeros_like(w)),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.detach().fill_(1),
    "add_": lambda w: w.add_(1),
    "+=": lambda w: w.__iadd__(1),
    "setitem": lambda w: w.__setitem__(0, 1),
    "setitem of data": lambda w: w.data.__setitem__((0, 0), 1),
    "a row": lambda w: w[0].fill_(0),
    "a view of data": lambda w: w.data.view(-1).zero_(),
    "rows": lambda w: [row.zero_() for row in w[:3]],
    "a view of a view": lambda w: w.data.t()[0].zero_(),
    "out": lambda w: torch.add(w.clone(), 1, out=w),
    "outs": lambda w: torch.max(w, 0, out=(w[0], torch.empty(0, dtype=torch.long))),
    "inplace": lambda w: functional.threshold(w, 0, 0, inplace=True),
    "inplace by position": lambda w: functional.relu(w.data, True),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "aten": lambda w: torch.ops.aten.add_.Tensor(w, torch.ones_like(w)),
    "data": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "set_": lambda w: w.set_(torch.zeros_like(w)),
    "resize_": lambda w: w.resize_(2),
    "t_": lambda w: w.detach().t_(),
    "share_memory_": lambda w: w.share_memory_(),
    "data_ptr": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
    "vector": lambda w: nn.utils.vector_to_parameters(torch.zeros(w.numel()), [w]),
    "constant_": lambda w: nn.init.constant_(w, 1),
    "zeros_": lambda w: nn.init.zeros_(w),
}
FLOAT_WRITES: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda w: nn.init.normal_(w),
    "uniform_": lambda w: nn.init.uniform_(w),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w),
    "xavier_normal_": lambda w: nn.init.xavier_normal_(w),
    "eye_": lambda w: nn.init.eye_(w),
    "renorm": lambda w: functional.embedding(torch.tensor([0]), w, max_norm=0.1),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("name", "write"),
    [(name, write) for name in ("plain", "nf4", "int8") for write in WRITES]
    + [("plain", write) for write in FLOAT_WRITES],
)
def test_a_write_is_refused_and_changes_nothing(name: str, write: str, mode: Any) -> None:
    layer = park(name)
    with mode(), pytest.raises(RunningFault) as caught:
        (WRITES | FLOAT_WRITES)[write](layer.weight)
    assert caught.value.code == "TT601"
    assert caught.value.parts["weight"] == "layer.weight"
    assert still_parked(layer)


@pytest.mark.parametrize("change", ["half", "share_memory", "reset_parameters", "double"])
def test_a_module_wide_change_is_refused(change: str) -> None:
    layer = park("plain")
    with pytest.raises(RunningFault, match=r"layer\.weight, which is parked \[TT601\]"):
        getattr(layer.made.module, change)()
    assert still_parked(layer)


def test_a_copy_that_is_asked_for_is_a_copy() -> None:
    layer = park("plain")
    made = layer.weight.to("cpu", copy=True)
    assert not is_guarded(made)
    assert same(made, layer.true)


def test_moving_a_module_to_where_it_is_changes_nothing() -> None:
    layer = park("plain")
    layer.made.module.to("cpu").to(torch.bfloat16).eval().requires_grad_(False)
    assert still_parked(layer)


# -------------------------------------------------------------------------------------- the sweep

UNDEFINED = (
    "empty", "resize", "fbgemm", "is_set_to", "__dlpack__", "chalf", "backward", "Tensor.set_",
    "pin_memory", "_standard_gamma", "distributed", "_cdata", "_version",
)  # fmt: skip
"""Parts of names whose results are no function of the bytes, or cannot be compared."""

CASES: list[Callable[..., tuple[Any, ...]]] = [
    lambda w, o, x, i: (w,),
    lambda w, o, x, i: (w, 0),
    lambda w, o, x, i: (w, w),
    lambda w, o, x, i: (o, w),
    lambda w, o, x, i: (x, w),
    lambda w, o, x, i: (i, w),
    lambda w, o, x, i: (w, 1, i),
    lambda w, o, x, i: ([w, o],),
    lambda w, o, x, i: (o > 0, w, o),
    lambda w, o, x, i: (o, 0, i, w[:2]),
]


def outcome(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "returned", call(*args)
    except TrimtabError as error:
        return "refused", error.code
    except Exception as error:
        return "raised", type(error).__name__


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for call in get_testing_overrides():
        name = resolve_name(call) or repr(call)
        if not any(part in name for part in UNDEFINED):
            yield name, call


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_no_function_of_torch_is_silently_wrong(part: int) -> None:
    """What a function returns for the real weight, it returns for the parked one, or refuses."""
    wrong, compared, layer = [], 0, park("plain", (8, 64))
    store = layer.slab.buffer.clone()
    for name, call in list(functions())[part::4]:
        for number, case in enumerate(CASES):
            true = layer.true
            given = [(torch.ones_like(true), torch.ones(4, 64, dtype=true.dtype),
                      torch.tensor([0, 1])) for _ in range(2)]  # fmt: skip
            how, wanted = outcome(call, case(true, *given[0]))
            got, found = outcome(call, case(layer.weight, *given[1]))
            if how == "returned":
                compared += 1
                if got == "raised" or (got == "returned" and not same(found, wanted)):
                    wrong.append((name, number, got))
            elif got == "returned":
                wrong.append((name, number, f"{how} {wanted} for the real weight"))
            if not (is_guarded(layer.weight) and torch.equal(layer.slab.buffer, store)):
                wrong.append((name, number, "damaged"))
            if how == "returned" or got != how:
                layer = park("plain", (8, 64))  # the real one may have been written to
    assert wrong == []
    assert compared > 200
