"""Whether the installed packages are new enough."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from typing import Final

from trimtab.diagnosis.finding import Finding

FLOORS: Final = {"transformers": "5.1.0", "peft": "0.18.1", "accelerate": "1.12.0"}
"""The oldest versions that are tested; there are no upper limits."""

QUANTIZERS: Final = {"bitsandbytes": "0.49.2"}
"""The same for packages that only some formats need."""

MODELS: Final = {"gemma4": {"transformers": "5.5.0"}}
"""What a family of models needs, by the beginning of its `model_type`."""


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(
    model_type: str = "", look_up: Callable[[str], str | None] = installed
) -> list[Finding]:
    """Packages that are missing (TT101) or older than what is supported (TT102).

    Args:
        model_type: the config's; some models need more.
        look_up: gives the installed version of a package, or None.
    """
    found = []
    for package, floor in {**FLOORS, **QUANTIZERS}.items():
        here = look_up(package)
        wanted, who = floor, "trimtab"
        for family, needs in MODELS.items():
            if model_type.startswith(family) and package in needs:
                wanted, who = needs[package], f"a {model_type} model"
        if here is None:
            if package in FLOORS:
                found.append(_missing(package))
        elif release(here) < release(wanted):
            found.append(_too_old(package, here, wanted, who))
    return found


def _missing(package: str) -> Finding:
    return Finding("TT101", f"the package {package} is not installed", fix=f"pip install {package}")


def _too_old(package: str, here: str, wanted: str, who: str) -> Finding:
    return Finding(
        "TT102",
        f"{package} {here} is installed, and {who} needs at least {wanted}",
        fix=f'pip install -U "{package}>={wanted}"',
        confidence="likely",
    )


def is_within(version: str, first: str, end: str) -> bool:
    """Whether a version is one from `first` on and before `end`; "" is no bound.

    Example:
        >>> is_within("0.18.1", "", "0.19")
        True
    """
    here = release(version)
    return here >= release(first) and not (end and here >= release(end))


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them: (5, 1, 0) of `5.1.0.dev0`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
