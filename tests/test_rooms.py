"""What a placement holds: never above the plan, and nothing after it is closed or has failed."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from placing import placed, planned
from trimtab import store
from trimtab.api import load
from trimtab.errors import AdapterFault, MemoryFault, PlacementFault
from trimtab.plan import STREAMED

EVERYTHING = ("layers", "towers", "tables", "head")


def allocated(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@pytest.fixture(autouse=True)
def warm() -> None:
    """cuBLAS keeps a workspace from its first product on, which is no placement's."""
    if torch.cuda.is_available():
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("away", [(), ("half",), EVERYTHING])
@pytest.mark.parametrize("quant", ["none", "nf4", "int8"])
def test_no_tier_is_above_the_plan(quant: str, away: tuple[str, ...], device: str) -> None:
    folder = tiny.checkpoint("gemma4")
    adapters = {"a": tiny.adapter(folder)}
    given = tiny.inputs(folder, batch=1, length=56, device=device)
    with placed(folder, quant, away, adapters, device, poison=False, slots=2) as found:
        found.model.generate(**given, max_new_tokens=8, do_sample=False)
        report = found.report()
    assert {tier.tier for tier in report.tiers} == set(found.plan.totals)
    for tier in report.tiers:
        assert tier.measured <= tier.planned, tier
        assert (tier.measured > 0) == (tier.planned > 0) or tier.tier == found.plan.runs


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("quant", ["none", "nf4-dq", "int8"])
def test_streamed_layers_leave_only_their_slots(quant: str, device: str) -> None:
    folder = tiny.checkpoint("llama")
    with placed(folder, quant, ("layers",), device=device, poison=False) as found:
        found.model(**tiny.inputs(folder, device=device))
        for layer in found.model.model.layers:
            for parameter in layer.parameters():
                with torch._C.DisableTorchFunctionSubclass():
                    held = parameter.untyped_storage().nbytes()
                assert held == (parameter.element_size() if parameter.ndim > 1 else held)
                assert getattr(parameter, "CB", None) is None
                assert parameter.__dict__.get("quant_state") is None


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("quant", ["none", "nf4", "int8"])
def test_closing_frees_all_though_the_model_is_held(
    quant: str, device: str, tmp_path: Path
) -> None:
    folder = tiny.checkpoint("gemma4")
    before = allocated(device)
    made = planned(folder, quant, EVERYTHING, {"a": tiny.adapter(folder)}, device, "disk")
    with load(made, disk_folder=tmp_path / "disk") as found:
        model = found.model
        model(**tiny.inputs(folder, device=device))
        assert any((tmp_path / "disk").iterdir())
    assert list((tmp_path / "disk").iterdir()) == []
    assert list(model.parameters()) == []
    with pytest.raises(PlacementFault) as caught:
        model(**tiny.inputs(folder))
    assert caught.value.code == "TT208"
    del caught  # its traceback holds the inputs
    with pytest.raises(PlacementFault):
        found.report()
    found.close()
    assert allocated(device) <= before


class Interrupt:
    """Progress that is interrupted at the n-th parameter."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("after", [0, 20, 60])
def test_an_interrupt_while_loading_leaves_nothing(after: int, device: str, tmp_path: Path) -> None:
    folder = tiny.checkpoint("gemma4")
    before = allocated(device)
    made = planned(folder, "nf4", EVERYTHING, device=device, tier="disk")
    with pytest.raises(KeyboardInterrupt):
        load(made, disk_folder=tmp_path / "disk", progress=Interrupt(after))
    assert list((tmp_path / "disk").iterdir()) == []
    assert allocated(device) <= before
    with load(made, disk_folder=tmp_path / "disk") as found:
        wanted = tiny.logits(tiny.reference(folder, "nf4", device=device), given(folder, device))
        assert torch.equal(tiny.logits(found.model, given(folder, device)), wanted)


@pytest.mark.gpu
def test_an_interrupt_while_memory_is_pinned_leaves_nothing() -> None:
    folder = tiny.checkpoint("llama")
    before = allocated("cuda")
    made = planned(folder, "nf4", ("layers",), device="cuda")
    for after in (0, 20):
        with pytest.raises(KeyboardInterrupt):
            load(made, progress=Interrupt(after))
        assert allocated("cuda") <= before
        assert not any(one.name.startswith("trimtab-pin") for one in threading.enumerate())
    with load(made) as found:
        wanted = tiny.logits(tiny.reference(folder, "nf4", device="cuda"), given(folder, "cuda"))
        assert torch.equal(tiny.logits(found.model, given(folder, "cuda")), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("refused", [1, 100])
def test_memory_that_is_not_pinned_is_told_and_computes_the_same(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.checkpoint("llama")
    made = planned(folder, "nf4", ("layers",), {"a": tiny.adapter(folder)}, "cuda")
    with load(made) as found:
        wanted = tiny.logits(found.model, given(folder, "cuda"))
        assert found.report().pageable == 0
    pin, asked = store._pin, itertools.count()
    monkeypatch.setattr(store, "_pin", lambda one: next(asked) >= refused and pin(one))
    with load(made) as found:
        assert torch.equal(tiny.logits(found.model, given(folder, "cuda")), wanted)
        sizes = [unit.moving_bytes for unit in made.of_mode(STREAMED)]
        assert found.report().pageable == sum(sizes[:refused])
        found.model.generate(**given(folder, "cuda"), max_new_tokens=4, do_sample=False)
        assert set(found.steps.refusals) == {"memory could not be pinned"}


@pytest.mark.gpu
def test_a_table_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.checkpoint("gemma4")
    made = planned(folder, "nf4", ("tables",), device="cuda")
    monkeypatch.setattr(store, "_pin", lambda one: False)
    with pytest.raises(MemoryFault, match=r"embed_tokens_per_layer could not be pinned") as caught:
        load(made)
    assert caught.value.code == "TT404"


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_an_adapter_that_fails_leaves_nothing(device: str, tmp_path: Path) -> None:
    folder = tiny.checkpoint("llama")
    broken = tiny.writable(tiny.adapter(folder), tmp_path)
    before = allocated(device)
    made = planned(folder, "nf4", EVERYTHING, {"a": broken}, device, "disk")
    file = broken / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterFault) as caught:
        load(made, disk_folder=tmp_path / "disk")
    assert caught.value.code == "TT302"
    assert not (tmp_path / "disk").exists() or list((tmp_path / "disk").iterdir()) == []
    assert allocated(device) <= before


def given(folder: Path, device: str) -> dict[str, Any]:
    return tiny.inputs(folder, device=device)
