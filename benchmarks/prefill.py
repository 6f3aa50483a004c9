"""Seconds of a prompt of 2,048 tokens: resident, half and all streamed, in turn in one process.

    python benchmarks/prefill.py --layers 32 --out benchmarks/results/prefill-MACHINE.json

The bound of a streamed prompt is the longer of the resident one and the link's time for its bytes.
The three placements are loaded side by side and take turns with the link's measurement, because two
processes of the same code differ by more than what is measured here. Correctness comes first: the
last logits have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes
from generating import generate, prompt, with_logits

LENGTH = 2048
TURNS = 8
STEPS = {"resident": 0, "half": 2, "all": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "machine": f"one {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "shape": f"Llama 8B shape, {given.layers} layers, random weights, NF4, LoRA r=16 on all "
        f"linears, a prompt of {LENGTH} tokens",
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = shapes.llama_config(**{**shapes.LLAMA_8B, "num_hidden_layers": given.layers})
        shapes.write_checkpoint(config, folder / "base", device="cuda")
        shapes.write_adapter(config, folder / "lora")
        torch.cuda.empty_cache()
        found |= measure(folder, given.layers)
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(folder: Path, layers: int) -> dict[str, Any]:
    from trimtab.hardware import measured_link_gbps

    ids = prompt(LENGTH)
    with contextlib.ExitStack() as stack:
        placements = {
            share: stack.enter_context(load(folder, layers, step)) for share, step in STEPS.items()
        }
        digests = {
            share: with_logits(one.model, ids, 1)[1].digest() for share, one in placements.items()
        }
        taken: dict[str, list[float]] = {share: [] for share in placements}
        links = []
        for _ in range(TURNS):
            links.append(measured_link_gbps.__wrapped__())
            for share, one in placements.items():
                taken[share].append(generate(one.model, ids, 1)[1])
        link_gbps = statistics.median(links)
        result: dict[str, Any] = {"link_gbps": link_gbps, "equal": len(set(digests.values())) == 1}
        resident = statistics.median(taken["resident"])
        for share, one in placements.items():
            streamed = sum(unit.moving_bytes for unit in one.plan.of_mode("streamed"))
            bound = max(resident, streamed / link_gbps / 1e9)
            median = statistics.median(taken[share])
            result[share] = {"seconds": taken[share], "median": median, "streamed": streamed,
                             "of the bound": median / bound}  # fmt: skip
    return result


def load(folder: Path, layers: int, step: int) -> Any:
    import trimtab

    away = {f"model.layers.{at}": "cpu" for at in range(0, layers, step)} if step else {}
    return trimtab.load(
        folder / "base", {"a": folder / "lora"}, quant="nf4", gpu="40GiB", cpu="20GiB",
        context=LENGTH + 64, device_map={"": 0, **away},
    )  # fmt: skip


if __name__ == "__main__":
    main()
