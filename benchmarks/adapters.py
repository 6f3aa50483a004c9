"""Memory and time of 1, 10 and 50 adapters: loading, switching, swapping, resting within a cap.

    python benchmarks/adapters.py --out benchmarks/results/adapters-MACHINE.json

A Llama of 16 layers of the 8B shape, NF4, every other layer streamed, LoRAs of rank 16 on all
linears. One file is loaded under all names: PEFT knows adapters by name only. In
the end the cap is set to the bytes of four, and all of them are used in turn. `--tiny` runs on any
machine, with small layers: its bytes say nothing, its host time is what so many modules take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import generating
import shapes

COUNTS = (1, 10, 50)
RANK = 16
TOKENS = 16
CAPPED = 4
"""Adapters that have room in the end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    shape: dict[str, Any] = {**shapes.LLAMA_8B, "num_hidden_layers": given.layers}
    if given.tiny:
        shape = {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": given.layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
            "tie_word_embeddings": False,
        }  # fmt: skip
    config = shapes.llama_config(**shape)
    machine = f"one {torch.cuda.get_device_name()}" if on_gpu else "a CPU"
    found: dict[str, Any] = {
        "machine": f"{machine}, torch {torch.__version__}",
        "model": {key: shape[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")},
        "rank": RANK,
        "tiny": given.tiny,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shapes.write_checkpoint(config, folder / "base", device="cuda" if on_gpu else "cpu")
        for name, rank in (("a", RANK), ("half", RANK // 2), ("twice", 2 * RANK)):
            shapes.write_adapter(config, folder / name, rank=rank)
        empty_cache()
        found.update(measure(folder))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    else:
        print(json.dumps(found, indent=1))


def planned(folder: Path, **options: Any) -> Any:
    from trimtab.api import plan

    layers = json.loads((folder / "base" / "config.json").read_text())["num_hidden_layers"]
    gpu = torch.cuda.is_available()
    away = {f"model.layers.{i}": "cpu" if gpu else "disk" for i in range(0, layers, 2)}
    room = {"gpu": "100GiB", "cpu": "60GiB"} if gpu else {"cpu": "8GiB", "disk": "8GiB"}
    return plan(
        folder / "base", {"n0": folder / "a"}, quant="nf4", context=256,
        device_map={"": 0 if gpu else "cpu", **away}, **room, **options,
    )  # fmt: skip


def measure(folder: Path) -> dict[str, Any]:
    """1, 10 and 50 adapters, all on the device; then room for four."""
    from trimtab.adapters import adapter_bytes, read_adapter
    from trimtab.api import load

    size = adapter_bytes(read_adapter(folder / "a"))
    result: dict[str, Any] = {}
    loads: list[float] = []
    start = time.perf_counter()
    with load(planned(folder, adapter_memory=2 * max(COUNTS) * size)) as placed:
        result["base and one adapter_s"] = time.perf_counter() - start
        result["bytes of one"] = placed.shelf.here
        for count in COUNTS:
            before = allocated()
            for number in range(len(placed.adapters), count):
                loads.append(
                    timed(lambda name=f"n{number}": placed.add_adapter(name, folder / "a"))
                )
            result[f"{count} adapters"] = {
                "bytes on the device": placed.shelf.here,
                "bytes on the device, measured": allocated() - before,
                "switch_ms": switching(placed),
                "to the base and back_ms": 1e3 * median(lambda: off(placed), 9),
                "step after a switch": steps(placed),
                "swap_ms": swapping(placed, folder),
            }
            show(count, result[f"{count} adapters"])
        result["load_s"] = {
            "2nd": loads[0], "3rd to 5th": statistics.median(loads[1:4]),
            "last three": statistics.median(loads[-3:]), "50th": loads[-1],
            "slowest": max(loads),
        }  # fmt: skip
        show("load", result["load_s"])
        result["capped"] = capped(placed, size)
    return result


def switching(placed: Any) -> dict[str, float]:
    """Host time of a switch between loaded adapters: no byte is moved."""
    names = placed.adapters
    turns = [names[(7 * n) % len(names)] for n in range(50)]
    took = [1e3 * timed(lambda name=name: placed.model.set_adapter(name)) for name in turns]
    return {"median": statistics.median(took), "worst": max(took)}


def off(placed: Any) -> None:
    with placed.using(None):
        pass


def steps(placed: Any) -> dict[str, int]:
    """Decode steps that were captured and replayed, in two turns of the first and the last."""
    names = (placed.adapters[0], placed.adapters[-1])
    for name in names:  # the first turn captures
        generate(placed, name)
    before = placed.steps.captured, placed.steps.replayed
    for name in names:
        generate(placed, name)
    return {
        "captured": placed.steps.captured - before[0],
        "replayed": placed.steps.replayed - before[1],
    }


def swapping(placed: Any, folder: Path) -> dict[str, float]:
    """A swap in place of the same rank, of half of it (padded), of twice it (moved), and back."""
    name = placed.adapters[-1]
    found = {}
    for what, source in (("same", "a"), ("half", "half"), ("twice", "twice"), ("back", "a")):
        found[what] = 1e3 * timed(lambda source=source: placed.swap_adapter(name, folder / source))
    placed.remove_adapter(name)
    placed.add_adapter(name, folder / "a")  # in a place of its own size again
    return found


def capped(placed: Any, size: int) -> dict[str, Any]:
    """Room for a few; what comes back brings its bytes, and is exact."""
    names = placed.adapters[:10]
    wanted = [generate(placed, name) for name in names]
    before = allocated()
    placed.shelf.cap, placed.shelf.peak = CAPPED * size, 0
    leave = 1e3 * timed(lambda: placed.shelf.make_room(0))
    placed.shelf.peak = placed.shelf.here
    same = [generate(placed, name) for name in names] == wanted
    comes, stays = [], []
    for name in placed.adapters:
        placed.model.set_adapter(name)
        comes.append(1e3 * timed(placed.shelf.admit))
        stays.append(1e3 * timed(placed.shelf.admit))
    result = {
        "cap": placed.shelf.cap,
        "bytes on the device": placed.shelf.here,
        "most at once": placed.shelf.peak,
        "bytes in host memory": placed.shelf.host_bytes,
        "freed on the device, measured": before - allocated(),
        "resting": len(placed.shelf.resting),
        "all but four leave_ms": leave,
        "one comes back, another leaves_ms": statistics.median(comes),
        "it is there_ms": statistics.median(stays),
        "tokens equal": same,
    }
    show("capped", result)
    return result


def generate(placed: Any, name: str) -> list[int]:
    with placed.using(name) as model:
        return generating.generate(model, generating.prompt(32, placed.device, 200), TOKENS)[0]


def timed(work: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def median(work: Callable[[], Any], count: int) -> float:
    return statistics.median(timed(work) for _ in range(count))


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def empty_cache() -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def show(what: Any, found: dict[str, Any]) -> None:
    print(what, json.dumps(found), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
