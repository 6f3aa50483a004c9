"""`trimtab doctor`: a block to paste, an object, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trimtab.cli import main
from trimtab.cli.quiet import SWITCHES


def test_a_block(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("## trimtab doctor\n\n| System | |\n")
    assert "| transformers | " in told
    assert "expandable_segments" not in told


def test_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1
    assert {"findings", "versions", "gpus", "memory", "system"} <= set(told)


@pytest.mark.parametrize(
    "arguments",
    [["doctor"], ["doctor", "--json"], ["explain", "KeyError: 2"], ["explain", "TT204"]],
)
def test_nothing_that_takes_long_is_imported(arguments: list[str]) -> None:
    heavy = {"torch", "transformers", "peft", "accelerate", "rich", "numpy", "huggingface_hub"}
    code = (
        f"import sys; from trimtab.cli import main; main({arguments}); "
        f"assert not {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_it_works_without_torch() -> None:
    """As where torch cannot be imported at all."""
    code = (
        "import sys; sys.modules['torch'] = None; from trimtab.cli import main; "
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("## trimtab doctor")
