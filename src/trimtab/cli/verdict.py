"""How a command ends badly: one sentence, a code, a hint; the exit code; never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import typer

from trimtab.cli import quiet
from trimtab.cli.result import print_json
from trimtab.errors import TrimtabError

FAILED, USAGE, INTERRUPTED = 1, 2, 130

_UsageError: Any = typer.BadParameter.__base__  # not exported by all versions of typer


def tell(error: BaseException, *, as_json: bool) -> int:
    """Says on stderr what went wrong, with `as_json` on stdout as well; returns the exit code."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        # Nobody reads any more: nothing to say, and nothing for Python to flush when it ends.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if quiet.debugging():
        traceback.print_exception(error)
    fault, status = _described(error)
    print(_sentence(fault), file=sys.stderr)
    if as_json:
        print_json({"error": fault})
    return status


def _fault_of(error: TrimtabError) -> dict[str, Any]:
    """The error as an object: `code`, `title`, `what`, `why`, `fix`, and `parts` (bytes, names)."""
    plain = (str, int, float, bool, list, tuple)
    parts = {name: one for name, one in error.parts.items() if isinstance(one, plain)}
    fault = _fault(error.code, error.title, error.what, fix=error.fix)
    return {**fault, "why": error.why, "parts": parts}


def _described(error: BaseException) -> tuple[dict[str, Any], int]:
    if isinstance(error, TrimtabError):
        return _fault_of(error), error.exit_code
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "trimtab"
        what = error.format_message().strip()
        return _fault("usage", "wrong usage", what, fix=f"{path} --help"), USAGE
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        what = "interrupted; everything that was held is freed"
        return _fault("interrupted", "interrupted", what), INTERRUPTED
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else FAILED
        return _fault("unexpected", "ended from within", f"ended with {error.code}"), status
    said = " ".join(str(error).split())
    what = f"unexpected: {type(error).__name__}" + (f": {said}" if said else "")
    return _fault("unexpected", "unexpected", what, fix="TRIMTAB_DEBUG=1 shows where"), FAILED


def _fault(code: str, title: str, what: str, *, fix: str = "") -> dict[str, Any]:
    return {"code": code, "title": title, "what": what, "why": "", "fix": fix, "parts": {}}


def _sentence(fault: dict[str, Any]) -> str:
    if fault["code"] == "interrupted":
        return str(fault["what"])
    coded = fault["code"].startswith("TT")
    lines = [f"error: {fault['what']}" + (f" [{fault['code']}]" if coded else "")]
    lines += [f"{name}: {fault[name]}" for name in ("why", "fix") if fault[name]]
    if coded:
        lines.append(f"see: trimtab explain {fault['code']}")
    return "\n".join(lines)
