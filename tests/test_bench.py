"""The figures of a bench belong together; how large they are is nobody's promise."""

from __future__ import annotations

import pytest

import tiny
from placing import placed
from trimtab.bench import bench
from trimtab.errors import RunningFault


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_figures_of_a_streamed_model(device: str) -> None:
    folder = tiny.checkpoint("llama")
    adapters = {"a": tiny.adapter(folder), "b": tiny.adapter(folder, seed=7)}
    with placed(folder, "nf4", ("layers",), adapters, device, poison=False) as placement:
        streamed = sum(unit.moving_bytes for unit in placement.plan.of_mode("streamed"))
        found = bench(placement, prompt_tokens=8, new_tokens=4, load_seconds=1.5)
        assert placement.model.active_adapter == "a"
    assert found.streamed_bytes == streamed
    assert found.link_gbps is not None
    assert found.floor == pytest.approx(found.link_gbps * 1e9 / streamed)
    assert found.share == pytest.approx(found.decode / found.floor)
    assert found.stall_ms is not None
    assert found.stall_ms >= 0
    assert found.switch_ms is not None
    assert found.switch_ms > 0
    assert found.load_seconds == 1.5
    assert min(found.decode, found.prefill, found.forecast) > 0
    assert (found.steps["captured"] == 0) == (device == "cpu")


def test_a_resident_model_has_no_floor() -> None:
    with placed(tiny.checkpoint("llama")) as placement:
        found = bench(placement, prompt_tokens=8, new_tokens=4)
    assert (found.floor, found.share, found.stall_ms, found.switch_ms) == (None,) * 4
    assert found.steps["refusals"]["a CPU runs"] > 0


def test_what_does_not_fit_the_context() -> None:
    with placed(tiny.checkpoint("llama")) as placement:
        with pytest.raises(RunningFault, match="TT606"):
            bench(placement, prompt_tokens=60)
        with pytest.raises(RunningFault, match="TT607"):
            bench(placement, new_tokens=1)
