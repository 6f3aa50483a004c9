"""What is made of how a case ended."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.repro.cases import Case, Subject
from trimtab.repro.matrix import Cell, Stack, judged, matrix
from trimtab.repro.process import Ran

SUBJECT = Subject(
    shown="m",
    model="owner/m",
    adapter="owner/lora",
    model_class="LlamaForCausalLM",
    dtype="bfloat16",
    here=0,
    device_map={"": 0, "model.layers.1": "cpu"},
    quants=("nf4",),
)
STACK = Stack("installed", (sys.executable,), {"peft": "0.21.2"}, {})
ALL = {"Parameter cuda:0": 4, "Params4bit cuda:0": 10}
AWAY = {"Parameter cuda:0": 4, "Params4bit cuda:0": 8, "Params4bit meta": 2}


def told(tokens: list[int], where: dict[str, int], logits: Any = (1.0, -2.0)) -> dict[str, Any]:
    return {"tokens": tokens, "parameters": where, "logits": list(logits)}


def done(*objects: dict[str, Any]) -> Ran:
    return Ran(0, 1.0, objects, "")


WHOLE = done(told([1, 2], ALL), told([3, 4], ALL))
SPLIT = done(told([1, 2], AWAY))


def cell(case: Case, ran: Ran, **before: Ran) -> Cell:
    earlier = {Case.WHOLE: before.get("whole", WHOLE), Case.SPLIT: before.get("split", SPLIT)}
    return judged(SUBJECT, STACK, "nf4", case, "text", {**earlier, case: ran}, 60)


def said(case: Case, ran: Ran, **before: Ran) -> tuple[str, str, bool]:
    found = cell(case, ran, **before)
    return found.outcome, found.verdict, found.fine


def test_the_first_case_has_nothing_to_be_compared_with() -> None:
    assert said(Case.WHOLE, WHOLE) == ("works", "works", True)


def test_equal() -> None:
    assert said(Case.SPLIT, SPLIT) == ("equal", "equal tokens", True)
    assert said(Case.ADAPTER, done(told([3, 4], AWAY))) == ("equal", "equal tokens", True)
    rounded = done(told([3, 4], AWAY, (1.01, -1.98)))
    assert said(Case.SAME_MAP, rounded) == ("equal", "equal tokens", True)


def test_the_adapter_is_compared_with_the_adapter_and_the_base_with_the_base() -> None:
    assert said(Case.SPLIT, done(told([3, 4], AWAY)))[0] == "differs"
    assert said(Case.ADAPTER, done(told([1, 2], AWAY)))[0] == "differs"


def test_different() -> None:
    other = done(told([3, 5], AWAY))
    assert said(Case.ADAPTER, other) == ("differs", "other tokens", False)
    apart = done(told([3, 4], AWAY, (1.0, -2.5)))
    assert said(Case.ADAPTER, apart) == ("differs", "equal tokens, logits 0.5 apart", False)
    nan = done(told([0, 0], AWAY, (float("nan"), 1.0)))
    assert said(Case.ADAPTER, nan) == ("differs", "NaN", False)


def test_silently_moved() -> None:
    found = cell(Case.ADAPTER, done(told([3, 4], ALL)))
    assert found.outcome == "equal"
    assert found.verdict == "equal tokens, everything was silently moved to cuda:0 [TT221]"
    assert (found.fine, found.codes, found.library) == (False, ("TT221",), "peft")
    assert found.why.startswith("PEFT takes the base's hooks off")
    assert cell(Case.ADAPTER, done(told([3, 4], ALL)), split=Ran(1, 1.0, (), "")).fine


def test_not_quantized() -> None:
    plain = done(told([1, 9], {"Parameter cpu": 12, "Parameter meta": 2}))
    verdict = "other tokens, nothing was quantized [TT515]"
    assert said(Case.SPLIT, plain) == ("differs", verdict, False)
    some = done(told([1, 2], {"Params4bit cuda:0": 8, "Parameter meta": 6}))
    verdict = "equal tokens, only 8 of 10 weights were quantized [TT515]"
    assert said(Case.SPLIT, some) == ("equal", verdict, True), "the map keeps those from it"


def test_rewritten() -> None:
    found = cell(Case.ADAPTER, done(told([3, 4], AWAY), {"rewritten": True}))
    assert found.verdict == "equal tokens, the base was rewritten [TT507]"
    assert not found.fine
    assert cell(Case.ADAPTER, done(told([3, 4], AWAY), {"rewritten": False})).fine


def test_an_exception() -> None:
    stderr = (
        'Traceback (most recent call last):\n  File "x/site-packages/torch/m.py", line 1, in f\n'
        '  File "x/site-packages/accelerate/m.py", line 1, in f\n'
        "NotImplementedError: Cannot copy out of meta tensor; no data!\n"
    )
    found = cell(Case.ADAPTER, Ran(1, 1.0, ({"rewritten": True},), stderr))
    assert found.outcome == "failed"
    assert found.verdict == (
        "NotImplementedError: Cannot copy out of meta tensor; no data! [TT212], "
        "the base was rewritten [TT507]"
    )
    assert found.codes == ("TT212", "TT507")
    assert found.failure is not None
    assert found.failure.exception == "NotImplementedError"


def test_an_unknown_exception_with_a_long_message() -> None:
    stderr = 'Traceback (most recent call last):\n  File "a.py"\nValueError: ' + "word " * 100
    assert said(Case.ADAPTER, Ran(1, 1.0, (), stderr)) == (
        "failed",
        "ValueError: " + "word " * 13 + "wor [...]",
        False,
    )


def test_without_a_traceback() -> None:
    assert said(Case.SPLIT, Ran(-9, 1.0, (), "")) == (
        "died",
        "ended with signal 9 and without a traceback",
        False,
    )
    assert said(Case.SPLIT, Ran(3, 1.0, (), "noise"))[1] == (
        "ended with status 3 and without a traceback"
    )
    assert said(Case.SPLIT, done())[0] == "died"


def test_over_the_limit() -> None:
    assert said(Case.SPLIT, Ran(None, 60.0, (), "")) == ("stopped", "stopped after 60 s", False)


def test_without_the_first_case_there_is_nothing_to_compare() -> None:
    failed = Ran(1, 1.0, (), "")
    assert said(Case.ADAPTER, done(told([3, 4], AWAY)), whole=failed) == ("works", "works", True)


def test_for_trimtab_what_rests_where() -> None:
    answer = done(told([3, 4], ALL), {"rests": {"gpu:0": 10, "cpu": 4}})
    found = cell(Case.TRIMTAB, answer)
    assert (found.fine, found.verdict) == (True, "equal tokens")
    assert found.rests == {"gpu:0": 10, "cpu": 4}


def test_an_object_for_json() -> None:
    found = cell(Case.ADAPTER, done(told([3, 4], ALL))).to_dict()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found))
    assert (found["case"], found["title"]) == ("split-adapter", "split, with the adapter")
    assert set(found) == {one.name for one in dataclasses.fields(Cell)} | {"title"}


def test_every_case_in_every_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[Any, ...]] = []

    def pretend(python: Any, text: str, name: str, *rest: Any) -> Ran:
        ran.append((python, name, *rest))
        return WHOLE

    monkeypatch.setattr("trimtab.repro.matrix.run", pretend)
    both = dataclasses.replace(SUBJECT, quants=("nf4-dq", "nf4"), adapter=str(tmp_path))
    other = dataclasses.replace(STACK, name="peft 0.18.1", python=("other", "-I"))
    lines: list[str] = []
    cells = list(matrix(both, [STACK, other], 60, lines.append))
    assert [(one.stack, one.quant, one.case) for one in cells] == [
        (stack, quant, case)
        for stack in ("installed", "peft 0.18.1")
        for quant in ("nf4-dq", "nf4")
        for case in Case
    ]
    assert ran[0] == ((sys.executable,), "whole.py", [str(tmp_path)], 60, {})
    assert ran[-1][:2] == (("other", "-I"), "trimtab-load.py")
    title = "trimtab, with the adapter and the same map"
    assert lines[-1] == f"20/20: {title}; NF4; peft 0.18.1"
