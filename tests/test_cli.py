"""`trimtab.cli`: help, exit codes, where output goes, and one sentence for each bad input."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from trimtab.cli import COMMANDS, main
from trimtab.cli.verdict import tell
from trimtab.disk import DiskFolder
from trimtab.errors import TITLES, DoesNotFit
from trimtab.placement import Placement

HEAVY = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "numpy")


def smallest(folder: Path) -> list[str]:
    """The options of the smallest budget that the model fits: its layers are streamed."""
    from trimtab.api import plan

    with pytest.raises(DoesNotFit) as caught:
        plan(folder, cpu=1, disk="1GiB", context=64)
    return ["--cpu", str(caught.value.parts["smallest"]), "--disk", "1GiB", *RUN]


RUN = ["--context", "64", "--prompt", "hello", "--max-new-tokens", "4"]


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


# -------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(
    "arguments", [["--help"], [], ["plan", "--help"], ["run", "--help"], ["explain", "TT401"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = child(
        "import sys; from trimtab.cli import main;"
        f"status = main({arguments!r});"
        f"print([one for one in {HEAVY!r} if one in sys.modules], status, file=sys.stderr)"
    )
    assert done.stderr == "[] 0\n"
    assert "Usage: trimtab" in done.stdout or "## TT401" in done.stdout


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    listed = said.out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line.strip()] == list(COMMANDS)
    assert "..." not in said.out.partition("Commands:")[2]


def test_a_command_imports_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    done = child(
        "import sys; from trimtab.cli import main; main(['explain', '--help']);"
        "print([one for one in ('plan', 'run') if f'trimtab.cli.{one}' in sys.modules])"
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import trimtab

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trimtab {trimtab.__version__}\n"


# ------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["plan"],
        ["plan", "m", "--nothing"],
        ["plan", "m", "--quant", "nf5"],
        ["plan", "m", "--context", "0"],
        ["plan", "m", "--context", "x"],
        ["plan", "m", "--device-map", "nowhere.json"],
        ["plan", "m", "--adapter", "a=x", "--adapter", "a=y"],
        ["run", "m", "--plan", "nowhere.json", "--prompt", "x"],
        ["run", "m", "--prompt", ""],
        ["explain", "TT999"],
    ],
)
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert "--help" in said.err
    assert "Traceback" not in said.err
    found = json.loads(said.out)
    assert found["schema_version"] == 1
    assert found["error"]["code"] == "usage"


def test_a_plan_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "plan.json"
    assert main(["plan", str(tiny.checkpoint("llama")), "--save", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{file} cannot be written: No such file or directory" in said.err


@pytest.mark.parametrize("size", ["-1", "abc", "6 potatoes"])
@pytest.mark.parametrize("command", ["plan", "run", "chat", "check"])
def test_what_is_not_a_size(
    command: str, size: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ["--prompt", "x"] if command == "run" else []
    assert main([command, "m", "--cpu", size, *prompt]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"error: {size!r} is not a size [TT402]",
        "fix: write a number and a unit, such as 6GiB, 6GB or 512MiB",
        "see: trimtab explain TT402",
    ]


# --------------------------------------------------------------------------------- bad input


def refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: str, status: int = 1
) -> str:
    """Runs a command that must fail with that code, says so in both ways; returns the sentence."""
    assert main([*arguments, "--json"]) == status
    said = capsys.readouterr()
    first, *more = said.err.splitlines()
    assert first.startswith("error: ")
    assert first.endswith(f"[{code}]")
    assert more[-1] == f"see: trimtab explain {code}"
    assert "Traceback" not in said.err
    assert len(said.out.splitlines()) == 1
    error = json.loads(said.out)["error"]
    assert list(error) == ["code", "title", "what", "why", "fix", "parts"]
    assert (error["code"], error["title"]) == (code, TITLES[code])
    assert first == f"error: {error['what']} [{code}]"
    return str(error["what"])


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "run"):
        more = RUN if command == "run" else []
        assert "./nowhere" in refused(capsys, [command, "./nowhere", *more], "TT105")
        assert "no-such" in refused(capsys, [command, "no-such", *more], "TT105")


def test_a_folder_without_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, ["plan", str(tmp_path)], "TT501")


def test_a_truncated_shard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama", shards=2), tmp_path)
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 100)
    assert shard.name in refused(capsys, ["run", str(folder), *RUN], "TT502")


def test_a_missing_shard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama", shards=2), tmp_path)
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.unlink()
    assert shard.name in refused(capsys, ["run", str(folder), *RUN], "TT503")


def test_an_index_that_names_missing_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tiny.writable(tiny.checkpoint("llama", shards=2), tmp_path)
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["model.layers.9.extra.weight"] = next(iter(found["weight_map"].values()))
    index.write_text(json.dumps(found))
    assert "model.layers.9.extra.weight" in refused(capsys, ["plan", str(folder)], "TT504")


class Code:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("damage", "code"), [("missing", "TT301"), ("truncated", "TT302"), ("pickle", "TT302")]
)
def test_a_damaged_adapter(
    damage: str,
    code: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    base = tiny.checkpoint("llama")
    folder = tiny.writable(tiny.adapter(base), tmp_path)
    weights = folder / "adapter_model.safetensors"
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size - 100)
    else:
        weights.unlink()
    if damage == "pickle":
        (folder / "adapter_model.bin").write_bytes(pickle.dumps({"x": Code()}))
    refused(capsys, ["run", str(base), "--adapter", str(folder), *RUN], code)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_as_a_pickle_of_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    base = tiny.checkpoint("llama")
    folder = tiny.writable(tiny.adapter(base), tmp_path)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    answers = []
    for _ in range(2):
        assert main(["run", str(base), "--adapter", f"a={folder}", *RUN, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
        weights.unlink(missing_ok=True)
    assert answers[0] == answers[1]


def test_a_budget_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny.checkpoint("llama"))
    for command in ("plan", "run"):
        more = RUN if command == "run" else []
        arguments = [command, folder, "--cpu", "100KiB", "--disk", "1GiB", *more]
        assert "more than the 100.00 KiB given" in refused(capsys, arguments, "TT401", 3)
    assert main([*arguments, "--json"]) == 3
    parts = json.loads(capsys.readouterr().out)["error"]["parts"]
    assert parts["shortfall"] == parts["smallest"] - 100 * 1024


def test_a_full_disk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder = tiny.checkpoint("llama")
    rests = tmp_path / "rests"
    arguments = ["run", str(folder), *smallest(folder), "--disk-folder", str(rests)]
    assert "is full" in refused(capsys, arguments, "TT403")
    assert list(rests.iterdir()) == []


def test_a_folder_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny.checkpoint("llama")
    arguments = ["run", str(folder), *smallest(folder), "--disk-folder", str(tmp_path)]
    other = DiskFolder(tmp_path)
    try:
        assert str(tmp_path) in refused(capsys, arguments, "TT206")
    finally:
        other.close()
    assert main(arguments) == 0


def test_a_quantizer_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "bitsandbytes" else find(name, package),
    )
    folder = str(tiny.checkpoint("llama"))
    refused(capsys, ["run", folder, "--quant", "nf4", *RUN], "TT101")
    assert main(["run", folder, "--quant", "nf4", *RUN]) == 1
    assert "fix: pip install bitsandbytes\n" in capsys.readouterr().err


# ------------------------------------------------------------------------------- interrupted


def test_ctrl_c_while_loading(tmp_path: Path) -> None:
    folder = tiny.checkpoint("llama")
    rests = tmp_path / "rests"
    arguments = ["run", str(folder), *smallest(folder), "--disk-folder", str(rests)]
    done = child(
        "import os, signal, sys\n"
        "from trimtab.cli import main\n"
        "from trimtab.disk import DiskSlab\n"
        "put = DiskSlab.put\n"
        "def interrupted(*a):\n"
        "    put(*a)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "DiskSlab.put = interrupted\n"
        f"sys.exit(main({arguments!r}))"
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; everything that was held is freed\n"
    assert list(rests.iterdir()) == []


def test_an_error_that_is_not_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Placement) -> None:
        raise ZeroDivisionError("by zero,\nin two lines")

    monkeypatch.setattr(Placement, "report", fails)
    arguments = ["run", str(tiny.checkpoint("llama")), *RUN, "--json"]
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "error: unexpected: ZeroDivisionError: by zero, in two lines",
        "fix: TRIMTAB_DEBUG=1 shows where",
    ]
    assert json.loads(said.out)["error"]["code"] == "unexpected"
    monkeypatch.setenv("TRIMTAB_DEBUG", "1")
    assert main(arguments) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_reader_that_goes_away() -> None:
    code = "import sys; from trimtab.cli import main; sys.exit(main(['explain', 'TT401']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


def test_what_libraries_say_stays_off_stdout() -> None:
    code = (
        "import sys, warnings, logging; from trimtab.cli import quiet\n"
        "with quiet.libraries():\n"
        "    with quiet.engine():\n"
        "        print('chatter')\n"
        "    warnings.warn('a warning')\n"
        "    logging.getLogger('transformers.any').warning('a log line')\n"
        "    print('result')\n"
    )
    done = child(code)
    assert (done.stdout, done.stderr) == ("result\n", "chatter\n")


def test_exits_from_within_keep_their_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(SystemExit(5), as_json=False) == 5
    assert tell(SystemExit("no"), as_json=False) == 1
    assert tell(KeyboardInterrupt(), as_json=False) == 130
    capsys.readouterr()


def test_the_entry_point_is_main() -> None:
    script = shutil.which("trimtab", path=str(Path(sys.executable).parent))
    if script is None:  # the tests may run on the source tree alone
        root = Path(__file__).parent.parent
        assert 'trimtab = "trimtab.cli:main"' in (root / "pyproject.toml").read_text()
        return
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trimtab ")


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "explain", "TT999"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    asked = [sys.executable, "-m", "trimtab", "--version"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("trimtab ")
