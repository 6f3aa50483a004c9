"""Binding and parking: whatever ends a forward, the layers are parked and the next is right."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from interrupts import at_each_line
from parked import Chain, hook_that_raises
from placing import placed
from trimtab import park as park_module
from trimtab import rooms, stream
from trimtab.errors import PlacementFault, RunningFault
from trimtab.guard import is_guarded

FORMATS = ("plain", "nf4", "nf4-dq", "int8")
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError, MemoryError)

# -------------------------------------------------------------------------------- the usual way


@pytest.mark.parametrize(("units", "slots"), [(5, 3), (4, 3), (6, 4), (3, 1), (2, 5)])
@pytest.mark.parametrize("name", FORMATS)
def test_parked_layers_compute_as_resident_ones(name: str, units: int, slots: int) -> None:
    chain = Chain(units, slots, name)
    assert all(chain.runs_right() for _ in range(3))


def test_nested_repeated_skipped_and_out_of_order() -> None:
    chain = Chain(5, 4)
    order = (0, 1, 2, 1, 4, 0, 3, 3)
    x, y = chain.inputs, chain.inputs
    with torch.no_grad():
        for index in order:
            x, y = chain.model[index](x), chain.true[index](y)
    assert torch.equal(x, y)
    assert chain.is_at_rest()


def test_a_unit_inside_a_unit_and_inside_itself() -> None:
    chain = Chain(5, 3)
    units = chain.gate.units
    with chain.gate.through(units[1]), chain.gate.through(units[3]), chain.gate.through(units[1]):
        assert [is_guarded(one.weight) for one in chain.layers] == [True, False, True, False, True]
        with torch.no_grad():
            found = chain.layers[1].made.module(chain.inputs)
    assert torch.equal(found, chain.true[1](chain.inputs))
    assert chain.is_at_rest()


# -------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("at", range(5))
def test_whatever_ends_a_forward_leaves_every_layer_parked(
    kind: type[BaseException], at: int
) -> None:
    chain = Chain()
    handle = chain.model[at][0].register_forward_hook(hook_that_raises(kind("here")))
    for _ in range(4):
        with pytest.raises(kind):
            chain.run()
        assert chain.is_at_rest()
    handle.remove()
    assert chain.runs_right()


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(5))
def test_a_store_that_fails_leaves_nothing_bound(kind: type[BaseException], at: int) -> None:
    chain = Chain()
    chain.layers[at].slab.fault = kind("gone")
    for _ in range(4):
        with pytest.raises(kind):
            chain.run()
        assert chain.is_at_rest()
    chain.layers[at].slab.fault = None
    assert chain.runs_right()


def test_a_bind_that_fails_is_rolled_back() -> None:
    chain = Chain()
    unit = chain.gate.units[2]
    unit.weights = [*unit.weights, chain.layers[4].parked]  # its bytes are not in this slab
    with pytest.raises(KeyError):
        chain.run()
    assert chain.is_at_rest()
    unit.weights = unit.weights[:1]
    assert chain.runs_right()


ENGINE = {one.__file__ for one in (park_module, stream, rooms, contextlib)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["plain", "nf4"])
def test_an_interrupt_at_any_line_costs_nothing(name: str) -> None:
    chains, wrong, lines = [Chain(3, 2, name)], [], 0
    for where in at_each_line(ENGINE, lambda: chains[-1].run()):
        lines += 1
        if not chains[-1].runs_right():
            wrong.append(where)
            chains.append(Chain(3, 2, name))
    assert wrong == []
    assert lines > 100


def test_what_looks_like_a_container_to_torch_is_handed_on_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' helper for export makes each cache one, in the whole process."""

    class Cache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    from torch.utils import _pytree

    monkeypatch.setattr(_pytree, "SUPPORTED_NODES", dict(_pytree.SUPPORTED_NODES))
    _pytree.register_pytree_node(
        Cache, lambda one: ([one.keys], None), lambda found, _: Cache(*found)
    )
    cache, ids = Cache(torch.ones(2)), torch.ones(3)
    given = {"cache": cache, "nested": [cache, (ids,)], "ids": ids}
    found = park_module.moved(given, torch.device("meta"))
    assert found["cache"] is cache is found["nested"][0]
    assert found["ids"].is_meta
    assert found["nested"][1][0].is_meta


def test_peft_leaves_no_hooks_after_an_exception_in_a_mixed_batch() -> None:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder), "b": tiny.adapter(folder, seed=2)}
    inputs, names = tiny.inputs(folder, batch=2), ["a", "b"]
    with placed(folder, "none", ("half",), adapters) as placement, torch.no_grad():
        wanted = placement.model(**inputs, adapter_names=names).logits
        layer = placement.model.get_base_model().model.layers[3]
        handle = layer.register_forward_hook(hook_that_raises(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            placement.model(**inputs, adapter_names=names)
        handle.remove()
        hooks = [m for m in placement.model.modules() if m._forward_pre_hooks]
        assert hooks == []
        placement.model(**tiny.inputs(folder, batch=3))
        assert torch.equal(placement.model(**inputs, adapter_names=names).logits, wanted)


# ------------------------------------------------------------------------- replaced parameters


def test_a_parameter_wrapped_anew_over_the_same_bytes_is_put_back() -> None:
    chain = Chain()

    def wrap(module: nn.Linear, *_: Any) -> None:
        module.weight = nn.Parameter(module.weight.data, requires_grad=False)

    handles = [one[0].register_forward_hook(wrap) for one in chain.model]
    assert all(chain.runs_right() for _ in range(3))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("when", ["between", "during"])
def test_another_parameter_in_its_place_is_refused(when: str) -> None:
    chain = Chain()
    module, own = chain.model[2][0], chain.model[2][0].weight

    def replace(*_: Any) -> None:
        module.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)

    handle = module.register_forward_hook(replace) if when == "during" else None
    if handle is None:
        replace()
    for _ in range(2):
        with pytest.raises(RunningFault) as caught:
            chain.run()
        assert (caught.value.code, caught.value.parts["weight"]) == ("TT602", "layers.3.weight")
        assert not any(slot.busy for slot in chain.ring.slots)
        assert is_guarded(own)
    if handle is not None:
        handle.remove()
    module.weight = own
    assert chain.runs_right()


@pytest.mark.parametrize("change", ["assign", "swap"])
def test_other_ways_to_replace_a_parameter_are_refused(change: str) -> None:
    chain = Chain()
    module, other = chain.model[1][0], nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    if change == "assign":
        module.load_state_dict({"weight": other, "bias": module.bias}, assign=True)
    else:
        torch.utils.swap_tensors(module.weight, other)
    with pytest.raises(RunningFault, match="is parked, and another parameter"):
        chain.run()


def test_loading_into_a_parked_weight_is_refused() -> None:
    chain = Chain()
    state = {name: torch.zeros_like(one) for name, one in chain.true.state_dict().items()}
    with pytest.raises(RuntimeError, match="which is parked"):
        chain.model.load_state_dict(state)
    assert torch.equal(chain.model[0][0].weight.float(), chain.true[0][0].weight.float())


# ----------------------------------------------------------------------------- the wrapping


def test_wrapping_twice_is_refused_and_undone_exactly() -> None:
    chain = Chain()
    before = [set(vars(module)) for module in Chain().true.modules()]
    with pytest.raises(PlacementFault) as caught:
        park_module.Wrapped(chain.model[0], contextlib.nullcontext)
    assert caught.value.code == "TT209"
    assert chain.runs_right()
    for one in chain.wrapped:
        one.remove()
        one.remove()
    assert [set(vars(module)) for module in chain.model.modules()] == before


def test_somebody_elses_wrapping_is_left_alone() -> None:
    chain = Chain()
    mine = vars(chain.model[0])["forward"] = lambda x: x
    chain.wrapped[0].remove()
    assert chain.model[0].forward is mine


def test_inputs_are_moved_and_a_closed_model_says_so() -> None:
    chain = Chain()
    chain.gate.closed = True
    for call in (chain.model, chain.model[0]):
        with pytest.raises(PlacementFault, match="is closed") as caught:
            call(chain.inputs)
        assert caught.value.code == "TT208"


# ------------------------------------------------------------------------------------ threads


def test_two_threads_run_one_after_the_other() -> None:
    chain = Chain(5, 3)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(15):
            if not torch.equal(chain.run(), chain.wanted):
                wrong.append(threading.current_thread().name)

    assert torch.equal(chain.run(), chain.wanted)
    threads = [threading.Thread(target=work) for _ in range(4)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert wrong == []
    assert chain.is_at_rest()


# -------------------------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    """A Llama of which half the layers and the head are streamed, with an adapter."""
    folder = tiny.checkpoint("llama")
    with placed(folder, "none", ("half", "head"), {"a": tiny.adapter(folder)}) as placement:
        yield placement


def test_gradients_are_refused_and_a_forward_that_records_them_is_not(llama: Any) -> None:
    inputs = tiny.inputs(tiny.checkpoint("llama"))
    with torch.no_grad():
        wanted = llama.model(**inputs).logits
    for name, weight in llama.model.named_parameters():
        weight.requires_grad_("lora_" in name)
    try:
        logits = llama.model(**inputs).logits
        assert torch.equal(logits, wanted)
        assert logits.requires_grad
        with pytest.raises(RunningFault) as caught:
            logits.sum().backward()
        assert caught.value.code == "TT604"
    finally:
        llama.model.requires_grad_(False).zero_grad()
    assert torch.equal(llama.model(**inputs).logits, wanted)


# ------------------------------------------------------------------------------------ copies


def test_a_placed_model_is_not_copied_or_pickled(llama: Any) -> None:
    for model in (llama.model, llama.model.get_base_model()):
        with pytest.raises(RunningFault) as caught:
            copy.deepcopy(model)
        assert caught.value.code == "TT605"
    with pytest.raises(RunningFault, match="cannot be pickled"):
        torch.save(llama.model.get_base_model(), "/dev/null")


def test_a_copied_unit_is_a_plain_module_that_computes_the_same(llama: Any) -> None:
    head = llama.model.get_base_model().lm_head
    twin = copy.deepcopy(head)
    x = torch.randn(1, 3, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(twin(x), head(x))
    assert "forward" not in vars(twin) or vars(twin)["forward"].__self__ is twin
    assert not is_guarded(twin.weight)
    assert is_guarded(head.weight)


# ----------------------------------------------------------------------- compiling, generating


def test_slots_made_under_inference_mode_serve_outside_of_it() -> None:
    folder = tiny.checkpoint("llama")
    inputs = tiny.inputs(folder)
    with torch.inference_mode():
        placement = placed(folder, "nf4", ("half",), {"a": tiny.adapter(folder)})
        wanted = placement.model(**inputs).logits.clone()
    with placement, torch.no_grad():
        assert torch.equal(placement.model(**inputs).logits, wanted)
        assert torch.equal(placement.model(**inputs).logits, wanted)


def test_a_compiled_streamed_model_equals_the_eager_one() -> None:
    chain = Chain(3, 2)
    compiled = torch.compile(chain.model, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(chain.inputs), chain.wanted)
        assert torch.equal(compiled(chain.inputs), chain.wanted)
    assert chain.is_at_rest()
    torch._dynamo.reset()


def test_generate_with_a_static_cache_is_not_compiled(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers compiles 16-bit models with a static cache; it cannot see the streaming."""

    def no(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled")

    folder = tiny.checkpoint("llama")
    inputs = tiny.inputs(folder)
    stock = tiny.reference(folder, "none", {"a": tiny.adapter(folder)})
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    monkeypatch.setattr(torch, "compile", no)
    assert llama.model.generation_config.disable_compile
    stock.generation_config.disable_compile = True
    assert torch.equal(llama.model.generate(**inputs, **how), stock.generate(**inputs, **how))
