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
from trimtab import caches, decode
from trimtab.api import load
from trimtab.placement import Placement

LENGTH = 5
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(params=tiny.DEVICES)
def placement(request: pytest.FixtureRequest) -> Iterator[Placement]:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder)}
    with placed(
        folder, "none", ("half",), adapters, request.param, poison=False, context=512
    ) as found:
        # They round otherwise, and tokens are compared with transformers' own here.
        found.steps.shortcuts = None
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
    with monkeypatch.context() as patch:
        patch.setattr(placement.steps, "recorder", None)
        expected = generate(placement, **GREEDY)
    base = placement.model.get_base_model()
    monkeypatch.setattr(type(base), "_can_compile_fullgraph", False)
    assert torch.equal(generate(placement, **GREEDY), expected)
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


def eagerly(placement: Placement, **options: Any) -> Any:
    """transformers' loop on a cache of the same size, since another rounds differently."""
    base = placement.model.get_base_model()
    cache = {caches.cache_argument(base): caches.static_cache(base, decode.SHORTEST)}
    return generate(placement, **options, **cache)


def test_autocast_is_not_captured(placement: Placement, own: Any) -> None:
    generate(placement, **GREEDY)
    with torch.autocast(placement.device.type, torch.bfloat16):
        assert generate(placement, **GREEDY).shape == (1, LENGTH + 6)
    why = "autocast computes in other dtypes than the cache has"
    assert placement.steps.refusals[why] == 1


def test_hooks_of_the_program_see_each_token(placement: Placement, own: Any) -> None:
    expected = generate(placement, **GREEDY)
    seen = []
    layer = placement.model.get_base_model().model.layers[0]
    hook = layer.register_forward_hook(lambda *_: seen.append(1))
    generate(placement, **GREEDY)
    assert len(seen) == 6
    hook.remove()
    before = placement.steps.replayed
    assert torch.equal(generate(placement, **GREEDY), expected)
    assert len(seen) == 6
    assert placement.steps.replayed > before


@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_count_whether_they_are_named_or_not(
    placement: Placement, own: Any, by_name: bool
) -> None:
    class Collect:
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    stream = Collect()
    config = GenerationConfig(pad_token_id=0, **GREEDY)
    model = placement.model.get_base_model()
    given = {"generation_config": config, "streamer": stream}
    if by_name:
        out = model.generate(inputs=ids(placement), **given)
    else:
        out = model.generate(ids(placement), *[config, *[None] * 5, stream])
    assert stream.got == out[0].tolist()
    assert stream.ended == 1
    assert placement.steps.replayed > 0
    long = GenerationConfig(pad_token_id=0, max_new_tokens=600, do_sample=False)
    assert model.generate(ids(placement), long).shape == (1, LENGTH + 600)
    why = "the prompt and its answer are longer, or more, than planned"
    assert placement.steps.refusals[why] == 1


def test_weights_that_peft_moved_are_those_that_count(placement: Placement, own: Any) -> None:
    generate(placement, **GREEDY)
    for module in placement.model.modules():
        for name, weight in getattr(module, "lora_B", {}).items():
            assert name == "a"
            weight.weight.data = weight.weight.flip(0) * 2
    assert torch.equal(generate(placement, **GREEDY), eagerly(placement, **GREEDY))


def test_a_processor_of_the_program_is_not_asked_after_the_end(
    placement: Placement, own: Any
) -> None:
    first = generate(placement, **GREEDY)[0, LENGTH:].tolist()
    end = next(one for one in first if one != first[0])
    answer = first[: first.index(end) + 1]
    asked = []

    class Trie(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            asked.append(input_ids.shape[1])
            return scores

    trie = {tuple(answer[:count]): answer[count] for count in range(len(answer))}
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": end}
    for further in (
        {"logits_processor": transformers.LogitsProcessorList([Trie()])},
        {"prefix_allowed_tokens_fn": lambda _, row: [trie[tuple(row[LENGTH:].tolist())]]},
    ):
        found = generate(placement, **options, **further)
        assert found[0, LENGTH:].tolist() == answer
    assert asked == [LENGTH + count for count in range(len(answer))]


def test_a_dropped_token_is_as_if_it_had_not_been_drawn(placement: Placement, own: Any) -> None:
    sampling = {"max_new_tokens": 12, "do_sample": True, "temperature": 3.0}
    torch.manual_seed(3)
    first = eagerly(placement, **sampling)[0, LENGTH:].tolist()
    ends = {"eos_token_id": first[4]}

    def two(ask: Any) -> list[Any]:
        torch.manual_seed(3)
        return [ask(placement, **sampling, **further).tolist() for further in (ends, {})]

    assert two(generate) == two(eagerly)
    assert placement.steps._cached == (1, decode.SHORTEST)
    assert placement.steps.replayed > 0


def test_other_loops_are_left_to_transformers(placement: Placement, own: Any) -> None:
    asked = []

    def loop(model: Any, input_ids: torch.Tensor, *_: Any, **inputs: Any) -> torch.Tensor:
        asked.append(type(inputs.get("past_key_values", inputs.get("cache"))).__name__)
        return input_ids

    generate(placement, custom_generate=loop, **GREEDY)
    assert asked == ["DynamicCache"]
    assert placement.steps.refusals["generate was asked for another loop"] == 1


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_an_adaption_prompt_is_not_captured(device: str) -> None:
    folder = tiny.checkpoint("llama-biased")
    prompt = tiny.adapter(
        folder, "AdaptionPrompt", targets="self_attn", adapter_len=4, adapter_layers=2
    )
    with placed(folder, "none", (), {"p": prompt}, device, poison=False) as found:
        recorder = captured(found).steps.recorder
        base = named(found, None, eagerly)
        found.steps.recorder = None
        adapted = named(found, "p", generate)
        found.steps.recorder = recorder
        for name, expected in ((None, base), ("p", adapted), (None, base), ("p", adapted)):
            assert torch.equal(named(found, name, generate), expected)
        assert found.steps.refusals["the adapter takes the place of modules"] == 2


def named(placement: Placement, name: str | None, ask: Any) -> Any:
    with placement.using(name):
        return ask(placement, **GREEDY)


def test_trained_token_rows_are_captured() -> None:
    folder = tiny.checkpoint("llama")
    adapter = tiny.adapter(folder, trainable_token_indices={"embed_tokens": [3, 4, 7]})
    with placed(folder, "none", ("half",), {"a": adapter}, poison=False) as found:
        found.steps.shortcuts = None
        captured(found)
        for _ in range(2):
            assert torch.equal(generate(found, **GREEDY), eagerly(found, **GREEDY))
        assert found.steps.replayed > 0
