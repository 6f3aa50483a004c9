"""`trimtab check`: everything that would go wrong, before anything is loaded."""

from __future__ import annotations

from trimtab.cli import quiet
from trimtab.cli.findings import show
from trimtab.cli.options import Planning, spread

PROBLEMS = 4


@spread(Planning)
def command(asked: Planning) -> int:
    """Find what would go wrong, without loading.

    Versions, the checkpoint, the device map, the adapters, the budget. Exit code 4: problems.
    """
    arguments = asked.arguments()
    with quiet.engine():
        from trimtab.diagnosis import check

        findings = check(**arguments)
    show(findings, as_json=asked.json, none="nothing was found that would go wrong")
    return PROBLEMS if any(one.severity != "note" for one in findings) else 0
