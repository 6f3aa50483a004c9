"""`trimtab.cli.session`: how far loading is, on a terminal's stderr."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import tiny
from trimtab.api import plan
from trimtab.cli.session import counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = plan(Path(tiny.checkpoint("llama")), context=64)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with counted(decided) as progress:
        assert progress is not None
        progress("model.layers.3.mlp.up_proj.weight")
    shown, erased = terminal.getvalue().split("\r")[1::2]
    units = len(decided.units)
    assert shown.startswith(f"loading 1/{units} units, 1 tensors: model.layers.3.mlp.up_proj")
    assert erased.strip() == ""
    assert len(shown) == len(erased) < 80


def test_nothing_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with counted(plan(Path(tiny.checkpoint("llama")), context=64)) as progress:
        assert progress is None
    assert capsys.readouterr().err == ""
