"""Tracebacks that were made by failing (`scripts/make_tracebacks.py`) get the right code first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.diagnosis import explain, registry

FOLDER = Path(__file__).parent / "diagnosis" / "tracebacks"


def texts(kind: str) -> list[Path]:
    return sorted((FOLDER / kind).glob("*.txt"))


def unknown(_: str) -> None:
    """No package is installed: only what a text tells counts."""


def answer(text: str) -> str:
    """The code that comes first, or nothing."""
    found = explain(text, look_up=unknown)
    return found[0].code if found else ""


def windows(text: str) -> str:
    """As on Windows: drive, backslashes, line ends."""
    path = re.compile(r'File "(/[^"]+)"')
    return path.sub(lambda one: f'File "C:{one[1]}"'.replace("/", "\\"), text).replace("\n", "\r\n")


def coloured(text: str) -> str:
    """As Python 3.13 and notebooks colour it."""
    text = re.sub(r"^(\w[\w.]*)(: |$)", "\x1b[1;35m\\1\x1b[0m\\2\x1b[35m", text, flags=re.MULTILINE)
    return re.sub(r'File ("[^"]+"), line (\d+)', "File \x1b[35m\\1\x1b[0m, line \x1b[35m\\2", text)


def notebook(text: str) -> str:
    """As IPython writes frames."""
    frame = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
    return frame.sub(r"File \1:\2, in \3(self, *args, **kwargs)", text)


def old_notebook(text: str) -> str:
    frame = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
    return frame.sub(r"\1 in \3(self, *args, **kwargs)", text)


def logged(text: str) -> str:
    """As torchrun and a log prefix it."""
    return "".join(f"[rank0]: 2026-01-02 03:04:05,678 ERROR {line}\n" for line in text.splitlines())


def quoted(text: str) -> str:
    return "".join(f"> {line}\n" for line in text.splitlines())


def issue(text: str) -> str:
    """In the text of an issue, with versions and another error that is told of."""
    return (
        "### System Info\n\n- `transformers` version: 5.24.0\n"
        "- PyTorch version (GPU?): 2.13 (True)\n"
        "peft==0.21.2\naccelerate 1.15.0\n\n### Reproduction\n\nI load it and get\n\n```\n"
        f"Loading weights: 100%|####| 57/57 [00:00<00:00]\r{text}\n```\n\nIt worked last week.\n"
    )


def without_its_head(text: str) -> str:
    """As a terminal that has scrolled: the last twelve frames."""
    if "another exception" in text or "direct cause" in text:
        return text
    parts = re.split(r"(?m)^(?=  File )", text)
    return "".join(parts[-12:]) if len(parts) > 13 else text


DISGUISES = [windows, coloured, notebook, old_notebook, logged, quoted, issue, without_its_head]


def missed(kind: str, disguise: Callable[[str], str] = str) -> dict[str, str]:
    told = {one.stem: answer(disguise(one.read_text(encoding="utf-8"))) for one in texts(kind)}
    return {name: code for name, code in told.items() if code != name[:5]}


def test_what_the_rules_were_written_with() -> None:
    assert len(texts("seen")) >= 60
    assert missed("seen") == {}


def test_what_the_rules_were_not_written_with() -> None:
    """At least 95 % right; and no wrong one that claims to be certain."""
    assert len(texts("held_out")) >= 60
    wrong = missed("held_out")
    assert len(wrong) <= 0.05 * len(texts("held_out")), wrong
    for name, code in wrong.items():
        text = (FOLDER / "held_out" / f"{name}.txt").read_text(encoding="utf-8")
        assert not code or explain(text, look_up=unknown)[0].confidence != "certain"


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("kind", ["seen", "held_out"])
def test_however_it_was_pasted(kind: str, disguise: Callable[[str], str]) -> None:
    assert missed(kind, disguise) == missed(kind)


@pytest.mark.parametrize("path", texts("unrelated"), ids=lambda one: one.stem)
def test_what_has_nothing_to_do_with_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for disguise in (str, *DISGUISES):
        assert explain(disguise(text), look_up=unknown) == []


def test_there_are_enough_unrelated_ones() -> None:
    assert len(texts("unrelated")) >= 40


def test_each_sign_has_a_traceback() -> None:
    met = {one.name[:5] for kind in ("seen", "held_out") for one in texts(kind)}
    signed = {code for code in registry.codes() if registry.rule(code).signs}
    assert signed - met == set()


def test_no_path_of_the_machine_is_in_them() -> None:
    for path in FOLDER.rglob("*.txt"):
        text = path.read_text(encoding="utf-8")
        for place in re.findall(r'File "([^"<]+)"', text):
            assert place.startswith(("/home/user/", "/usr/lib/python3.11/")), (path.name, place)
        assert not re.search(r"/(tmp|root|work/main|var)/", text), path.name
