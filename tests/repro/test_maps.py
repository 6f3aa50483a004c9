"""Device maps: complete ones, those of a machine without a GPU, those of a tiny model."""

from __future__ import annotations

from trimtab.repro.maps import (
    expanded,
    is_gpu,
    layer_of,
    renumbered,
    scaled,
    split_map,
    telling_layers,
    without_gpu,
)

LAYERS = [f"model.layers.{number}" for number in range(12)]


TENSORS = ["model.embed.weight", "model.layers.0.a", "model.layers.1.a", "model.own", "head.w"]


def test_a_map_of_a_split_names_no_parent_of_what_is_away() -> None:
    assert split_map(TENSORS, ["model.layers.1"], 0, "cpu") == {
        "model.embed": 0,
        "model.layers.0": 0,
        "model.layers.1": "cpu",
        "model.own": 0,
        "head": 0,
    }
    assert split_map(TENSORS, [], 0, "cpu") == {"": 0}


def test_an_expanded_map() -> None:
    given = {"model": 0, "model.layers": "cpu", "model.layers.1": 0, "strange": "cpu"}
    # The head has no device, as before.
    assert expanded(given, TENSORS) == {
        "model.embed": 0,
        "model.layers.0": "cpu",
        "model.layers.1": 0,
        "model.own": 0,
        "strange": "cpu",
    }
    assert expanded({"": "cpu"}, TENSORS) == {"": "cpu"}


def test_gpus() -> None:
    assert [is_gpu(one) for one in (0, 1, "0", "cuda", "cuda:1", "GPU:0")] == [True] * 6
    assert [is_gpu(one) for one in ("cpu", "disk", True, None)] == [False] * 4


def test_without_a_gpu_the_cpu_plays_it() -> None:
    tensors = ["a.w", "b.w", "c.w", "d.w"]
    given = {"a": 0, "b": "cuda:0", "c": "cpu", "d": "disk"}
    assert without_gpu(given, tensors) == {"a": "cpu", "b": "cpu", "c": "disk", "d": "disk"}
    assert without_gpu({"": "cpu", "b": "disk"}, tensors) == {"": "cpu", "b": "disk"}
    played = {"a": "cpu", "b": "disk", "c": "cpu", "d": "cpu"}
    assert without_gpu({"": 0, "b": "cpu"}, tensors) == played


def test_the_layer_of_a_key() -> None:
    keys = ["model.layers.3", "model.layers.11.mlp", "layers.3", "base_model.model.model.layers.3"]
    assert [layer_of(one, LAYERS) for one in keys] == [3, 11, 3, 3]
    others = ["model.vision.layers.3", "model.layers", "", "model.embed_tokens", "model.norm.3"]
    assert [layer_of(one, LAYERS) for one in others] == [None] * 5


def test_one_layer_for_each_way_of_treating_layers() -> None:
    places = dict.fromkeys(LAYERS, 0) | {"model.layers.7": "cpu", "lm_head": "cpu"}
    del places["model.layers.9"]
    places |= {"model.layers.9.mlp": "cpu", "model.layers.9.self_attn": 0}
    assert telling_layers(places, LAYERS) == [0, 7, 9]


def test_a_scaled_map() -> None:
    places = {"": 0, "model.layers.7": "cpu", "model.layers.9.mlp": "disk", "wrong": "cpu"}
    assert scaled(places, LAYERS, (0, 7, 9, 11)) == {
        "": 0,
        "model.layers.1": "cpu",
        "model.layers.2.mlp": "disk",
        "wrong": "cpu",
    }


def test_only_the_last_number_is_replaced() -> None:
    assert renumbered("a.1.b.1.c", 1, 5) == "a.1.b.5.c"
    assert renumbered("layers.11", 11, 0) == "layers.0"
