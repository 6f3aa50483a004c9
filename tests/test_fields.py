"""What a config's fields may hold."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.fields import problem, repeats_a_repeat


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"target_modules": 3}, "target_modules is 3, not names"),
        ({"target_modules": [["q"]]}, "target_modules is [['q']], not names"),
        ({"modules_to_save": {"a": 1}}, "modules_to_save is {'a': 1}, not names"),
        ({"rank_pattern": {"q": "4"}}, "rank_pattern is {'q': '4'}, not numbers by pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1], not numbers by pattern"),
        ({"r": "8"}, "r is '8', not a number"),
        ({"r": 8.0}, "r is 8.0, not a whole number"),
        ({"peft_type": "LORA", "r": 0}, "r is 0, not a rank"),
        ({"peft_type": "LORA", "r": None}, "r is None, not a rank"),
        ({"peft_type": "LORA", "lora_alpha": None}, "lora_alpha is null"),
        ({"peft_type": "LORA", "rank_pattern": None}, "rank_pattern is null"),
        ({"layers_to_transform": "1"}, "layers_to_transform is '1', not numbers of layers"),
        ({"trainable_token_indices": {"a": 3}}, "trainable_token_indices is {'a': 3}, not numbers"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3, not a name"),
        ({"target_modules": "(a+)+"}, "target_modules has '(a+)+', which could take forever"),
        ({"target_modules": "a" * 5000}, "which could take forever"),
        ({"target_modules": "("}, "target_modules has '(', which is no pattern"),
        ({"rank_pattern": {"[": 3}}, "rank_pattern has '[', which is no pattern"),
        ({"layers_pattern": ["("]}, "layers_pattern has '(', which is no pattern"),
        ({"modules_to_save": ["(x*)*"]}, "modules_to_save has '(x*)*', which could take forever"),
    ],
)
def test_what_is_wrong_is_said(config: dict[str, Any], said: str) -> None:
    assert said in (problem(config) or "")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": None, "r": None, "rank_pattern": None},
        {"peft_type": "LORA", "r": 8, "lora_alpha": 0.5, "rank_pattern": {}, "alpha_pattern": {}},
        {"peft_type": "OFT", "r": 0, "layers_to_transform": [1, 2]},
        {"target_modules": ["q_proj", "("], "layers_to_transform": 3},  # ends of names, no patterns
        {"trainable_token_indices": [1, 2]},
        {"trainable_token_indices": {"embed_tokens": [1]}, "modules_to_save": ["lm_head"]},
    ],
)
def test_what_is_right(config: dict[str, Any]) -> None:
    assert problem(config) is None


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a*)*b", "((a+)b)+", "(a|b+){2,}", r"(\w+\.)*x", "([a-z]+)*", "(?:x*y)*", "((a*))+"],
)
def test_patterns_without_end(pattern: str) -> None:
    assert repeats_a_repeat(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|v_proj)", r"model\.layers\.\d+\.(self_attn\.(q|v)_proj|mlp\.up_proj)",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:k_proj|v_proj).*?)|(?:\bmodel\.layers"
        r"\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:k_proj|v_proj)))",
        r"(layers\.\d)+", r"\(a+\)+", "[(a+)]+", "(a{2})+", "(ab)*c+",
    ],
)  # fmt: skip
def test_patterns_that_are_used(pattern: str) -> None:
    assert not repeats_a_repeat(pattern)
