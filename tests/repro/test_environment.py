"""Another stack in a fresh environment; what really needs an index is done by hand."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.errors import EnvironmentFault
from trimtab.repro.environment import installed_stack, other_stack, parse, safe


def test_versions_on_a_command_line() -> None:
    assert parse("transformers==5.1.0, peft==0.18.1") == {"transformers": "5.1.0", "peft": "0.18.1"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("peft", "'peft' is not of the form package==version"),
        ("peft>=1", "'peft>=1' is not of the form package==version"),
        ("peft==1 --index-url=x", "'peft==1 --index-url=x' is not of the form package==version"),
        ("numpy==1.0", "'numpy' is not one of torch, transformers, peft, accelerate, bitsandbytes"),
        ("", "'' is not of the form package==version"),
    ],
)
def test_other_texts(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="is not") as caught:
        parse(text)
    assert str(caught.value) == why


def test_what_the_environment_inherits() -> None:
    told = {
        "PATH": "p",
        "PIP_INDEX_URL": "i",
        "HF_HOME": "h",
        "PYTHONPATH": "x",
        "PIP_TARGET": "x",
        "HF_TOKEN": "x",
        "MY_SECRET": "x",
        "VIRTUAL_ENV": "x",
    }
    assert safe(told) == {"PATH": "p", "PIP_INDEX_URL": "i", "HF_HOME": "h"}


def test_the_installed_stack() -> None:
    stack = installed_stack({"PYTHONPATH": "src", "A": "b"})
    assert stack.python == (sys.executable,)
    assert stack.versions["trimtab"] == trimtab.__version__
    assert stack.versions["peft"] == importlib.metadata.version("peft")
    assert stack.environment == {"PYTHONPATH": str(Path("src").resolve()), "A": "b"}


@pytest.mark.newest
def test_a_fresh_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made as it is, but for pip, which here only writes what it would have installed."""
    run = subprocess.run
    asked: list[list[str]] = []

    def without_pip(command: list[str], **how: object) -> object:
        if "pip" not in command:
            return run(command, **how)  # type: ignore[call-overload]
        asked.append(command)
        where = [command[0], "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        folder = Path(run(where, capture_output=True, text=True, check=True).stdout.strip())
        (folder / "peft").mkdir()
        (folder / "peft" / "__init__.py").write_text("__version__ = '0.0.1'")
        (folder / "peft-0.0.1.dist-info").mkdir()
        (folder / "peft-0.0.1.dist-info" / "METADATA").write_text("Name: peft\nVersion: 0.0.1\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("trimtab.repro.environment.subprocess.run", without_pip)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with other_stack({"peft": "0.0.1"}, os.environ) as stack:
        assert asked[0][3:6] == ["-m", "pip", "install"]
        assert "peft==0.0.1" in asked[0]
        assert "transformers" in asked[0]
        assert stack.name == "peft 0.0.1"
        assert stack.versions["peft"] == "0.0.1"
        assert stack.versions["transformers"] == importlib.metadata.version("transformers")
        code = "import peft, trimtab, numpy, sys; print(peft.__version__, sys.path)"
        done = run(
            [*stack.python, "-c", code],
            env=dict(stack.environment),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("0.0.1 ")
        assert str(tmp_path) not in done.stdout
        assert sys.prefix + os.sep not in done.stdout
        folder = Path(stack.python[0]).parent.parent
        assert folder.is_dir()
    assert not folder.exists()
    assert Path(trimtab.__file__).exists()
    assert importlib.metadata.distribution("numpy").locate_file("numpy").exists()  # type: ignore[attr-defined]


def test_pip_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def no_pip(command: list[str], **how: object) -> object:
        if "pip" in command:
            made.append(Path(command[0]))
            error = "WARNING: x\nERROR: No matching distribution found for peft==9.9\n"
            return subprocess.CompletedProcess(command, 1, "", error)
        return subprocess.CompletedProcess(command, 0, str(Path(command[0]).parent), "")

    monkeypatch.setattr("trimtab.repro.environment.subprocess.run", no_pip)
    monkeypatch.setattr("trimtab.repro.environment.venv.EnvBuilder", _NoBuilder)
    with pytest.raises(EnvironmentFault) as caught, other_stack({"peft": "9.9"}, os.environ):
        pytest.fail("there is no such stack")
    assert caught.value.code == "TT101"
    assert caught.value.what == "pip cannot install peft==9.9 in a fresh environment"
    assert caught.value.why == "No matching distribution found for peft==9.9"
    assert not made[0].parent.exists()


class _NoBuilder:
    def __init__(self, **how: object) -> None:
        pass

    def create(self, folder: Path) -> None:
        (folder / "bin").mkdir(exist_ok=True)


def test_there_is_no_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, folder: Path) -> None:
        raise subprocess.CalledProcessError(1, ["python", "-m", "ensurepip"])

    monkeypatch.setattr("trimtab.repro.environment.venv.EnvBuilder.create", broken)
    with (
        pytest.raises(EnvironmentFault, match="a fresh environment with pip cannot be made"),
        other_stack({"peft": "9.9"}, os.environ),
    ):
        pytest.fail("there is no such stack")
