"""`trimtab check`: everything that would go wrong, before anything is loaded."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli import quiet
from trimtab.cli.findings import show, tell
from trimtab.cli.options import Planning, spread

if TYPE_CHECKING:
    from trimtab.diagnosis import Finding, Repair

PROBLEMS = 4
NONE = "nothing was found that would go wrong"
FIXED = "fixed.json"
"""What the command calls the file that the corrected map is saved in."""

_LISTED = ("model", "adapter", "modality", "device_map", "json")
"""Options that are written in their own way, or not at all."""


@spread(Planning)
def command(
    asked: Planning,
    *,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Print the corrected device map, all else to stderr: "
            f"trimtab check MODEL --device-map map.json --fix > {FIXED}",
        ),
    ] = False,
) -> int:
    """Find what would go wrong, without loading.

    Versions, the checkpoint, the device map, the adapters, the budget. Exit code 4: problems.
    """
    if fix and asked.device_map is None:
        raise typer.BadParameter("there is no --device-map to correct", param_hint="--fix")
    arguments = asked.arguments()
    with quiet.engine():
        from trimtab.diagnosis.check import look
        from trimtab.diagnosis.repair import mend

        here = look(**arguments)
        repaired = mend(here, **arguments) if fix else None
    findings = here.findings
    run = _command(asked, arguments)
    if asked.json:
        show(findings, as_json=True, none=NONE, **({"fix": _fix(repaired, run)} if fix else {}))
    elif fix:
        _tell_fix(findings, repaired, run)
    else:
        tell(findings, none=NONE)
    return PROBLEMS if any(one.severity != "note" for one in findings) else 0


def _command(asked: Planning, arguments: Mapping[str, Any]) -> str:
    """How a model is run as `asked`, with the corrected map."""
    words = ["trimtab", "run", asked.model, "--device-map", FIXED]
    for name, path in arguments["adapters"].items():
        words += ["--adapter", f"{name}={path}"]
    for field in fields(Planning):
        value = getattr(asked, field.name)
        if field.name not in _LISTED and value != field.default:
            words += ["--" + field.name.replace("_", "-"), str(value)]
    for one in asked.modality or ():
        words += ["--modality", one.value]
    return shlex.join(words)


def _fix(repaired: Repair | None, run: str) -> dict[str, Any] | None:
    if repaired is None:
        return None
    return {
        "device_map": repaired.device_map,
        "command": run,
        "changes": list(repaired.changes),
        "left": [one.to_dict() for one in repaired.left],
    }


def _tell_fix(findings: Sequence[Finding], repaired: Repair | None, run: str) -> None:
    tell(findings, none=NONE, file=sys.stderr)
    if repaired is None:
        print("\nno map can be made: the names of the model are not known", file=sys.stderr)
        return
    print(json.dumps(repaired.device_map, indent=2))
    for one in repaired.changes:
        print(f"changed: {one}", file=sys.stderr)
    for left in repaired.left:
        print(f"no map mends: {left.what} [{left.code}]", file=sys.stderr)
    print(f"saved as {FIXED}, this runs it:\n{run}", file=sys.stderr)
