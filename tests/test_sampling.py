"""The loop that reads a token late: the tokens, the streamer and the end of transformers' own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import tiny
from trimtab.sampling import Told, may_lag, sample

NEW = 12


@pytest.fixture(params=tiny.DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(device: str) -> Any:
    from transformers import AutoModelForCausalLM

    folder = tiny.checkpoint("llama")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found.generation_config.pad_token_id = 0
    found.generation_config.eos_token_id = None
    return found.to(device).eval()


class Collect:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def prompt(device: str, batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 90, (batch, 5), generator=torch.Generator().manual_seed(3)).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def both(model: Any, given: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
    """What transformers' loop and `sample` return, each begun from the same random state."""
    found = []
    for own in (False, True):
        torch.manual_seed(1)
        loop = {"custom_generate": sample} if own else {}
        found.append(model.generate(**given, max_new_tokens=NEW, **loop, **options))
    return found[0], found[1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    ],
)
def test_tokens_are_those_of_transformers(
    model: Any, device: str, batch: int, options: dict[str, Any]
) -> None:
    theirs, ours = both(model, prompt(device, batch), **options)
    assert ours.shape == (batch, 5 + NEW)
    assert torch.equal(theirs, ours)


def test_it_stops_with_the_last_sequence_and_pads_the_others(model: Any, device: str) -> None:
    given = prompt(device, 3)
    free, _ = both(model, given, do_sample=False)
    # Each row ends at a token of its own: the second, the fourth and the seventh.
    ends = [int(free[row, 5 + at]) for row, at in ((0, 1), (1, 3), (2, 6))]
    theirs, ours = both(model, given, do_sample=False, eos_token_id=ends)
    assert torch.equal(theirs, ours)
    assert ours.shape[1] < free.shape[1]


def test_a_sequence_that_ends_with_its_longest_length_is_whole(model: Any, device: str) -> None:
    given = prompt(device)
    free, _ = both(model, given, do_sample=False)
    theirs, ours = both(model, given, do_sample=False, eos_token_id=int(free[0, -1]))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("at", [0, 3, NEW - 1])
def test_a_streamer_gets_each_token_that_stays_and_no_other(
    model: Any, device: str, at: int
) -> None:
    given = prompt(device)
    free, _ = both(model, given, do_sample=False)
    stream = Collect()
    out = model.generate(
        **given,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=int(free[0, 5 + at]),
        streamer=stream,
        custom_generate=functools.partial(sample, streamer=stream),
    )
    assert stream.got == [given["input_ids"][0].tolist(), *([one] for one in out[0, 5:].tolist())]
    assert stream.ended == 1


def test_another_criterion_is_asked_once_for_each_token_that_stays(model: Any, device: str) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Fourth(StoppingCriteria):
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.asked.append(input_ids.shape[1])
            full = input_ids.shape[1] >= 9
            return torch.full((input_ids.shape[0],), full, device=input_ids.device)

    fourth = Fourth()
    out = model.generate(
        **prompt(device),
        max_new_tokens=NEW,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([fourth]),
        custom_generate=sample,
    )
    assert fourth.asked == [6, 7, 8, 9]
    assert out.shape[1] == 9
    assert not may_lag([fourth], [])


def test_the_host_asks_for_a_token_only_when_the_next_is_under_way(device: str) -> None:
    told = Told(1, torch.device(device), ahead=True, streamer=(stream := Collect()))
    more, last = (torch.tensor([one], device=device) for one in (True, False))
    assert not told.token(torch.tensor([7], device=device), more)
    assert stream.got == []
    assert not told.token(torch.tensor([8], device=device), last)
    assert stream.got == [[7]]
    assert told.token(torch.tensor([9], device=device), last)
    told.end(dropped=True)
    assert stream.got == [[7], [8]]
