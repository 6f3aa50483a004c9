"""A placement in the hands of several threads, and of somebody who presses Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tiny
from placing import carried_out, placed, planned
from trimtab import placement as module
from trimtab.decode import Steps
from trimtab.errors import PlacementFault
from trimtab.park import Gate
from trimtab.placement import Placement
from trimtab.stream import Ring


def adapters() -> dict[str, Path]:
    folder = tiny.checkpoint("llama")
    return {"a": tiny.adapter(folder), "b": tiny.adapter(folder, seed=7)}


@pytest.fixture
def two() -> Iterator[Placement]:
    with placed(tiny.checkpoint("llama"), "nf4", ("half",), adapters()) as found:
        yield found


def answer(model: Any) -> list[int]:
    given = tiny.inputs(tiny.checkpoint("llama"), batch=1)
    found = model.generate(**given, min_new_tokens=6, max_new_tokens=6, do_sample=False)
    return [int(one) for one in found[0]]


def asked(placement: Placement, name: str | None) -> list[int]:
    with placement.using(name) as model:
        return answer(model)


@pytest.mark.parametrize("names", [("a", "b"), (None, None), ("a", None), ("b", None, "a")])
def test_threads_that_ask_for_adapters_get_their_own(
    two: Placement, names: tuple[str | None, ...]
) -> None:
    wanted = {name: asked(two, name) for name in ("a", "b", None)}
    assert len({str(one) for one in wanted.values()}) == 3
    started = threading.Barrier(len(names))

    def one(name: str | None) -> list[list[int]]:
        started.wait(10)
        return [asked(two, name) for _ in range(3)]

    with ThreadPoolExecutor(len(names)) as threads:
        for name, found in zip(names, threads.map(one, names), strict=True):
            assert found == [wanted[name]] * 3
    assert two.model.active_adapters == ["a"]
    assert {name: asked(two, name) for name in ("a", "b", None)} == wanted
    assert answer(two.model) == wanted["a"]


def test_another_threads_call_of_the_model_runs_within(two: Placement) -> None:
    """As when one thread generates and another one prints what a streamer gives."""
    wanted = asked(two, "b")
    with ThreadPoolExecutor(1) as thread, two.using("b") as model:
        assert thread.submit(answer, model).result(30) == wanted
        with two.using("a"), two.using(None):
            pass
        assert thread.submit(answer, model).result(30) == wanted


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("at", ["refuse_merging", "switch", "shelf"])
def test_an_adapter_that_is_interrupted_at_the_last_moment_is_not_there(
    at: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {} if first else {"a": adapters()["a"]}
    with placed(tiny.checkpoint("llama"), "nf4", ("half",), given) as found:
        before = answer(found.model)
        owners = {"refuse_merging": module, "switch": found._switch, "shelf": found.shelf}
        name = at if at == "refuse_merging" else "take_over"

        def press(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owners[at], name, press)
            with pytest.raises(KeyboardInterrupt):
                found.add_adapter("b", adapters()["b"])
        assert found.adapters == tuple(given)
        assert answer(found.model) == before
        found.add_adapter("b", adapters()["b"])
        assert asked(found, "b") != before
        assert answer(found.model) in (before, asked(found, "b"))


@pytest.mark.parametrize("at", ["gate", "steps", "ring"])
def test_an_interrupt_while_it_is_closed_leaves_nothing(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(tiny.checkpoint("llama"), "nf4", ("layers",), adapters())
    found = carried_out(made, disk_folder=tmp_path / "disk")
    model = found.model
    assert any((tmp_path / "disk").iterdir())
    owners = {"gate": (Gate, "close"), "steps": (Steps, "clear"), "ring": (Ring, "close")}
    owner, name = owners[at]

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, press)
        with pytest.raises(KeyboardInterrupt):
            found.close()
    assert list((tmp_path / "disk").iterdir()) == []
    assert found.model is None
    found.close()
    assert found.closed
    with pytest.raises(PlacementFault) as caught:
        model(**tiny.inputs(tiny.checkpoint("llama")))
    assert caught.value.code == "TT208"


def test_closed_by_several_threads_it_is_closed_once(two: Placement) -> None:
    model, started = two.model, threading.Barrier(3)

    def close() -> None:
        started.wait(10)
        two.close()

    with ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(close) for _ in range(3)]:
            one.result(30)
    assert (two.closed, two.model, two.adapters) == (True, None, ())
    assert list(model.parameters()) == []


def test_who_waited_for_the_close_is_told_so(two: Placement) -> None:
    model, started = two.model, threading.Event()

    def call() -> Any:
        started.set()
        return model(**tiny.inputs(tiny.checkpoint("llama")))

    with ThreadPoolExecutor(1) as thread:
        with two._gate.passing():
            waiting = thread.submit(call)
            started.wait(10)
            time.sleep(0.2)
            two.close()
        with pytest.raises(PlacementFault) as caught:
            waiting.result(30)
    assert caught.value.code == "TT208"
