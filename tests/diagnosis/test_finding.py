"""A finding says what its error says."""

from __future__ import annotations

from trimtab.diagnosis import Finding
from trimtab.errors import PlacementFault


def test_a_finding_of_an_error() -> None:
    error = PlacementFault("TT201", "the key 'x' matches nothing", why="a cause", fix="a remedy")
    finding = Finding.from_error(error)
    assert finding.to_dict() == {
        "code": "TT201",
        "title": "a device-map key matches no module",
        "what": "the key 'x' matches nothing",
        "why": "a cause",
        "fix": "a remedy",
        "severity": "error",
        "confidence": "certain",
    }
    assert finding == Finding.from_error(error)
