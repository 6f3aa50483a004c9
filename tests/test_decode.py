"""Captured decode steps: the same tokens, captured once a kind, and a reason where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny
from placing import placed, planned
from trimtab import caches, decode
from trimtab.api import load
from trimtab.decode import lora_shortcuts
from trimtab.fakes import Rerun, TorchProducts
from trimtab.lora import Shortcuts
from trimtab.placement import Placement

COUNT = 24


def generate(placement: Placement, name: str | None, **options: Any) -> list[int]:
    folder = placement.plan.model
    given = tiny.inputs(tiny.Path(folder), batch=1, device=placement.device.type)
    given.pop("mm_token_type_ids", None)
    fixed = {"min_new_tokens": COUNT, "max_new_tokens": COUNT, "do_sample": False}
    with placement.using(name) as model:
        found: list[int] = model.generate(**given, **{**fixed, **options})[0].tolist()
    return found


def eagerly(placement: Placement, name: str | None) -> list[int]:
    """On a cache like the captured steps', since another rounds differently."""
    base = placement.model.get_base_model()
    cache = caches.static_cache(base, placement.plan.context)
    return generate(placement, name, **{caches.cache_argument(base): cache})


@pytest.fixture(params=tiny.DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def captured(placement: Placement) -> Placement:
    """On a CPU a fake captures; its ring must come back to where it was with each token."""
    steps = placement.steps
    if placement.device.type == "cpu":

        def state() -> list[torch.Tensor]:
            layers = steps.cache.layers
            values = [value for layer in layers for value in vars(layer).values()]
            return [one for one in values if isinstance(one, torch.Tensor)]

        steps.recorder = Rerun(steps._ring, state)
    return placement


@pytest.fixture(params=["llama", "gemma4"])
def streamed(request: pytest.FixtureRequest, device: str) -> Iterator[Placement]:
    folder = tiny.checkpoint(request.param)
    adapters = {"a": tiny.adapter(folder), "b": tiny.adapter(folder, seed=7)}
    count = 2 if request.param == "llama" else 4  # of 3 and 6 layers
    with placed(
        folder, "nf4", ("layers",), adapters, device, poison=False, slots=count
    ) as placement:
        # They round otherwise: all but a test of their own compare to the last bit.
        placement.steps.shortcuts = None
        yield captured(placement)


@pytest.fixture
def shortcuts(device: str) -> Shortcuts:
    found = Shortcuts(TorchProducts())
    if device == "cuda":
        made = lora_shortcuts(torch.device(device, 0))
        assert made is not None
        found = made
    return found


def test_captured_tokens_are_the_eager_ones(streamed: Placement) -> None:
    for name in ("a", None, "b"):
        assert generate(streamed, name) == eagerly(streamed, name)
    assert streamed.steps.replayed > 2 * COUNT


def test_captured_steps_take_the_shortcut_for_each_lora_layer(
    streamed: Placement, shortcuts: Shortcuts
) -> None:
    streamed.steps.shortcuts = shortcuts
    for name, count in (("a", streamed.applied["a"].modules), (None, ())):
        ours, theirs = generate(streamed, name), eagerly(streamed, name)
        assert streamed.steps.shortened == len(count)
        if streamed.device.type == "cpu":
            assert ours == theirs
        assert roundings_apart(streamed, name, ours, theirs) <= 8


def roundings_apart(
    placement: Placement, name: str | None, one: list[int], other: list[int]
) -> float:
    """What lies between the logits of the first tokens that differ, in roundings of the larger."""
    at = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
    if not at:
        return 0.0
    ids = torch.tensor([one[:at]], device=placement.device)
    with placement.using(name) as model, torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1].float()
    first, second = logits[one[at]], logits[other[at]]
    rounding = 2.0 ** (int(torch.frexp(max(first, second))[1]) - 8)
    return float((first - second).abs()) / rounding


def test_a_kind_of_step_is_captured_once(streamed: Placement) -> None:
    for name in ("a", "b"):
        generate(streamed, name)
    generate(streamed, "a")
    before = streamed.steps.captured
    for name in ("a", "b", "a"):
        generate(streamed, name)
    assert streamed.steps.captured == before


def test_an_adapter_of_the_same_name_is_another(streamed: Placement) -> None:
    folder = tiny.Path(streamed.plan.model)
    generate(streamed, "b")
    generate(streamed, "b")
    streamed.remove_adapter("b")
    streamed.add_adapter("b", tiny.adapter(folder, seed=11))
    found = [generate(streamed, "b") for _ in range(2)]
    assert found == [eagerly(streamed, "b")] * 2


def test_streamed_equals_resident_captured_the_same_way(device: str) -> None:
    folder = tiny.checkpoint("gemma4")
    adapters = {"a": tiny.adapter(folder)}
    found = []
    for away in ((), ("half", "tables"), ("layers", "tables")):
        with placed(folder, "nf4", away, adapters, device, poison=False, slots=4) as placement:
            captured(placement)
            found.append([generate(placement, "a") for _ in range(2)])
            assert placement.steps.replayed > COUNT
    assert found[0] == found[1] == found[2]


class Interrupting:
    """A recorder whose user presses Ctrl-C: while it captures, or before or after a replay."""

    def __init__(self, inner: Any, at: str) -> None:
        self._inner, self._at = inner, at
        self.times = 0

    def _press(self, now: str) -> None:
        if now == self._at and not self.times:
            self.times += 1
            raise KeyboardInterrupt

    def capture(self, work: Any) -> Any:
        def interrupted() -> Any:
            out = work()
            self._press("capture")
            return out

        out, replay = self._inner.capture(interrupted)

        def pressed() -> None:
            self._press("before")
            replay()
            self._press("after")

        return out, pressed


class Masking:
    """A recorder whose captures are interrupted, and then cannot be ended, as torch says it."""

    def capture(self, work: Any) -> Any:
        try:
            work()
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("capturing stream has unjoined work") from None
        finally:
            assert not torch.is_inference_mode_enabled()


def test_an_interrupt_that_a_failed_recording_hides_is_one(streamed: Placement) -> None:
    expected = eagerly(streamed, "a")
    own, streamed.steps.recorder = streamed.steps.recorder, Masking()
    with pytest.raises(KeyboardInterrupt):
        generate(streamed, "a")
    assert isinstance(streamed.steps.recorder, Masking)  # nothing is switched off
    streamed.steps.recorder = own
    assert generate(streamed, "a") == expected


def test_it_generates_inside_and_outside_of_inference_mode(streamed: Placement) -> None:
    expected = eagerly(streamed, "a")
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            assert generate(streamed, "a") == expected
    assert streamed.steps.replayed > 0


@pytest.mark.parametrize("at", ["capture", "before", "after"])
def test_after_an_interrupt_no_slot_is_taken_for_what_it_is_not(
    streamed: Placement, at: str
) -> None:
    expected = eagerly(streamed, "a")
    streamed.steps.recorder = recorder = Interrupting(streamed.steps.recorder, at)
    with pytest.raises(KeyboardInterrupt):
        generate(streamed, "a")
    if at != "after" or streamed.device.type == "cuda":  # the fake has run the ring itself
        assert set(streamed.steps._ring.held) == {None}
    for _ in range(2):
        assert generate(streamed, "a") == expected
    assert recorder.times == 1
    assert streamed.steps.replayed > COUNT


def test_a_cache_has_a_size_that_requests_share(
    streamed: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 8)
    sizes, captured = [], []
    prompt = tiny.inputs(tiny.Path(streamed.plan.model), batch=1, device=streamed.device.type)
    length = prompt["input_ids"].shape[1]
    assert length == 12
    for added in (3, 4, 2, 52, 40, 4, 3):
        generate(streamed, None, min_new_tokens=added, max_new_tokens=added)
        sizes.append(streamed.steps._cached[1])
        captured.append(streamed.steps.captured)
    # 64 tokens are what the plan has; what is four times too large is kept.
    assert sizes == [16, 16, 16, 64, 64, 64, 64]
    assert captured[0] == captured[2] < captured[3] == captured[6]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
@pytest.mark.parametrize(
    ("options", "added"), [({}, 20), ({"max_length": 40}, 9), ({"max_new_tokens": 3}, 3)]
)
def test_a_length_that_is_not_given_is_transformers_own(
    streamed: Placement, options: dict[str, Any], added: int
) -> None:
    ids = torch.randint(1, 90, (1, 31), generator=torch.Generator().manual_seed(5))
    given = {"input_ids": ids.to(streamed.device), "do_sample": False, "pad_token_id": 0}
    given |= {"attention_mask": torch.ones_like(given["input_ids"]), "eos_token_id": None}
    with streamed.using(None) as model:
        found = model.generate(**given, **options)
        base = model.get_base_model()
        cache = {caches.cache_argument(base): caches.static_cache(base, streamed.plan.context)}
        assert torch.equal(found, model.generate(**given, **options, **cache))
    assert found.shape[1] == 31 + added
    assert streamed.steps._cached == (1, 64)


def test_it_samples_streams_and_stops(streamed: Placement) -> None:
    transformers = pytest.importorskip("transformers")
    given = tiny.inputs(tiny.Path(streamed.plan.model), batch=1, device=streamed.device.type)
    given.pop("mm_token_type_ids", None)

    class Collect(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    stream = Collect()
    torch.manual_seed(0)
    out = streamed.model.generate(
        **given, do_sample=True, temperature=0.8, min_new_tokens=20, max_new_tokens=20,
        streamer=stream,
    )  # fmt: skip
    assert stream.got == [*out[0].tolist(), -1]
    assert streamed.steps.replayed > 10


REFUSED: dict[str, dict[str, Any]] = {
    "generate was asked for another cache": {"use_cache": False},
    "beams and several answers reorder the cache": {"num_beams": 2},
    "assisted decoding crops the cache": {"prompt_lookup_num_tokens": 3},
    "the cache would be handed out": {"return_dict_in_generate": True},
    "the prompt and its answer are longer, or more, than planned": {"max_new_tokens": 60},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_captured_runs_and_says_why(streamed: Placement, why: str) -> None:
    given = tiny.inputs(tiny.Path(streamed.plan.model), batch=1, device=streamed.device.type)
    asked = {"max_new_tokens": 4, "do_sample": False, **REFUSED[why]}
    streamed.model.generate(**given, **asked)
    assert streamed.steps.refusals[why] == 1
    assert streamed.steps.captured == 0


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_virtual_tokens_are_not_squeezed_into_a_cache_of_the_prompt_s_size(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 8)
    folder = tiny.checkpoint("llama")
    tuned = tiny.adapter(folder, "PromptTuning", num_virtual_tokens=20)
    given = {"input_ids": torch.tensor([[3, 5, 7, 9]], device=device), "do_sample": False,
             "max_new_tokens": 28, "min_new_tokens": 28, "pad_token_id": 0}  # fmt: skip
    with placed(folder, "none", (), {"p": tuned}, device, poison=False) as placement:
        expected = placement.model.generate(**given)
        captured(placement)
        assert torch.equal(placement.model.generate(**given), expected)
        assert placement.steps.refusals["the adapter adds tokens to the prompt"] >= 1
        assert placement.steps.captured == 0
        # Without it the same model is captured again.
        with placement.model.disable_adapter():
            placement.model.get_base_model().generate(**given)
        assert placement.steps.captured > 0


def test_a_cpu_and_a_disk_say_why(device: str) -> None:
    folder = tiny.checkpoint("llama")
    with load(planned(folder, "nf4", ("half",), device=device, tier="disk")) as placement:
        placement.model.generate(**tiny.inputs(folder, device=device), max_new_tokens=4)
        (why, *others) = placement.steps.refusals
    assert not others
    assert why == (
        "a CPU runs"
        if device == "cpu"
        else "streamed layers rest on the disk, which the host must read"
    )


def test_closing_lets_go_of_the_steps(streamed: Placement) -> None:
    generate(streamed, "a")
    generate(streamed, "a")
    streamed.close()
    assert streamed.steps.cache is None


def test_a_mixed_batch_runs_and_says_why_it_is_not_captured(device: str) -> None:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder), "b": tiny.adapter(folder, seed=7)}
    given = tiny.inputs(folder, device=device)
    fixed = {"min_new_tokens": COUNT, "max_new_tokens": COUNT, "do_sample": False}
    with placed(
        folder, "nf4", ("layers",), adapters, device, poison=False, slots=3, batch=2
    ) as placement:
        captured(placement)
        model, rows = placement.model, ["b", "a"]
        for _ in range(2):
            found = model.generate(**given, adapter_names=rows, **fixed)
        why = "rows of a mixed batch are picked by the host"
        assert placement.steps.refusals[why] == 2 * (COUNT - 1)
        assert placement.steps.captured == 0
        base = model.get_base_model()
        cache = {caches.cache_argument(base): caches.static_cache(base, placement.plan.context)}
        eager = model.generate(**given, adapter_names=rows, **fixed, **cache)
        assert torch.equal(found, eager)
        for _ in range(2):
            model.generate(**given, **fixed)
        assert placement.steps.captured > 0


def test_an_adapter_that_comes_leaves_the_steps_of_others(device: str) -> None:
    folder = tiny.checkpoint("llama")
    with placed(
        folder, "nf4", ("layers",), {"a": tiny.adapter(folder)}, device, poison=False, slots=3
    ) as placement:
        captured(placement)
        for name in ("a", None):
            generate(placement, name)
        count = placement.steps.captured
        placement.add_adapter("b", tiny.adapter(folder, seed=7))
        generate(placement, "a")
        with placement.using("b"):
            generate(placement, None)  # the base is the base, whichever it would be
        assert placement.steps.captured == count
        generate(placement, "b")
        assert placement.steps.captured > count
