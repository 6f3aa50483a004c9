"""Text that the terminal's encoding cannot hold, and what is said beside an answer."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from situations.situation import edit, lora
from trimtab.cli import main, quiet

OPTIONS = ["--context", "64", "--raw", "--max-new-tokens", "3"]


def test_what_an_encoding_cannot_hold_is_replaced_and_the_stream_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", out)
    with quiet.any_text():
        print("crab \N{CRAB}", flush=True)
    assert out.buffer.getvalue() == b"crab ?" + os.linesep.encode()  # type: ignore[attr-defined]
    assert out.errors == "strict"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("two", "two"),
        ("tw\N{LATIN SMALL LETTER O WITH DIAERESIS}", "tw\N{LATIN SMALL LETTER O WITH DIAERESIS}"),
        # Bytes of UTF-8 that Python read as ASCII, and bytes of nothing.
        ("tw\udcc3\udcb6", "tw\N{LATIN SMALL LETTER O WITH DIAERESIS}"),
        ("caf\udce9", "caf\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_text_is_what_was_meant(typed: str, meant: str) -> None:
    assert quiet.text_of(typed) == meant


def test_a_prompt_of_any_bytes_is_answered(base: Path) -> None:
    asked = [sys.executable, "-m", "trimtab", "run", str(base), *OPTIONS, "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        asked, input=b"\xff\xc3\xb6 select", capture_output=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(json.loads(done.stdout)["tokens"]) == 3


def test_what_was_mapped_of_an_adapter_is_said(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = edit(lora(tmp_path), base_model_name_or_path="/somewhere/else")
    asked = ["run", str(base), "--adapter", str(adapter), "--prompt", "select", "--json"]
    assert main([*asked, *OPTIONS]) == 0
    said = capsys.readouterr()
    note = f"{adapter} was made for /somewhere/else, the base is {base}"
    assert said.err == f"note: {note}\n"
    told: dict[str, Any] = json.loads(said.out)
    assert told["report"]["notes"] == [note]


def test_an_adapter_of_another_model_is_refused_before_anything_is_loaded(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.place.place", None)
    other = tiny.adapter(tiny.checkpoint("gpt2"))
    assert main(["run", str(base), "--adapter", str(other), "--prompt", "x", *OPTIONS]) == 1
    assert "[TT303]" in capsys.readouterr().err
