"""How sure a sign is of an exception."""

from __future__ import annotations

import pytest

from trimtab.diagnosis.sign import Sign, lowered
from trimtab.diagnosis.traceback import Frame, Raised

PEFT = Frame("peft", "peft/peft_model.py", "load_adapter")
TORCH = Frame("torch", "torch/nn/modules/module.py", "convert")
SIGN = Sign("no data", ("NotImplementedError",), through="^peft/")


@pytest.mark.parametrize(
    ("raised", "sure"),
    [
        (Raised("NotImplementedError", "no data!", (PEFT, TORCH), whole=True), "certain"),
        (Raised("NotImplementedError", "no data!", (TORCH,), whole=True), None),
        (Raised("NotImplementedError", "no data!", (TORCH,)), "possible"),
        (Raised("NotImplementedError", "no data!"), "likely"),
        (Raised("", "it says no data"), "possible"),
        (Raised("RuntimeError", "no data!", (PEFT,)), None),
        (Raised("NotImplementedError", "data", (PEFT,)), None),
    ],
)
def test_a_sign(raised: Raised, sure: str | None) -> None:
    assert SIGN.weigh(raised) == sure


def test_the_innermost_frame_of_a_library() -> None:
    sign = Sign("x", innermost="convert$", alone=False)
    own = Frame("", "run.py", "main")
    assert sign.weigh(Raised("E", "x", (PEFT, TORCH, own), whole=True)) == "certain"
    assert sign.weigh(Raised("E", "x", (TORCH, PEFT), whole=True)) is None
    assert sign.weigh(Raised("E", "x", (TORCH, PEFT))) is None
    assert sign.weigh(Raised("E", "x", (own,))) is None
    assert sign.weigh(Raised("E", "x")) is None


def test_levels() -> None:
    assert [lowered("certain", steps) for steps in range(4)] == [
        *("certain", "likely", "possible", "possible")
    ]
