"""The state of this machine and of what is installed, whether torch works or not."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trimtab.checkpoint import PEFT_PREFIX
from trimtab.diagnosis import registry
from trimtab.diagnosis.finding import Finding
from trimtab.diagnosis.versions import check_versions, installed, is_within
from trimtab.memory import format_size

PACKAGES: Final = (
    *("torch", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors"),
    *("huggingface_hub", "tokenizers", "triton", "numpy", "psutil"),
)

VARIABLES: Final = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "TRANSFORMERS_CACHE"),
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "BNB_CUDA_VERSION"),
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "TMPDIR"),
)
"""Of the environment, those that change what the libraries do."""

GPU: Final = (
    *("name", "memory.total", "memory.free", "driver_version"),
    *("pcie.link.gen.max", "pcie.link.width.max"),
)
"""What the driver's tool is asked for."""

PATIENCE: Final = 5
"""Seconds that the driver's tool may take."""

FOLDERS, FILES, HEADER = 1000, 300, 1 << 20
"""How much is looked through for rewritten checkpoints: folders, files, bytes of each header."""

_SECRET = re.compile(r"\b(hf|sk|gh[pousr]|github_pat|glpat)[_-][A-Za-z0-9_-]{8,}")
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")

Run = Callable[[list[str]], str | None]


@dataclass(frozen=True)
class Health:
    """What was found; every text is masked.

    `versions` by package, None where it is not there; `gpus` what the driver tells of each, sizes
    in bytes; `memory` and `folders` in bytes; `variables` of the environment; `measured` what torch
    tells in a process of its own, if it was asked.
    """

    system: Mapping[str, str]
    versions: Mapping[str, str | None]
    gpus: tuple[Mapping[str, Any], ...]
    memory: Mapping[str, int]
    folders: Mapping[str, str]
    variables: Mapping[str, str]
    measured: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def markdown(self) -> str:
        """A block to paste into a report."""
        versions = {name: one or "not installed" for name, one in self.versions.items()}
        gpus = {f"GPU {number}": _gpu_line(one) for number, one in enumerate(self.gpus)}
        memory = {name: format_size(one) for name, one in self.memory.items()}
        measured = {name: str(one) for name, one in self.measured.items()}
        parts = {
            "System": {**self.system, **(gpus or {"GPU": "none that the driver tells of"})},
            "Versions": versions,
            "Memory": memory,
            "Folders": self.folders,
            "Environment": self.variables,
            "Measured": measured,
        }
        lines = ["## trimtab doctor"]
        for heading, told in parts.items():
            if told:
                rows = [f"| {name} | {_cell(one)} |" for name, one in told.items()]
                lines += ["", f"| {heading} | |", "| --- | --- |", *rows]
        lines += [
            "",
            "Findings:" if self.findings else "Nothing was found that is known to be bad.",
        ]
        lines += [f"- {one.severity}: {one.what} ({one.code})" for one in self.findings]
        return "\n".join(lines)


def examine(
    measure: bool = False,
    look_up: Callable[[str], str | None] = installed,
    ask: Run | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Health:
    """Looks at versions, devices, memory, folders and settings. Imports neither torch nor the rest.

    Args:
        measure: whether torch is asked, in a process of its own, for devices and bandwidths; that
            takes seconds, and a torch that is broken is a finding.
        look_up: gives the installed version of a package, or None.
        ask: runs a program and gives what it prints, or None if it fails.
        environment: the variables of the environment.

    Example:
        >>> examine().versions["peft"]
        '0.21.2'
    """
    run = ask or _ask
    versions = {name: look_up(name) for name in PACKAGES}
    gpus, cuda = _driver(run)
    measured, broken = _measured(run) if measure else ({}, [])
    findings = [*check_versions(look_up=look_up), *_combinations(look_up)]
    findings += _libraries(versions["torch"], bool(gpus), cuda, _bitsandbytes_libraries())
    cache = _hub_cache(environment)
    findings += _rewritten([Path("."), cache])
    system = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": f"{platform.python_version()} in {mask(sys.prefix)}",
        "CUDA of the driver": cuda or "none",
    }
    return Health(
        system=system,
        versions=versions,
        gpus=gpus,
        memory=_memory(),
        folders=_folders(cache),
        variables={name: _variable(name, environment) for name in VARIABLES if name in environment},
        measured=measured,
        findings=(*findings, *broken),
    )


def mask(text: str) -> str:
    """A text without tokens, logins and the name of the home folder.

    Example:
        >>> mask("https://me:secret@host with hf_abcdefghijkl")
        'https://***@host with hf_***'
    """
    text = _LOGIN.sub("***@", _SECRET.sub(r"\1_***", text))
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?![\w.-])", "~", text)
    return re.sub(r"((?:/home/|/Users/|[A-Za-z]:\\Users\\))[^/\\\s:]+", r"\1***", text)


# -------------------------------------------------------------------------------------- findings


def _combinations(look_up: Callable[[str], str | None]) -> list[Finding]:
    """Faults of the stock stack that the installed versions are known to have."""
    found = []
    for code in registry.codes():
        rule = registry.rule(code)
        for package, (first, end) in rule.affected.items():
            version = look_up(package)
            if version and is_within(version, first, end):
                what = f"{package} {version} has a known fault without trimtab: {rule.title}"
                fix = f'pip install -U "{package}>={end}"' if end else ""
                found.append(Finding(code, what, fix=fix, severity="note", confidence="likely"))
    return found


def _libraries(
    torch: str | None, gpu: bool, driver: str, libraries: tuple[str, ...]
) -> list[Finding]:
    """Whether torch, the driver and bitsandbytes are of CUDA versions that go together."""
    if torch is None or not gpu:
        return []
    build = torch.partition("+")[2]
    if build == "cpu":
        what = f"torch {torch} is a build for the CPU, and this machine has a GPU"
        return [Finding("TT103", what, fix="install torch from its index for CUDA")]
    if not (found := re.fullmatch(r"cu(\d+)(\d)", build)):
        return []
    major = found[1]
    told = []
    if driver and int(driver.partition(".")[0]) < int(major):
        what = f"torch {torch} needs CUDA {major}, and the driver knows CUDA {driver}"
        told.append(Finding("TT103", what, fix="update the driver, or install an older torch"))
    if libraries and not any(f"cuda{major}" in one for one in libraries):
        what = f"bitsandbytes has no library for the CUDA {major} of torch {torch}"
        told.append(Finding("TT106", what, fix="pip install -U bitsandbytes"))
    return told


def _bitsandbytes_libraries() -> tuple[str, ...]:
    """Names of its compiled libraries, from its metadata."""
    try:
        files = importlib.metadata.files("bitsandbytes") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(one.name for one in files if re.match(r"libbitsandbytes_cuda\d+\.", one.name))


def _rewritten(places: Sequence[Path]) -> list[Finding]:
    """Base checkpoints with a PEFT model's names; of a tree that is large, the upper folders."""
    found = []
    files = itertools.chain.from_iterable(_checkpoint_files(place) for place in places)
    for file in itertools.islice(files, FILES):
        try:
            with open(file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                told = opened.read(min(size, HEADER))
        except OSError:
            continue
        if f'"{PEFT_PREFIX}'.encode() in told:
            what = f"tensors of {mask(str(file))} have names that begin with {PEFT_PREFIX!r}"
            fix = "`trimtab explain TT507` tells how to restore it"
            found.append(Finding("TT507", what, fix=fix, confidence="likely"))
    return found


def _checkpoint_files(place: Path) -> Iterator[Path]:
    waiting = deque([place])
    for _ in range(FOLDERS):
        if not waiting:
            return
        try:
            entries = sorted(os.scandir(waiting.popleft()), key=lambda one: one.name)
        except OSError:
            continue
        for one in entries:
            if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", one.name):
                yield Path(one.path)
            elif one.is_dir(follow_symlinks=False):
                waiting.append(Path(one.path))


# ----------------------------------------------------------------------------------------- facts


def _ask(arguments: list[str]) -> str | None:
    seconds = 120 if arguments[0] == sys.executable else PATIENCE
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else f"failed: {done.stderr.strip()[-2000:]}"


def _driver(run: Run) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """What nvidia-smi tells of each GPU, and the CUDA version that the driver knows."""
    told = run(["nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"])
    if not told or told.startswith("failed: "):
        return (), ""
    gpus = []
    for line in told.strip().splitlines():
        values = [one.strip() for one in line.split(",")]
        if len(values) == len(GPU):
            gpu: dict[str, Any] = dict(zip(GPU, values, strict=True))
            for size in ("memory.total", "memory.free"):
                gpu[size] = int(gpu[size]) << 20 if gpu[size].isdigit() else 0
            gpus.append(gpu)
    found = re.search(r"CUDA(?: UMD)? Version\s*: *([\d.]+)", run(["nvidia-smi"]) or "")
    return tuple(gpus), found[1] if found else ""


def _gpu_line(gpu: Mapping[str, Any]) -> str:
    sizes = f"{format_size(gpu['memory.free'])} of {format_size(gpu['memory.total'])} free"
    link = f"PCIe {gpu['pcie.link.gen.max']} x{gpu['pcie.link.width.max']}"
    return f"{gpu['name']}, {sizes}, {link}, driver {gpu['driver_version']}"


def _measured(run: Run) -> tuple[dict[str, Any], list[Finding]]:
    told = run([sys.executable, "-m", "trimtab.diagnosis.probe"])
    if told and not told.startswith("failed: "):
        return json.loads(told.strip().splitlines()[-1]), []
    last = (told or "it took too long").strip().splitlines()[-1].removeprefix("failed: ")
    what = f"torch does not work: {mask(last)}"
    return {}, [Finding("TT106", what, fix="pip install --force-reinstall torch")]


def _memory() -> dict[str, int]:
    """Of the machine, in bytes; without psutil only the disk's."""
    found = {"disk free, here": shutil.disk_usage(".").free}
    try:
        import psutil
    except ImportError:
        return found
    ram = psutil.virtual_memory()
    return {"RAM": ram.total, "RAM available": ram.available, **found}


def _hub_cache(environment: Mapping[str, str]) -> Path:
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _folders(cache: Path) -> dict[str, str]:
    if not cache.is_dir():
        return {"hub cache": f"{mask(str(cache))}: not there"}
    models = sum(one.name.startswith("models--") for one in cache.iterdir())
    free = format_size(shutil.disk_usage(cache).free)
    return {"hub cache": f"{mask(str(cache))}: {models} models, {free} free"}


def _variable(name: str, environment: Mapping[str, str]) -> str:
    return "set" if "TOKEN" in name else mask(environment[name])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
