"""The whole of it, on a user's own files, which must stay as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import tiny
from trimtab.errors import MemoryFault
from trimtab.repro.cases import Case, Subject
from trimtab.repro.environment import installed_stack
from trimtab.repro.matrix import Cell, Stack, judged
from trimtab.repro.process import Ran, run
from trimtab.repro.reproduce import reproduce
from trimtab.repro.script import script
from trimtab.repro.subject import describe


def digests(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        one.name: (hashlib.sha256(one.read_bytes()).hexdigest(), one.stat().st_mtime_ns)
        for one in folder.iterdir()
    }


def really(subject: Subject, quant: str, cases: list[Case]) -> list[Cell]:
    """These cases, run."""
    stack = installed_stack({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    ran: dict[Case, Ran] = {}
    cells = []
    for case in cases:
        text = script(subject, case, quant)
        ran[case] = run(
            stack.python, text, f"{case.value}.py", subject.arguments, 300, stack.environment
        )
        cells.append(judged(subject, stack, quant, case, text, ran, 300))
    return cells


def test_the_users_files_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock stack rewrites a disk-offloaded base that is named by a relative path."""
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    adapter = tiny.writable(tiny.adapter(tiny.checkpoint("llama")), tmp_path)
    before = digests(base), digests(adapter)
    monkeypatch.chdir(tmp_path)
    subject = describe(f"./{base.name}", f"./{adapter.name}", quant="none")
    (found,) = really(subject, "none", [Case.ADAPTER])
    assert found.outcome == "failed"
    assert found.failure is not None
    assert found.failure.trace.startswith("Traceback")
    assert str(tmp_path) not in found.failure.trace
    assert (digests(base), digests(adapter)) == before
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([base.name, adapter.name])


@pytest.mark.newest
def test_bitsandbytes_with_a_disk_quantizes_nothing_and_trimtab_does(tmp_path: Path) -> None:
    subject = describe(str(tiny.checkpoint("llama")), tiny=True)
    whole, split, ours = really(subject, "nf4-dq", [Case.WHOLE, Case.SPLIT, Case.TRIMTAB])
    assert whole.verdict == "works"
    assert whole.parameters["Params4bit cpu"] == 28
    assert split.verdict.endswith("nothing was quantized [TT515]")
    assert (ours.verdict, ours.fine) == ("equal tokens", True)
    assert ours.rests["disk"] > 0


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Nothing is run; the interpreters that would have run."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def pretend(python: tuple[str, ...], *rest: object) -> Ran:
        asked.append(python)
        return Ran(None, 1.0, (), "")

    monkeypatch.setattr("trimtab.repro.matrix.run", pretend)
    return asked


def test_against_other_versions(pretended: list[tuple[str, ...]]) -> None:
    left: list[str] = []

    @contextlib.contextmanager
    def make(wanted: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[Stack]:
        assert wanted == {"peft": "0.18.1"}
        assert variables == {"A": "b"}
        yield Stack("peft 0.18.1", ("other",), {"peft": "0.18.1"}, {})
        left.append("environment")

    lines: list[str] = []
    report = reproduce(
        str(tiny.checkpoint("llama")),
        tiny=True,
        quant="none",
        limit=7,
        against={"peft": "0.18.1"},
        environment={"A": "b"},
        progress=lines.append,
        make_stack=make,
    )
    assert pretended == [(sys.executable,)] * 5 + [("other",)] * 5
    assert [one.name for one in report.stacks] == ["installed", "peft 0.18.1"]
    assert lines[0] == "making an environment with peft 0.18.1"
    assert left == ["environment"]
    assert {one.verdict for one in report.cells} == {"stopped after 7 s"}
    assert not report.ours


def test_there_must_be_room_for_a_copy(
    pretended: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = tiny.checkpoint("llama"), tiny.adapter(tiny.checkpoint("llama"))
    full = shutil.disk_usage(base)._replace(free=1000)
    monkeypatch.setattr("trimtab.repro.reproduce.shutil.disk_usage", lambda folder: full)
    with pytest.raises(MemoryFault, match="TT403"):
        reproduce(str(base), str(adapter), quant="none")
    assert pretended == []
    reproduce(str(base), str(adapter), {"": "cpu"}, quant="none")
    assert dataclasses.asdict(describe(str(base), tiny=True))["nbytes"] == 0
