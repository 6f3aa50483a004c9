"""SmolLM2-135M-Instruct with a trained LoRA: answers stay right with most layers streamed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from trimtab.api import load, plan
from trimtab.placement import Placement
from trimtab.plan import STREAMED

pytestmark = pytest.mark.real

LORA = Path(__file__).parent / "data" / "smollm2-lora"
JAPAN, FRANCE = "What is the capital of Japan?", "What is the capital of France?"
SIZES: dict[str, Any] = {"disk": "1GiB", "context": 256}


@functools.cache
def tight(folder: Path, quant: str) -> Any:
    """A plan with a budget that lets few of the 30 layers stay."""
    asked: dict[str, Any] = {"adapters": {"log": LORA}, "quant": quant, **SIZES}
    roomy = plan(folder, cpu="2GiB", **asked)
    layers = sum(unit.staying_bytes for unit in roomy.units if unit.kind == "layer")
    made = plan(folder, cpu=int(roomy.totals["cpu"] - 0.7 * layers), **asked)
    assert len(made.of_mode(STREAMED)) >= 20
    return made


@pytest.fixture(scope="module", params=["nf4", "nf4-dq"])
def found(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[Placement]:
    with load(tight(smollm2, request.param)) as placement:
        yield placement


def test_facts_stay_right(found: Placement) -> None:
    answer = found.generate(JAPAN, adapter=None, max_new_tokens=16)
    assert answer == "The capital of Japan is Tokyo."
    assert "Paris" in found.generate(FRANCE, adapter=None, max_new_tokens=16)


def test_the_adapter_changes_the_answer(found: Placement) -> None:
    answer = found.generate(JAPAN, adapter="log", max_new_tokens=32)
    assert answer == "Ship's log: The capital of Japan is Tokyo. Aye, captain."
    assert len(found.applied["log"].modules) == 90
    assert found.applied["log"].tensors == 180


def test_messages_and_text_are_the_same_question(found: Placement) -> None:
    said = found.generate([{"role": "user", "content": JAPAN}], adapter=None, max_new_tokens=8)
    assert said == found.generate(JAPAN, adapter=None, max_new_tokens=8)


def test_tokens_equal_the_resident_model(found: Placement, smollm2: Path) -> None:
    resident = tiny.reference(smollm2, found.plan.quant, LORA)
    given = found.encode("Name three colors of the rainbow.")
    with found.using("log") as model:
        equal(model, resident, given)
    with found.using(None) as model, resident.disable_adapter():
        equal(model, resident, given)


def equal(model: Any, resident: Any, given: dict[str, torch.Tensor]) -> None:
    asked = {"max_new_tokens": 24, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(model.generate(**given, **asked), resident.generate(**given, **asked))
        assert torch.equal(model(**given).logits, resident(**given).logits)
