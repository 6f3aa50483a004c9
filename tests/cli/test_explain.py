"""`trimtab explain`: of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.cli import main

FOLDER = Path(__file__).parent.parent / "diagnosis" / "tracebacks" / "seen"


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "error.log"
    log.write_bytes(b"\xff start\nAssertionError: N must be divisible by block_n\n")
    assert main(["explain", str(log), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["findings"]
    assert (one["code"], one["confidence"]) == ("TT513", "likely")


def test_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = FOLDER.glob("TT219-split-nf4-5.24*.txt")
    assert main(["explain", str(file)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("error: `Some modules are dispatched on the CPU or the disk.")
    assert " [TT219]\nwhy: " in told
    assert "\nfix: `trimtab.load(MODEL" in told


def test_a_long_text_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nothing " * 2000]) == 0
    assert capsys.readouterr().out == "nothing in that text is known here\n"


@pytest.mark.parametrize("what", ["nofile.log", "no/such/file.txt"])
def test_a_file_that_is_not_there_is_no_text(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", what]) == 2
    assert f"there is no file {what}" in capsys.readouterr().err


def test_a_folder_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
