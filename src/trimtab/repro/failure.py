"""What a script that failed says of it: the innermost frames, the code, the likely owner."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from trimtab.diagnosis import explain, registry
from trimtab.diagnosis.doctor import mask
from trimtab.diagnosis.rule import unwrapped
from trimtab.diagnosis.traceback import read_traceback

FRAMES: Final = 6
"""Innermost frames that are shown."""

MESSAGE: Final = 10
"""Lines of a message that are shown."""

LONGEST: Final = 300
"""Characters of a line of a traceback or of a message that are shown."""

_HEAD = "Traceback (most recent call last):"
_CHAINED = re.compile(r"\n\n(?:During handling of|The above exception)[^\n]*\n\n$")


@dataclass(frozen=True)
class Failure:
    """`exception` is the type's name; `trace` the innermost frames and the message, masked."""

    exception: str
    message: str
    trace: str
    findings: tuple[Mapping[str, Any], ...]
    library: str
    why: str

    @property
    def code(self) -> str:
        """Of the surest finding; empty where nothing is known of it."""
        return str(self.findings[0]["code"]) if self.findings else ""


def read_failure(
    stderr: str, hidden: Mapping[str, str], look_up: Callable[[str], str | None]
) -> Failure | None:
    """The failure that ended a script; None where it printed no traceback.

    Args:
        stderr: what it printed.
        hidden: texts that are replaced, such as folders.
        look_up: gives the version of a package in the stack that was run.
    """
    start = _first_of_chain(stderr)
    if start < 0:
        return None
    text = stderr[start:]
    told = read_traceback(text).raised
    if not told:
        return None
    last = told[-1]
    findings = explain(text, look_up)
    code = findings[0].code if findings else ""
    library, why = owner(code)
    if not library and last.innermost:
        library = last.innermost.library
        why = f"The innermost frame lies there, in {last.innermost}."
    return Failure(
        exception=last.type,
        message=_short(_masked(" ".join(last.message.split()), hidden)),
        trace=_masked(_innermost(text), hidden),
        findings=tuple(one.to_dict() for one in findings),
        library=library,
        why=why,
    )


def owner(code: str) -> tuple[str, str]:
    """Whose a known fault is, and why it happens."""
    if not code:
        return "", ""
    rule = registry.rule(code)
    return rule.library, unwrapped(rule.why).split("\n\n")[0]


def _first_of_chain(text: str) -> int:
    """Where the last exception's traceback begins, those that caused it included."""
    start = text.rfind(_HEAD)
    while start > 0 and _CHAINED.search(text[:start]):
        start = text.rfind(_HEAD, 0, start - 1)
    return start


def _innermost(text: str) -> str:
    """The last frames and the message; of a function that calls itself only one."""
    lines = text[text.rfind(_HEAD) :].strip().splitlines()[1:]
    starts = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    end = next(
        (at for at, line in enumerate(lines) if at > max(starts, default=-1) and line[:1] != " "),
        len(lines),
    )
    frames = [lines[start:after] for start, after in pairwise([*starts, end])]
    kept = frames[:1] + [
        frame for before, frame in pairwise(frames) if _called(frame[0]) != _called(before[0])
    ]
    shown = kept[-FRAMES:]
    told = [_HEAD, *(["  ..."] if len(shown) < len(frames) else [])]
    told += [line for frame in shown for line in frame] + lines[end : end + MESSAGE]
    return "\n".join(_short(line) for line in told)


def _called(line: str) -> str:
    """A frame's first line without the number of the line."""
    return re.sub(r", line \d+", "", line)


def _short(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} [...]"


def _masked(text: str, hidden: Mapping[str, str]) -> str:
    text = re.sub(r"[^\s\"']*[/\\](?:site|dist)-packages[/\\]", "site-packages/", text)
    places = {
        **hidden,
        str(Path(__file__).parent.parent.parent): "site-packages",
        sysconfig.get_path("stdlib"): "python",
        sys.prefix: "python",
    }
    for here in sorted(places, key=len, reverse=True):
        if len(here) > 1:
            text = text.replace(here, places[here])
    text = re.sub(r"[^\s\"']*trimtab-repro-\w+[/\\]?", "", text)
    return mask(text)
