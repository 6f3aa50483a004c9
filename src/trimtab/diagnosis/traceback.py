"""Reads tracebacks out of a text, however they were pasted; imports nothing of what they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

PACKAGES: Final = ("transformers", "peft", "accelerate", "bitsandbytes", "torch")
"""Whose versions are looked for in a text."""

MESSAGE_LINES: Final = 40
"""A longer message is cut: what follows is more likely the text around it."""

LINE: Final = 4000
"""Characters of a line that are read."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_BEFORE = re.compile(
    r"""^(?:
        \s*(?:>\s?)+                              # quoted in a mail or an issue
      | \s*[│╭╰❱|+]+[ ─]?                         # a frame drawn by rich, or a group of exceptions
      | \[?(?:rank|local_rank)?\s*\d+\]?:\s?      # torchrun
      | [\w.-]+\s+\|\s                            # containers
      | \[?\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\]?\s     # logs
      | \[?\d\d:\d\d:\d\d[\d.,]*\]?\s
      | \[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?:?\s(?![A-Z]\w*Error)
    )""",
    re.VERBOSE,
)
_FRAMES = (
    re.compile(r'File "(?P<file>[^"]+)", line \d+(?:, in (?P<function>.+))?'),
    # Notebooks, new and old, and rich's.
    re.compile(r"File (?P<file>\S.*?\.py):\d+, in (?P<function>[^(\s]+)"),
    re.compile(r"^\s*(?P<file>\S.*?\.py) in (?P<function>[\w.<>]+)\("),
    re.compile(r"^\s*(?P<file>\S.*?\.py):\d+ in (?P<function>[\w.<>]+)"),
    re.compile(r"^\s*(?:Cell )?(?P<file>In\s?\[\d+\]|<ipython-input[^>]*>)(?:, line \d+| in )"),
)
_TYPE = r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))"
_RAISED = re.compile(rf"^\s*{_TYPE}(?::[ \t]*(?P<message>.*))?\s*$")
_RAISED_INSIDE = re.compile(rf"(?<!except )(?<![\w.]){_TYPE}: (?P<message>\S.*)$")
_BOUNDARY = re.compile(
    r"Traceback \(most recent call last\)|^\s*During handling of the above exception"
    r"|^\s*The above exception was the direct cause|^\s*```|^\s*-{20,}\s*$"
)
_LIBRARY = re.compile(r"(?:site|dist)-packages/(?P<path>(?P<library>\w+).*)")
_CHECKOUT = re.compile(rf"(?:^|.*/src/|/)(?P<path>(?P<library>{'|'.join(PACKAGES)})/.+\.py)$")
_PYTHON = re.compile(r"(?:^|/)(?:lib/|Lib/)(?:python3\.\d+/)?(?P<path>[\w/]+\.py)$|^<frozen ")
_VERSION = re.compile(
    rf"""(?<![\w/.-])(?P<package>{"|".join(PACKAGES)}|pytorch)\b[`"'*]*
    [ \t]*(?:\(.{{0,8}}\))?[ \t]*(?:version)?(?:[ \t]*\(.{{0,8}}\))?[ \t|`"'*]*(?:==|=|:|@)?
    [ \t`"'*]*v?(?P<version>\d+\.\d+[\w.+]*)""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Frame:
    """One call: the library it is in ("" for the user's own), its file from there, its function."""

    library: str
    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@dataclass(frozen=True)
class Raised:
    """One exception: its type without modules, its message, the frames that were read.

    `whole`: the traceback's head was there, so that no frame is missing.
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    whole: bool = False

    @property
    def innermost(self) -> Frame | None:
        """The last frame that lies in a library, Python's own aside."""
        inside = [one for one in self.frames if one.library not in ("", "python")]
        return inside[-1] if inside else None


@dataclass(frozen=True)
class Traceback:
    """What a text tells: exceptions in their order, the last one raised last, and versions."""

    raised: tuple[Raised, ...]
    versions: Mapping[str, str] = field(default_factory=dict)


def read_traceback(text: str) -> Traceback:
    r"""Finds the exceptions in a text.

    Args:
        text: what was pasted: a traceback of Python, of a notebook or as `rich` draws it, with
            Windows paths, colours, prefixes of logs, a missing head, other text around it.

    Returns:
        Its exceptions, none of them where there is none.

    Example:
        >>> read_traceback('File "a/site-packages/peft/x.py", line 3, in f\nKeyError: 2').raised
        (Raised(type='KeyError', message='2', frames=(Frame(library='peft', ...),)),)
    """
    return Traceback(tuple(_raised(_lines(text))), _versions(text))


def _lines(text: str) -> list[str]:
    """The lines without colours and without what logs and quotes put before them."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return [_bare(line[:LINE]) for line in plain.split("\n")]


def _bare(line: str) -> str:
    for _ in range(4):
        shorter = _BEFORE.sub("", line, count=1)
        if shorter == line:
            break
        line = shorter
    return line.rstrip(" │")


def _raised(lines: list[str]) -> Iterator[Raised]:
    frames: list[Frame] = []
    whole = False
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if "Traceback (most recent call last)" in line:
            frames, whole = [], True
        elif frame := _frame(line):
            frames.append(frame)
        elif found := _RAISED.match(line) or _RAISED_INSIDE.search(line):
            message = [found["message"] or ""]
            while number < len(lines) and _continues(lines[number], message):
                message.append(lines[number])
                number += 1
            name = found["type"].rpartition(".")[2]
            yield Raised(name, "\n".join(message).strip(), tuple(frames), whole)
            frames, whole = [], False


def _continues(line: str, message: list[str]) -> bool:
    """Whether a line belongs to a message that began above it."""
    if len(message) >= MESSAGE_LINES or _BOUNDARY.search(line) or _frame(line):
        return False
    if _RAISED.match(line):
        return False
    return bool(line.strip()) or not any(one.strip() for one in message)


def _frame(line: str) -> Frame | None:
    for form in _FRAMES:
        if found := form.search(line):
            parts = found.groupdict()
            function = (parts.get("function") or "").strip().split("(")[0]
            return _placed(parts["file"].replace("\\", "/"), function.rpartition(".")[2])
    return None


def _placed(path: str, function: str) -> Frame:
    if found := _LIBRARY.search(path) or _CHECKOUT.search(path):
        return Frame(found["library"], found["path"], function)
    if found := _PYTHON.search(path):
        return Frame("python", found["path"] or path, function)
    return Frame("", path.rpartition("/")[2], function)


def _versions(text: str) -> dict[str, str]:
    """By package; the first one that a text names counts."""
    found: dict[str, str] = {}
    for one in _VERSION.finditer(_ESCAPES.sub("", text)):
        package = one["package"].lower().replace("pytorch", "torch")
        found.setdefault(package, one["version"].rstrip("."))
    return found
