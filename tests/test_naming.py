"""Module names: changes of prefix, and PEFT's rules for targets and patterns."""

from __future__ import annotations

import pytest

from trimtab.naming import (
    ends_with,
    exact_patterns,
    is_targeted,
    layer_number,
    parents,
    pattern_value,
    rename,
    stem,
)


def test_parents() -> None:
    assert parents(["a.b.weight", "a.c"]) == {"a", "a.b"}


def test_names_that_are_there_stay() -> None:
    assert rename(["a.b"], {"a", "a.b", "x.a.b"}) == ({"a.b": "a.b"}, [])


def test_layer_numbers_are_never_changed() -> None:
    assert rename(["model.layers.5.q"], {"model.layers.0.q", "model.layers.1.q"}) == ({}, [])


def test_the_language_model_is_preferred_to_a_tower() -> None:
    modules = {"model.language_model.layers.0.q", "model.vision_tower.layers.0.q"}
    assert rename(["model.layers.0.q"], modules)[0] == {
        "model.layers.0.q": "model.language_model.layers.0.q"
    }
    assert rename(["vision_tower.layers.0.q"], modules)[0] == {
        "vision_tower.layers.0.q": "model.vision_tower.layers.0.q"
    }


def test_two_equal_candidates_are_no_match() -> None:
    assert rename(["layers.0.q"], {"encoder.layers.0.q", "decoder.layers.0.q"}) == ({}, [])


def test_the_candidate_that_has_more_of_the_names() -> None:
    modules = {"encoder.layers.0.q", "decoder.layers.0.q", "decoder.layers.1.q"}
    mapping, used = rename(["layers.0.q", "layers.1.q"], modules)
    assert mapping == {"layers.0.q": "decoder.layers.0.q", "layers.1.q": "decoder.layers.1.q"}
    assert used == [("", "decoder")]


def test_two_names_never_share_a_module() -> None:
    mapping, _ = rename(["layers.0.q", "model.layers.0.q"], {"model.layers.0.q"})
    assert mapping == {"model.layers.0.q": "model.layers.0.q"}


@pytest.mark.parametrize(
    ("patterns", "matches"),
    [
        ("q", False),
        (r".*\.q", True),
        (["q"], True),
        (["0.q"], True),
        (["a.0.q"], True),
        (["x"], False),
    ],
)
def test_targets(patterns: str | list[str], matches: bool) -> None:
    assert ends_with("a.0.q", patterns) == matches
    assert is_targeted({"target_modules": patterns}, "a.0.q") == matches
    assert not is_targeted({"target_modules": patterns, "exclude_modules": ["q"]}, "a.0.q")


def test_layers() -> None:
    config = {"target_modules": ["q"], "layers_to_transform": [1, 2], "layers_pattern": "layers"}
    assert is_targeted(config, "model.layers.2.q")
    assert not is_targeted(config, "model.layers.0.q")
    assert not is_targeted(config, "model.blocks.2.q")
    assert is_targeted({**config, "layers_to_transform": 2}, "model.layers.2.q")
    assert layer_number("model.layers.3.mlp.q", None) == 3
    assert layer_number("q", None) is None


def test_patterns() -> None:
    assert pattern_value({"q": 1, ".*q": 2}, "a.q", 0) == 1
    assert pattern_value({"^q": 1}, "a.q", 0) == 0
    assert exact_patterns({"old.q": 4}, {"old.q": "new.q", "old.v": "new.v"}) == {r"^new\.q": 4}


def test_stem() -> None:
    assert stem("model.layers.0.mlp.3.q") == "model.layers"
    assert stem("model.head") == "model"
