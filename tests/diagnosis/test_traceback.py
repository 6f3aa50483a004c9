"""Exceptions, frames and versions are found in a text, however it was pasted."""

from __future__ import annotations

import pytest

from trimtab.diagnosis.traceback import Frame, Raised, read_traceback

PLAIN = """Traceback (most recent call last):
  File "/home/user/run.py", line 3, in <module>
    model = PeftModel.from_pretrained(base, "lora")
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/peft/peft_model.py", line 541, in from_pretrained
    raise KeyError(name)
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
KeyError: 'a.b'
"""
FRAMES = (
    Frame("", "run.py", "<module>"),
    Frame("peft", "peft/peft_model.py", "from_pretrained"),
    Frame("python", "json/decoder.py", "raw_decode"),
)


def one(text: str) -> Raised:
    (raised,) = read_traceback(text).raised
    return raised


def test_a_plain_one() -> None:
    assert one(PLAIN) == Raised("KeyError", "'a.b'", FRAMES, whole=True)
    assert one(PLAIN).innermost == FRAMES[1]
    assert str(FRAMES[1]) == "peft/peft_model.py:from_pretrained"


@pytest.mark.parametrize(
    "line",
    [
        r'File "C:\venv\Lib\site-packages\peft\peft_model.py", line 541, in from_pretrained',
        "File ~/venv/lib/python3.11/site-packages/peft/peft_model.py:541, in "
        "PeftModel.from_pretrained(cls, model, model_id)",
        "/usr/local/lib/python3.10/dist-packages/peft/peft_model.py in from_pretrained(cls, model)",
        "│ /venv/lib/python3.11/site-packages/peft/peft_model.py:541 in from_pretrained        │",
        'File "/src/peft/src/peft/peft_model.py", line 541, in from_pretrained',
        '\x1b[0;36mFile \x1b[0m"/x/site-packages/peft/peft_model.py", line 541, in from_pretrained',
        '> > [rank0]:   File "/x/site-packages/peft/peft_model.py", line 541, in from_pretrained',
        '2026-01-02 03:04:05,678 ERROR   File "/x/site-packages/peft/peft_model.py", line 541, in '
        "from_pretrained",
    ],
)
def test_forms_of_a_frame(line: str) -> None:
    assert one(f"{line}\nKeyError: 2").frames == (FRAMES[1],)


@pytest.mark.parametrize("cell", ["Cell In[3], line 2", "<ipython-input-3-abc> in <module>"])
def test_cells_of_a_notebook_are_the_users_own(cell: str) -> None:
    assert one(f"{cell}\n----> 2 model()\nKeyError: 2").frames[0].library == ""


def test_an_exception_and_its_cause_in_their_order() -> None:
    text = f"{PLAIN}\nThe above exception was the direct cause of the following exception:\n\n"
    told = read_traceback(text + PLAIN.replace("KeyError: 'a.b'", "x.y.OddError: no"))
    assert [(raised.type, raised.message) for raised in told.raised] == [
        ("KeyError", "'a.b'"),
        ("OddError", "no"),
    ]
    assert [raised.frames for raised in told.raised] == [FRAMES, FRAMES]


def test_messages_of_several_lines() -> None:
    text = (
        "RuntimeError: Error(s) in loading\n\tsize mismatch for a\n\tsize mismatch for b\n\nBye.\n"
    )
    assert one(text).message == "Error(s) in loading\n\tsize mismatch for a\n\tsize mismatch for b"
    assert (
        one("ValueError: \nSome modules are dispatched\n").message == "Some modules are dispatched"
    )


def test_an_exception_behind_a_prefix() -> None:
    assert one("12:03:04 ERROR worker 3 died: ValueError: no such thing").type == "ValueError"


@pytest.mark.parametrize(
    "text", ["", "all is well", "    except KeyError:\n", '    raise ValueError("x: y")\n']
)
def test_no_exception(text: str) -> None:
    assert read_traceback(text).raised == ()


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("peft==0.18.1\ntorch==2.9.0+cu128", {"peft": "0.18.1", "torch": "2.9.0+cu128"}),
        ("- `transformers` version: 5.5.4.", {"transformers": "5.5.4"}),
        ("- PyTorch version (GPU?): 2.13.0 (True)", {"torch": "2.13.0"}),
        ("| accelerate | 1.13.0 |", {"accelerate": "1.13.0"}),
        ("bitsandbytes    0.49.2\n", {"bitsandbytes": "0.49.2"}),
        ("with peft 0.18.1 and not peft 0.21", {"peft": "0.18.1"}),
        ("/site-packages/torch/2.13 my-peft==1.0 torchvision 0.2", {}),
    ],
)
def test_versions(text: str, versions: dict[str, str]) -> None:
    assert read_traceback(text).versions == versions
