"""Switching among many adapters: PEFT's state, without its walks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

import tiny
from placing import placed
from residents import logits
from trimtab.adapters import read_adapter
from trimtab.apply import load_onto
from trimtab.placement import Placement
from trimtab.switching import Switch

pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has:UserWarning",  # peft 0.18, of a model that ties nothing
    "ignore:Unsupported layer type:UserWarning",  # of norms
)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {}),
    "dora": ("dora", {}),
    "whole modules": ("lora", {"modules_to_save": ["lm_head"]}),
    "token rows": ("lora", {"trainable_token_indices": [20, 21]}),
    "loha": ("LoHa", {}),
    "norms": ("LNTuning", {"targets": ["input_layernorm"]}),
    "prompt": ("PromptTuning", {"num_virtual_tokens": 4}),
}


def state(model: Any) -> list[Any]:
    """What PEFT keeps of the choice, all over the model."""

    def listed(value: Any) -> list[str]:
        return [value] if isinstance(value, str) else list(value)

    found: list[Any] = [listed(model.active_adapter), listed(model.active_adapters)]
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            chosen = listed(module.active_adapters)
            found.append((name, chosen, module.disable_adapters))
    return [*found, [name for name, one in model.named_parameters() if one.requires_grad]]


def three(kind: str, **options: Any) -> tuple[Path, Any]:
    folder = tiny.checkpoint("llama")
    model: Any = tiny.reference(folder)
    for seed, name in enumerate("abc"):
        path = tiny.adapter(folder, kind, seed=seed + 1, **options)
        model, _ = load_onto(model, read_adapter(path), name)
    return folder, model


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_leaves_what_pefts_leaves_frozen(kind: str) -> None:
    name, options = KINDS[kind]
    folder, model = three(name, **options)
    _, other = three(name, **options)
    given = tiny.inputs(folder)
    switch = Switch()
    switch.take_over(model)
    for chosen in ("b", "c", "c", "a", "b"):
        model.set_adapter(chosen)
        other.set_adapter(chosen)
        other.requires_grad_(False)
        assert state(model) == state(other)
        assert torch.equal(tiny.logits(model, given), tiny.logits(other, given))
    with pytest.raises(ValueError, match="not found"):
        model.set_adapter("nowhere")
    assert state(model) == state(other)


@pytest.mark.parametrize("kind", KINDS)
def test_off_is_the_base_and_leaves_no_trace(kind: str) -> None:
    name, options = KINDS[kind]
    folder, model = three(name, **options)
    given = tiny.inputs(folder)
    switch = Switch()
    switch.take_over(model)
    before, adapted = state(model), tiny.logits(model, given)
    with switch.off():
        found = tiny.logits(model, given)
    assert torch.equal(found, tiny.logits(tiny.reference(folder), given))
    assert state(model) == before
    with pytest.raises(KeyboardInterrupt), switch.off():
        raise KeyboardInterrupt
    assert state(model) == before
    assert torch.equal(tiny.logits(model, given), adapted)


def test_what_pefts_own_ways_made_trainable_is_frozen_again() -> None:
    _, model = three("lora")
    switch = Switch()
    switch.take_over(model)
    model.base_model.set_adapter(["a", "b"])
    assert any(one.requires_grad for one in model.parameters())
    switch.choose("c")
    assert not any(one.requires_grad for one in model.parameters())
    switch.choose(["a", "b"])
    assert model.active_adapters == ["a", "b"]
    assert not any(one.requires_grad for one in model.parameters())
    switch.choose("b")
    assert model.active_adapters == ["b"]


def test_several_active_ones_are_active_again_after_another() -> None:
    folder = tiny.checkpoint("llama")
    adapters = {name: tiny.adapter(folder, seed=n) for n, name in enumerate("abc")}
    with placed(folder, "nf4", ("half",), adapters) as placement:
        placement.model.base_model.set_adapter(["a", "b"])
        both = logits(placement.model, folder)
        with placement.using("c"):
            assert not torch.equal(logits(placement.model, folder), both)
        assert placement.model.active_adapters == ["a", "b"]
        assert torch.equal(logits(placement.model, folder), both)


def test_letting_go_gives_pefts_own_method_back() -> None:
    _, model = three("lora")
    switch = Switch()
    switch.take_over(model)
    switch.let_go()
    model.set_adapter("b")
    assert any(one.requires_grad for one in model.parameters())
    assert switch.model is None


# ------------------------------------------------------------------- what grows with many adapters


class Calls:
    """Counts calls of Python functions, which is what the time here is made of."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"


@pytest.fixture
def crowd() -> Iterator[Placement]:
    folder = tiny.checkpoint("llama")
    with placed(folder, "nf4", ("half",), {"n0": tiny.adapter(folder)}) as placement:
        yield placement


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_twelfth_adapter_takes_the_calls_that_the_second_takes(
    crowd: Placement, kind: str
) -> None:
    header = read_adapter(tiny.adapter(tiny.checkpoint("llama"), kind))
    crowd.add_adapter("n1", header)  # imports, and what is made once
    calls = []
    for number in range(2, 13):
        with Calls() as made:
            crowd.add_adapter(f"n{number}", header)
        calls.append(made.count)
    assert calls[-1] < 1.05 * calls[0]


def test_a_switch_takes_no_more_calls_with_twelve_adapters_than_with_two(crowd: Placement) -> None:
    header = read_adapter(tiny.adapter(tiny.checkpoint("llama")))
    calls = []
    for number in range(1, 13):
        crowd.add_adapter(f"n{number}", header)
        with Calls() as made:
            crowd.model.set_adapter(f"n{number}")
            with crowd.using(None):
                pass
            with crowd.using("n0"):
                pass
        calls.append(made.count)
    # A look at each adapter's config, but none at its weights: those are 840.
    assert calls[-1] <= calls[1] + 5 * 11


def test_adapters_that_are_hidden_come_back_when_loading_fails(
    crowd: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.checkpoint("llama")
    crowd.add_adapter("n1", tiny.adapter(folder, seed=2))
    names = [name for name, _ in crowd.model.named_parameters()]
    before = logits(crowd.model, folder)
    calls = iter(range(20))

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(calls) == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LoraLayer, "reset_lora_parameters", interrupt)
        with pytest.raises(KeyboardInterrupt):
            crowd.add_adapter("n2", tiny.adapter(folder, seed=3))
    assert [name for name, _ in crowd.model.named_parameters()] == names
    assert torch.equal(logits(crowd.model, folder), before)
    with crowd.using("n1"):
        assert not torch.equal(logits(crowd.model, folder), before)
