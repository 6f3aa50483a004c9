"""Options of `generate` that decide whether a decode step is captured, and into which cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import tiny
from placing import placed
from test_decode import captured
from trimtab.api import load
from trimtab.placement import Placement

LENGTH = 5


@pytest.fixture(params=tiny.DEVICES)
def placement(request: pytest.FixtureRequest) -> Iterator[Placement]:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder)}
    with placed(
        folder, "none", ("half",), adapters, request.param, poison=False, context=512
    ) as found:
        yield captured(found)


def ids(placement: Placement) -> torch.Tensor:
    return torch.full((1, LENGTH), 7, device=placement.device)


def generate(placement: Placement, **options: Any) -> Any:
    given = ids(placement)
    return placement.model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), pad_token_id=0, **options
    )


@pytest.fixture
def own(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets values of the model's own generation config."""
    config = placement.model.generation_config
    monkeypatch.setattr(config, "eos_token_id", None)
    return lambda name, value: monkeypatch.setattr(config, name, value)


def test_a_length_that_a_given_config_leaves_open_is_the_models_own(
    placement: Placement, own: Any
) -> None:
    own("max_new_tokens", 300)
    found = generate(placement, generation_config=GenerationConfig(do_sample=False))
    assert found.shape == (1, LENGTH + 300)
    assert placement.steps._cached == (1, 512)
    assert placement.steps.replayed > 290


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("num_beams", 2, "beams and several answers reorder the cache"),
        ("return_dict_in_generate", True, "the cache would be handed out"),
        ("use_cache", False, "generate was asked for another cache"),
    ],
)
def test_what_a_given_config_leaves_open_is_the_models_own(
    placement: Placement, own: Any, name: str, value: Any, why: str
) -> None:
    own(name, value)
    config = GenerationConfig(do_sample=False, max_new_tokens=4)
    found = generate(placement, generation_config=config)
    assert getattr(found, "sequences", found).shape == (1, LENGTH + 4)
    assert placement.steps.refusals[why] == 1


def test_a_model_without_a_static_cache_alone_is_not_captured(
    placement: Placement, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(placement, max_new_tokens=8, do_sample=False)
    base = placement.model.get_base_model()
    monkeypatch.setattr(type(base), "_can_compile_fullgraph", False)
    placement.steps.refusals.clear()
    assert torch.equal(generate(placement, max_new_tokens=8, do_sample=False), expected)
    assert placement.steps.refusals["the model takes no static cache alone"] == 1


def test_an_encoder_and_a_decoder_are_not_captured(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with load(tmp_path, quant="none", cpu="1GiB", gpu=0, context=64) as found:
        expected = generate(found, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        captured(found)
        again = generate(found, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert torch.equal(again, expected)
        assert found.steps.captured == 0


def test_a_step_is_captured_for_each_way_of_computing(placement: Placement, own: Any) -> None:
    options = {"max_new_tokens": 6, "do_sample": False}

    def fresh() -> int:
        before = placement.steps.captured
        generate(placement, **options)
        return placement.steps.captured - before

    assert fresh() > 0
    assert fresh() == 0
    with torch.autocast(placement.device.type, torch.bfloat16):
        assert fresh() > 0
    assert fresh() == 0


def test_an_adapter_that_is_removed_takes_its_steps_along(placement: Placement, own: Any) -> None:
    with placement.using("a"):
        generate(placement, max_new_tokens=6, do_sample=False)
    assert len(placement.steps._steps) > 0
    placement.remove_adapter("a")
    assert len(placement.steps._steps) == 0
