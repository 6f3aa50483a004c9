"""Adapters within a cap: exact, the least recently used out first, never more than the cap.

On a CPU nothing needs to move; here the cap is set past the plan, and both places are its memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from placing import placed
from residents import generated
from test_decode import captured
from trimtab.adapted import adapter_state
from trimtab.adapters import load_tensors, read_adapter
from trimtab.api import plan
from trimtab.errors import MemoryFault
from trimtab.placement import Placement
from trimtab.store import Span

NAMES = "abcde"


@functools.cache
def folder() -> Path:
    return tiny.checkpoint("llama")


def adapters() -> dict[str, Path]:
    kinds = ("lora", "dora", "lora", "lora", "dora")
    return {
        name: tiny.adapter(folder(), kind, seed=number + 1)
        for number, (name, kind) in enumerate(zip(NAMES, kinds, strict=True))
    }


@functools.cache
def wanted() -> dict[str, torch.Tensor]:
    """Logits of each adapter, with all of them where they were loaded."""
    with placed(folder(), "nf4", ("half",), adapters()) as placement:
        return {name: answer(placement, name) for name in NAMES}


def answer(placement: Placement, name: str) -> torch.Tensor:
    with placement.using(name) as model:
        return tiny.logits(model, tiny.inputs(folder(), device=str(placement.device)))


@functools.cache
def size() -> int:
    """Bytes of the largest of them."""
    with placed(folder(), "none", (), {"b": adapters()["b"]}) as placement:
        return placement.shelf.here


@pytest.fixture
def capped() -> Iterator[Placement]:
    """Room for two of five, from the first on."""
    with placed(folder(), "nf4", ("half",)) as placement:
        placement.shelf.cap = 2 * size()
        for name, path in adapters().items():
            placement.add_adapter(name, path)
        yield placement


def addresses(placement: Placement, name: str) -> list[int]:
    return [
        one.data_ptr()
        for full, one in placement.model.named_parameters()
        if f".{name}." in full or full.endswith(f".{name}")
    ]


def test_the_least_recently_used_rest_and_come_back_as_they_were(capped: Placement) -> None:
    shelf = capped.shelf
    assert shelf.resting == ("a", "b", "c")
    for name, resting in (("a", "bcd"), ("e", "bcd"), ("b", "cda"), ("e", "cda"), ("d", "cab")):
        assert torch.equal(answer(capped, name), wanted()[name])
        assert shelf.resting == tuple(resting)
    assert shelf.here <= shelf.peak <= shelf.cap
    report = capped.report()
    assert (report.adapter_bytes, report.adapter_peak) == (shelf.here, shelf.peak)
    assert report.resting == ("c", "a", "b")


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=12))
def test_any_order_of_use(capped: Placement, order: list[str]) -> None:
    for name in order:
        assert torch.equal(answer(capped, name), wanted()[name])
        used = list(dict.fromkeys(reversed(order[: order.index(name) + 1])))
        assert name not in capped.shelf.resting
        assert used[0] == name
    assert capped.shelf.peak <= 2 * size()


def test_an_adapter_whose_rest_is_interrupted_comes_back_whole(
    capped: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, calls = Span.view, itertools.count()

    def press(span: Span, buffer: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return view(span, buffer)

    assert capped.shelf.resting == ("a", "b", "c")
    with monkeypatch.context() as patch:
        patch.setattr(Span, "view", press)
        with pytest.raises(KeyboardInterrupt):
            answer(capped, "a")  # d leaves for it
    assert "d" in capped.shelf.resting
    for name in ("d", "a", "e", "d"):
        assert torch.equal(answer(capped, name), wanted()[name])


def test_every_weight_stays_real_and_pefts_own(capped: Placement) -> None:
    before = {name: id(one) for name, one in capped.model.named_parameters()}
    for name in ("a", "c", "a"):
        answer(capped, name)
        assert {name: id(one) for name, one in capped.model.named_parameters()} == before
    for name, path in adapters().items():
        header = read_adapter(path)
        found = adapter_state(capped.model, header, name)
        tensors = load_tensors(header)
        assert len(found) == len(tensors)
        for key, one in tensors.items():  # a DoRA's magnitudes are a module here
            assert torch.equal(found[key if key in found else f"{key}.weight"], one)


def test_a_mixed_batch_brings_its_adapters(capped: Placement) -> None:
    capped.remove_adapter("b")  # PEFT mixes no DoRA
    capped.remove_adapter("e")
    asked = tiny.inputs(folder())
    for rows in (["a", "c"], ["d", "__base__"], ["c", "d"]):
        with torch.no_grad():
            found = capped.model(**asked, adapter_names=rows).logits
        for row, name in enumerate(rows):
            if name != "__base__":
                assert torch.equal(found[row], wanted()[name][row])
        assert not set(rows) & set(capped.shelf.resting)
    assert capped.shelf.peak <= capped.shelf.cap


def test_a_combination_reads_what_rests(capped: Placement) -> None:
    capped.model.add_weighted_adapter(["a", "c"], [0.3, 0.7], "mixed", combination_type="linear")
    found = answer(capped, "mixed")
    assert capped.shelf.here <= capped.shelf.cap
    with placed(folder(), "nf4", ("half",), adapters()) as other:
        other.model.add_weighted_adapter(["a", "c"], [0.3, 0.7], "mixed", combination_type="linear")
        assert torch.equal(found, answer(other, "mixed"))


def test_several_that_are_too_large_together_are_refused(capped: Placement) -> None:
    capped.model.base_model.set_adapter(["a", "c", "d"])
    with pytest.raises(MemoryFault) as caught, torch.no_grad():
        capped.model(**tiny.inputs(folder()))
    assert caught.value.code == "TT406"
    assert "a, c, d" in caught.value.what
    assert torch.equal(answer(capped, "c"), wanted()["c"])


def test_one_alone_may_be_larger_than_the_cap(capped: Placement) -> None:
    capped.shelf.cap = 1000
    for name in "ab":
        assert torch.equal(answer(capped, name), wanted()[name])
        assert len(capped.shelf.resting) == 4


def test_adapters_that_peft_adds_and_deletes_are_found(capped: Placement) -> None:
    answer(capped, "a")
    capped.model.delete_adapter("b")
    capped.model.delete_adapter("c")
    assert torch.equal(answer(capped, "d"), wanted()["d"])
    assert set(capped.shelf._held) == {"a", "d", "e"}


def test_without_a_cap_nothing_moves() -> None:
    with placed(folder(), "nf4", ("half",), adapters(), adapter_memory="1KiB") as placement:
        assert any("adapter memory" in note for note in placement.plan.notes)
        before = addresses(placement, "a")
        for name in NAMES:
            assert torch.equal(answer(placement, name), wanted()[name])
        assert addresses(placement, "a") == before
        report = placement.report()
        assert (report.resting, report.adapter_bytes) == ((), placement.shelf.here)


def test_captured_steps_of_what_leaves_are_forgotten(capped: Placement) -> None:
    captured(capped)
    asked = tiny.inputs(folder(), batch=1)
    fixed = {"min_new_tokens": 20, "max_new_tokens": 20}

    def applied() -> set[str]:
        states = [key[0][1] for key in capped.steps._steps]
        return {name for state in states for name in NAMES if f"'{name}'" in repr(state[-1])}

    found = {}
    for name in ("a", "b", "a", "c"):
        with capped.using(name) as model:
            found[name] = generated(model, asked, **fixed)
        assert name in applied()
        assert applied() <= set(NAMES) - set(capped.shelf.resting)
    count = capped.steps.captured
    with capped.using("c") as model:
        assert torch.equal(generated(model, asked, **fixed), found["c"])
    assert capped.steps.captured == count  # it did not move
    with capped.using("b") as model:
        assert torch.equal(generated(model, asked, **fixed), found["b"])
    assert capped.steps.captured > count


def test_removing_and_closing_let_go_of_host_memory(capped: Placement) -> None:
    answer(capped, "a")
    held = [weakly(one) for one in capped.shelf._held.values() if one.host_bytes]
    assert len(held) == 4
    for name in NAMES:
        capped.remove_adapter(name)
    assert capped.shelf.host_bytes == 0
    assert capped.shelf.here == 0
    capped.add_adapter("a", adapters()["a"])
    assert torch.equal(answer(capped, "a"), wanted()["a"])


def weakly(one: Any) -> int:
    return id(one._host.buffer)


def test_the_plan_counts_the_cap() -> None:
    sizes: dict[str, Any] = {"quant": "nf4", "gpu": "4GiB", "cpu": "2GiB", "context": 64}
    whole = plan(folder(), adapters(), **sizes)
    each = [one.nbytes for one in whole.adapters]
    for cap, here in ((sum(each), sum(each)), (2 * max(each), 2 * max(each)), (1, max(each))):
        made = plan(folder(), adapters(), adapter_memory=cap, **sizes)
        assert made.adapter_memory == cap
        assert made.costs["adapters"] == here
        assert whole.totals["gpu:0"] - made.totals["gpu:0"] == sum(each) - here
        assert made.totals["cpu"] == (sum(each) if here < sum(each) else 0)
        assert type(made).from_dict(made.to_dict()) == made


@pytest.mark.gpu
def test_what_rests_is_off_the_gpu() -> None:
    with placed(
        folder(), "nf4", ("half",), adapters(), "cuda", adapter_memory=2 * size(), context=64
    ) as placement:
        exact = {}
        for name in "abcdeba":
            exact.setdefault(name, answer(placement, name))
            assert torch.equal(answer(placement, name), exact[name])
            for full, one in placement.model.named_parameters():
                for other in NAMES:
                    if f".{other}." in full:
                        rests = other in placement.shelf.resting
                        assert one.device.type == ("cpu" if rests else "cuda")
                        assert not rests or one.is_pinned()
        assert len(placement.shelf.resting) == 3
        assert placement.shelf.peak <= 2 * size()
        tiers = {one.tier: one for one in placement.report().tiers}
        assert tiers["gpu:0"].measured <= tiers["gpu:0"].planned
    with placed(folder(), "nf4", ("half",), adapters(), "cuda") as roomy:
        for name in NAMES:
            assert torch.equal(answer(roomy, name), exact[name])


@pytest.mark.gpu
def test_steps_on_a_gpu_are_right_after_an_adapter_came_back() -> None:
    asked = tiny.inputs(folder(), batch=1, device="cuda")
    found: dict[int, list[torch.Tensor]] = {}
    for cap in (10**9, size()):
        with placed(
            folder(), "nf4", ("layers",), adapters(), "cuda", adapter_memory=cap, poison=False
        ) as placement:
            found[cap] = []
            for name in "aabbacca":
                with placement.using(name) as model:
                    out = generated(model, asked, min_new_tokens=24, max_new_tokens=24)
                    found[cap].append(out.cpu())
            assert placement.steps.replayed > 24
    assert all(map(torch.equal, *found.values()))


def test_what_an_interrupt_left_half_noted_is_looked_at_again(capped: Placement) -> None:
    expected = answer(capped, "b")
    del capped.shelf._configs["b"]  # as it is between two lines of `look`
    capped.remove_adapter("a")
    assert torch.equal(answer(capped, "b"), expected)
