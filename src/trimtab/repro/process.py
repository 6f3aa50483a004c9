"""A script in a process and a folder of its own, with a limit on its time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TAIL: Final = 200_000
"""Characters of what a script says that are read, from the end."""

PATIENCE: Final = 5
"""Seconds that processes which were killed may take to end."""


@dataclass(frozen=True)
class Ran:
    """How a script ended: its exit status (negative: a signal), or None where it was stopped.

    `told` are the objects that it printed, in their order.
    """

    status: int | None
    seconds: float
    told: tuple[dict[str, Any], ...]
    stderr: str


def run(
    python: Sequence[str],
    text: str,
    name: str,
    arguments: Sequence[str],
    limit: float,
    environment: Mapping[str, str] = os.environ,
) -> Ran:
    """Runs a script, and removes whatever it leaves.

    Args:
        python: the interpreter, and its options.
        text: the script; it is written to a file of that `name` in a fresh folder, which is also
            the current one and the one for temporary files.
        arguments: what the script is called with.
        limit: seconds after which it is killed, with all that it has started.
        environment: its variables.

    Example:
        >>> run([sys.executable], 'print("{\\"a\\": 1}")', "one.py", [], 10).told
        ({'a': 1},)
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-repro-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        own = {**environment, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), made)}
        own["PYTHONIOENCODING"] = "utf-8"
        (folder / name).write_text(text, encoding="utf-8")
        # Not pipes: what a script leaves running would hold them open.
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            status, seconds = _wait([*python, name, *arguments], folder, own, limit, out, err)
        return Ran(status, seconds, _objects(_read(folder / "stdout")), _read(folder / "stderr"))


def _wait(
    command: list[str],
    folder: Path,
    environment: Mapping[str, str],
    limit: float,
    out: Any,
    err: Any,
) -> tuple[int | None, float]:
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=sys.platform != "win32",
    )
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _kill(process)
    return status, time.monotonic() - start


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started, whether it has ended or not."""
    import psutil

    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.Error):
            one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    psutil.wait_procs(started, timeout=PATIENCE)


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode("utf-8", errors="replace")


def _objects(text: str) -> tuple[dict[str, Any], ...]:
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return tuple(found)
