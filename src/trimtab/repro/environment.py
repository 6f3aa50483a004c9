"""Another stack: a fresh virtual environment with some packages in other versions.

Everything that is not named is taken from here by links, in a folder of its own that pip reads and
never writes: nothing is downloaded twice, and this environment stays as it is.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from trimtab.diagnosis.doctor import mask
from trimtab.errors import EnvironmentFault, first_line
from trimtab.repro.matrix import Stack

PACKAGES: Final = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
SHOWN: Final = ("trimtab", *PACKAGES, "safetensors", "huggingface_hub")

PIP_LIMIT: Final = 1800
"""Seconds that pip may take."""

_UNSAFE = re.compile(
    r"^(PYTHON|PIP_(TARGET|PREFIX|ROOT|USER)|VIRTUAL_ENV|CONDA)|TOKEN|SECRET|PASSW"
)
"""Variables that would lead out of the new environment, or that it has no business to know."""


def parse(text: str) -> dict[str, str]:
    """Versions by package, of `transformers==5.1.0,peft==0.18.1`.

    Raises:
        ValueError: it is not of that form, or names a package that is not of the stack.
    """
    found = {}
    for one in text.split(","):
        name, equals, version = one.strip().partition("==")
        if not equals or not re.fullmatch(r"[\w.+!-]+", version):
            raise ValueError(f"{one.strip()!r} is not of the form package==version")
        if name not in PACKAGES:
            raise ValueError(f"{name!r} is not one of {', '.join(PACKAGES)}")
        found[name] = version
    return found


@contextlib.contextmanager
def other_stack(wanted: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[Stack]:
    """While inside, a stack in which these packages have these versions; it is removed afterwards.

    Args:
        wanted: versions by package.
        variables: the environment's, of which those that are `safe` are given on.

    Raises:
        EnvironmentFault: TT101, pip cannot install them.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-repro-", ignore_cleanup_errors=True) as made:
        folder, windows = Path(made), os.name == "nt"
        environment = safe(variables)
        python = folder / ("Scripts/python.exe" if windows else "bin/python")
        command = (str(python), "-I", "-B")
        try:
            venv.EnvBuilder(with_pip=True, symlinks=not windows).create(folder)
            _link(folder, _site_packages(command, environment), tuple(wanted))
            _install(command, wanted, environment)
        except (OSError, subprocess.SubprocessError) as problem:
            raise EnvironmentFault(
                "TT101",
                "a fresh environment with pip cannot be made",
                why=mask(first_line(problem)),
                fix="install the packages venv and pip of this Python",
            ) from problem
        yield Stack(
            name=", ".join(f"{name} {version}" for name, version in wanted.items()),
            python=command,
            versions=_versions(command, environment),
            environment=environment,
        )


def safe(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the new environment gets."""
    return {name: one for name, one in environment.items() if not _UNSAFE.search(name.upper())}


def _site_packages(command: Sequence[str], environment: Mapping[str, str]) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_ask(command, code, environment))


def _link(folder: Path, site_packages: Path, named: Sequence[str]) -> None:
    """Links what is installed here and needed, but for what is `named`, and puts it on the path.

    Where links cannot be made, pip installs the packages instead.
    """
    import trimtab

    linked = folder / "linked"
    linked.mkdir()
    ours = Path(trimtab.__file__).parent
    shutil.copytree(ours, linked / "trimtab", ignore=shutil.ignore_patterns("demo", "__pycache__"))
    with contextlib.suppress(OSError):
        for distribution in _closure([*PACKAGES, "psutil"], named):
            for entry in _entries(distribution):
                target = linked / entry.name
                if not target.exists():
                    target.symlink_to(entry, target_is_directory=entry.is_dir())
    # Behind what pip installs, which therefore comes first.
    (site_packages / "linked.pth").write_text(f"{linked}\n", encoding="utf-8")


def _closure(names: Sequence[str], without: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions of these names and all that they need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [one for one in names if one not in without]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for needed in found[name].requires or ():
            if "extra ==" not in needed:
                waiting.append(re.split(r"[^\w.-]", needed, maxsplit=1)[0])
    return [one for name, one in found.items() if name not in without]


def _entries(distribution: importlib.metadata.Distribution) -> list[Path]:
    """Its files and folders directly below site-packages; none where it is not installed there."""
    files = distribution.files or []
    tops = {one.parts[0] for one in files if one.parts[0] not in ("..", "__pycache__")}
    if any(one.endswith(".pth") for one in tops):
        return []  # it lies elsewhere, or runs code when Python starts
    return [Path(str(distribution.locate_file(one))) for one in sorted(tops)]


def _install(
    command: Sequence[str], wanted: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    asked = [f"{name}=={version}" for name, version in wanted.items()]
    # What is linked counts as installed; the others are asked for in case that they could not be.
    asked += [one for one in PACKAGES if one not in wanted and _installed(one)]
    done = subprocess.run(
        [*command, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *asked],
        capture_output=True,
        text=True,
        timeout=PIP_LIMIT,
        env=dict(environment),
        check=False,
    )
    if done.returncode:
        errors = [one for one in done.stderr.splitlines() if one.startswith("ERROR: ")]
        last = (errors or done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise EnvironmentFault(
            "TT101",
            f"pip cannot install {', '.join(asked[: len(wanted)])} in a fresh environment",
            why=mask(last.removeprefix("ERROR: ")),
            fix="name versions that exist and that go together",
        )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\nfound = {}\n"
        f"for name in {SHOWN[1:]!r}:\n"
        "    try:\n        found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError:\n        pass\n"
        "print(json.dumps(found))"
    )
    import trimtab

    return {"trimtab": trimtab.__version__, **json.loads(_ask(command, code, environment))}


def _ask(command: Sequence[str], code: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [*command, "-c", code], capture_output=True, text=True, env=dict(environment), check=True
    )
    return done.stdout.strip()


def installed_stack(environment: Mapping[str, str]) -> Stack:
    """The stack of this process, which scripts run elsewhere find, too."""
    import trimtab

    if paths := environment.get("PYTHONPATH"):
        absolute = os.pathsep.join(os.path.abspath(one) for one in paths.split(os.pathsep))
        environment = {**environment, "PYTHONPATH": absolute}

    found = {name: version for name in SHOWN[1:] if (version := _installed(name))}
    return Stack(
        "installed", (sys.executable,), {"trimtab": trimtab.__version__, **found}, environment
    )
