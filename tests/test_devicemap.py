from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import tiny
from trimtab.checkpoint import open_checkpoint
from trimtab.devicemap import MatchedMap, match_device_map
from trimtab.errors import PlacementFault
from trimtab.outline import Outline, build_outline


@functools.cache
def outline(name: str) -> Outline:
    return build_outline(open_checkpoint(tiny.checkpoint(name)))


def match(name: str, device_map: Any) -> MatchedMap:
    return match_device_map(device_map, outline(name))


def fault(name: str, device_map: Any) -> PlacementFault:
    with pytest.raises(PlacementFault) as caught:
        match(name, device_map)
    return caught.value


def of(matched: MatchedMap, prefix: str) -> set[str]:
    return {tier for name, tier in matched.tiers.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("value", "tier"),
    [
        (0, "gpu:0"),
        ("0", "gpu:0"),
        ("cuda", "gpu:0"),
        ("cuda:0", "gpu:0"),
        ("gpu:0", "gpu:0"),
        ("gpu", "gpu:0"),
        (torch.device("cuda", 0), "gpu:0"),
        ("cpu", "cpu"),
        ("disk", "disk"),
    ],
)
def test_values(value: Any, tier: str) -> None:
    matched = match("llama", {"": value})
    assert set(matched.tiers.values()) == {tier}
    assert set(matched.tiers) == {one.name for one in outline("llama").weights}
    assert matched.notes == ()


@pytest.mark.parametrize("value", ["meta", None, -1, 1.5, True, "cpu:0", "mps", ""])
def test_values_that_name_no_tier(value: Any) -> None:
    problem = fault("llama", {"": 0, "lm_head": value})
    assert (problem.code, problem.what) == (
        "TT203",
        f"the device map gives 'lm_head' the value {value!r}, which names no tier",
    )


@pytest.mark.parametrize("value", [1, "cuda:1", "gpu:3"])
def test_a_second_gpu(value: int | str) -> None:
    assert fault("llama", {"": 0, "lm_head": value}).code == "TT204"


@pytest.mark.parametrize("value", ["auto", "balanced", 0])
def test_something_that_is_no_map(value: Any) -> None:
    assert fault("llama", value).code == "TT203"


def test_the_most_specific_key_wins() -> None:
    matched = match(
        "llama",
        {
            "model.layers.1.mlp": "disk",
            "": 0,
            "model.layers.1": "cpu",
            "model.layers.1.mlp.up_proj.weight": "cuda",
        },
    )
    assert of(matched, "model.layers.1.self_attn") == {"cpu"}
    assert of(matched, "model.layers.1.mlp.down_proj") == {"disk"}
    assert of(matched, "model.layers.1.mlp.up_proj") == {"gpu:0"}
    assert of(matched, "model.layers.2") == {"gpu:0"}


def test_keys_match_whole_components() -> None:
    """A key for layer 1 takes nothing of the layers 10 to 19."""
    names = {f"model.layers.{index}" for index in range(12)}
    found = outline("llama")
    many = Outline(
        **{
            **vars(found),
            "units": tuple(
                type(unit)(
                    f"model.layers.{index}",
                    "layer",
                    (type(unit.weights[0])(f"model.layers.{index}.w", (2, 2), "float32"),),
                )
                for index, unit in zip(range(12), found.units * 2, strict=False)
            ),
            "modules": frozenset(names),
        }
    )
    tiers = match_device_map({"": "cpu", "model.layers.1": "disk"}, many).tiers
    assert [name for name, tier in tiers.items() if tier == "disk"] == ["model.layers.1.w"]


def test_a_projector_that_the_class_does_not_have() -> None:
    problem = fault("gemma4", {"": 0, "model.multi_modal_projector": "cpu"})
    assert problem.code == "TT201"
    assert problem.what == (
        "the device map's key 'model.multi_modal_projector' matches no module of the model"
    )
    assert problem.parts["nearest"][:2] == ["model.embed_audio", "model.embed_vision"]
    assert "model.embed_vision" in problem.fix


def test_a_misspelt_key() -> None:
    problem = fault("llama", {"": 0, "model.layer.3": "cpu", "model.norms": "cpu"})
    assert problem.what.endswith("and 1 more such keys")
    assert problem.parts["keys"] == ["model.layer.3", "model.norms"]
    assert "model.layers.3" in problem.parts["nearest"]


def test_only_a_wrong_key() -> None:
    problem = fault("llama", {"transformer": 0})
    assert problem.code == "TT201"
    assert problem.parts["nearest"][0] == "model"


def test_a_buffer_goes_with_its_module() -> None:
    """No key is needed for a buffer, and one that names it is no mistake."""
    prefix = "model.language_model.layers.7"
    tiers = {
        "lm_head": 0,
        **{unit.name: 0 for unit in outline("gemma4").units if unit.kind in ("tower", "table")},
        **{unit.name: 0 for unit in outline("gemma4").units if unit.kind == "projection"},
        **{f"model.language_model.layers.{index}": 0 for index in range(7)},
        **{one.rpartition(".")[0]: 0 for one in _rest("gemma4")},
        **dict.fromkeys(_children("gemma4", prefix), "cpu"),
    }
    assert f"{prefix}.layer_scalar" in outline("gemma4").buffers
    assert of(match("gemma4", tiers), prefix + ".") == {"cpu"}
    named = match("gemma4", {**tiers, f"{prefix}.layer_scalar": "cpu"})
    assert named == match("gemma4", tiers)


def _rest(name: str) -> list[str]:
    return [one.name for one in outline(name).units[-1].weights]


def _children(name: str, prefix: str) -> list[str]:
    depth = prefix.count(".") + 1
    return [
        module
        for module in outline(name).modules
        if module.startswith(prefix + ".") and module.count(".") == depth
    ]


def test_a_parameter_without_a_device() -> None:
    problem = fault("llama", {"model.layers": 0, "model.embed_tokens": 0, "lm_head": "cpu"})
    assert (problem.code, problem.parts["parameters"]) == ("TT202", ["model.norm.weight"])
    assert problem.what == "the device map gives model.norm.weight no device"


@pytest.mark.parametrize(
    ("name", "key", "real"),
    [
        ("llama", "base_model.model.model.layers.2", "model.layers.2"),
        ("llama", "base_model.model.lm_head", "lm_head"),
        ("llama", "base_model.model.layers.2", "model.layers.2"),
        ("llama", "layers.2", "model.layers.2"),
        ("llama", "transformer.layers.2", "model.layers.2"),
        ("llama", "model.lm_head", "lm_head"),
        ("gpt2", "h.2", "transformer.h.2"),
        ("gemma4", "language_model.layers.2", "model.language_model.layers.2"),
        ("gemma4", "language_model.model.layers.2", "model.language_model.layers.2"),
        ("gemma4", "vision_tower", "model.vision_tower"),
        ("gemma4", "base_model.model.model.vision_tower", "model.vision_tower"),
    ],
)
def test_prefixes_are_understood_and_said(name: str, key: str, real: str) -> None:
    matched = match(name, {"": 0, key: "cpu"})
    assert matched.tiers == match(name, {"": 0, real: "cpu"}).tiers
    assert of(matched, real) == {"cpu"}
    assert matched.notes == (f"the device map's {key!r} is understood as {real!r}",)


def test_the_prefix_alone_is_everything() -> None:
    assert match("llama", {"base_model.model": "cpu"}).tiers == match("llama", {"": "cpu"}).tiers


def test_a_real_name_beats_one_that_is_understood() -> None:
    matched = match("llama", {"": 0, "model.layers.2": "cpu", "layers.2": "disk"})
    assert of(matched, "model.layers.2") == {"cpu"}
