"""Adapters merged into one module after the other."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

import tiny
from trimtab.deltas import Delta, below, check_mergeable, merge_module, outermost
from trimtab.errors import AdapterFault
from unmerged import Opened, opened

# peft 0.18's, of a model that ties nothing
pytestmark = pytest.mark.filterwarnings("ignore:Model has:UserWarning")

PATH = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base() -> Opened:
    return opened(tiny.checkpoint("llama"))


def lora(**options: object) -> Path:
    return tiny.adapter(tiny.checkpoint("llama"), targets=["q_proj"], **options)


def merged(base: Opened, *deltas: Delta) -> torch.Tensor:
    module = base.model.get_submodule(PATH)
    given = {f"{PATH}.weight": base.read(f"{PATH}.weight")}
    return merge_module(module, PATH, given, deltas)[f"{PATH}.weight"]


def by_hand(weight: torch.Tensor, delta: Delta, strength: float = 1.0) -> torch.Tensor:
    key = f"base_model.model.{PATH}.lora_"
    down, up = delta.tensors[f"{key}A.weight"], delta.tensors[f"{key}B.weight"]
    return weight + (up @ down * (16 / 8) * strength).to(weight.dtype)


def test_paths() -> None:
    assert below("a.b.c", "a.b")
    assert below("a.b", "a.b")
    assert not below("a.bc", "a.b")
    assert outermost({"b.c.d", "a", "b.c", "a.x", "b.cc"}) == ["a", "b.c", "b.cc"]


def test_a_lora(base: Opened) -> None:
    delta = base.delta(lora())
    wanted = by_hand(base.read(f"{PATH}.weight"), delta)
    assert torch.allclose(merged(base, delta).float(), wanted.float(), atol=2e-2)
    assert delta.whole == {}
    assert delta.paths == {f"model.layers.{n}.self_attn.q_proj" for n in range(6)}


def test_a_strength(base: Opened) -> None:
    delta = base.delta(lora(), 0.5)
    half = by_hand(base.read(f"{PATH}.weight"), delta, 0.5)
    assert torch.allclose(merged(base, delta).float(), half.float(), atol=2e-2)


def test_one_into_what_the_other_left(base: Opened) -> None:
    first, second = base.delta(lora()), base.delta(lora(seed=2))
    between = merged(base, first)
    alone = opened(tiny.checkpoint("llama"))
    alone.tensors = {**base.tensors, f"{PATH}.weight": between}
    assert torch.equal(merged(base, first, second), merged(alone, second))


def test_a_module_that_was_trained_whole(base: Opened) -> None:
    delta = base.delta(lora(modules_to_save=["lm_head"]))
    key = "base_model.model.lm_head.weight"
    assert delta.whole == {"lm_head.weight": key}
    given = {"lm_head.weight": base.read("lm_head.weight")}
    found = merge_module(base.model.lm_head, "lm_head", given, [delta])["lm_head.weight"]
    assert torch.equal(found, delta.tensors[key].to(torch.bfloat16))
    assert not delta.keeps_ties("lm_head")


def test_trained_rows_stand_in_the_place_of_the_tables(base: Opened) -> None:
    delta = base.delta(lora(trainable_token_indices={"embed_tokens": [12, 40]}))
    name = "model.embed_tokens.weight"
    module = base.model.get_submodule("model.embed_tokens")
    found = merge_module(module, "model.embed_tokens", {name: base.read(name)}, [delta])[name]
    rows = delta.tensors[f"base_model.model.{name[:-7]}.token_adapter.trainable_tokens_delta"]
    assert torch.equal(found[[12, 40]], rows.to(torch.bfloat16))
    rest = [row for row in range(len(found)) if row not in (12, 40)]
    assert torch.equal(found[rest], base.tensors[name][rest])
    assert delta.keeps_ties("model.embed_tokens")


def test_rows_that_are_not_named(base: Opened) -> None:
    delta = base.delta(lora(trainable_token_indices={"embed_tokens": [12, 40]}))
    config = {**delta.decided.config, "trainable_token_indices": None}
    delta = dataclasses.replace(delta, decided=dataclasses.replace(delta.decided, config=config))
    name = "model.embed_tokens.weight"
    module = base.model.get_submodule("model.embed_tokens")
    with pytest.raises(AdapterFault, match="TT312"):
        merge_module(module, "model.embed_tokens", {name: base.read(name)}, [delta])


def test_a_sum_that_is_not_finite(base: Opened) -> None:
    delta = base.delta(lora())
    key = f"base_model.model.{PATH}.lora_A.weight"
    huge = torch.full_like(delta.tensors[key], 3e38)
    delta = dataclasses.replace(delta, tensors={**delta.tensors, key: huge})
    with pytest.raises(AdapterFault, match="is not finite after") as caught:
        merged(base, delta)
    assert caught.value.code == "TT302"


@pytest.mark.parametrize(
    ("kind", "options", "weight", "said"),
    [
        ("PrefixTuning", {"num_virtual_tokens": 4}, 1.0, "is of the kind PREFIX_TUNING"),
        ("Vera", {}, 1.0, "is of the kind VERA"),
        ("lora", {"modules_to_save": ["lm_head"]}, 0.5, "cannot be weighted with 0.5"),
        ("lora", {"trainable_token_indices": [3]}, 0.5, "cannot be weighted with 0.5"),
    ],
)
def test_what_cannot_be_merged(
    base: Opened, kind: str, options: dict[str, object], weight: float, said: str
) -> None:
    path = tiny.adapter(tiny.checkpoint("llama"), kind, **options)
    with pytest.raises(AdapterFault, match=said) as caught:
        check_mergeable(base.delta(path, weight))
    assert caught.value.code == "TT314"


def test_the_skeleton_is_left_as_it_was(base: Opened) -> None:
    before = copy.deepcopy([(name, one.device) for name, one in base.model.named_parameters()])
    merged(base, base.delta(lora()))
    assert [(name, one.device) for name, one in base.model.named_parameters()] == before
