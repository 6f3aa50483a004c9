"""What a situation is, how one is kept, and what they are made of: folders to be changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from trimtab.diagnosis import Finding, check
from trimtab.hardware import Gpu, Hardware
from trimtab.memory import GiB

Run = Callable[[Path, bool], Sequence[Finding] | None]

ROOM: dict[str, Any] = {"ram_total": 32 * GiB, "ram_available": 16 * GiB, "disk_free": 99 * GiB}
CARD = Hardware(gpus=(Gpu("a card", 8 * GiB, 8 * GiB),), **ROOM)
NO_GPU = Hardware(gpus=(), **ROOM)
SMALL: dict[str, Any] = {"cpu": "2GiB", "disk": "2GiB", "context": 64}


@dataclass(frozen=True)
class Situation:
    """`says`: in the fault's words, with DIR for the folder, BASE for the Llama, SIZE for sizes."""

    code: str
    says: str
    run: Run


SITUATIONS: list[Situation] = []


def shows(code: str, says: str) -> Callable[[Run], Run]:
    def keep(run: Run) -> Run:
        SITUATIONS.append(Situation(code, says, run))
        return run

    return keep


# ------------------------------------------------------------------------------------ what is used


def base(at: Path, name: str = "llama") -> Path:
    """A copy of a checkpoint, to be changed."""
    return tiny.writable(tiny.checkpoint(name), at).rename(at / "base")


def lora(at: Path, name: str = "llama", kind: str = "lora", **options: Any) -> Path:
    """A copy of an adapter, to be changed."""
    made = tiny.adapter(tiny.checkpoint(name), kind, **options)
    return tiny.writable(made, at).rename(at / "lora")


def edit(folder: Path, **fields: Any) -> Path:
    """Changes a config: sets fields, or removes those that are None."""
    names = ("adapter_config.json", "config.json")
    file = next(one for name in names if (one := folder / name).exists())
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    return folder


def without(folder: Path, name: str, wrong: bool) -> Path:
    """The folder, where things are wrong without that file."""
    if wrong:
        (folder / name).unlink()
    return folder


def shortened(folder: Path, name: str, wrong: bool) -> Path:
    """The folder, where things are wrong without the last byte of that file."""
    if wrong:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    return folder


def llama() -> Path:
    return tiny.checkpoint("llama")


def looked_at(device_map: dict[str, Any], hardware: Hardware = CARD) -> list[Finding]:
    return check(llama(), device_map, hardware=hardware)
