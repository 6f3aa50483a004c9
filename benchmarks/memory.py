"""Planned against measured memory on a GPU, while loading and while running.

    python benchmarks/memory.py --out benchmarks/results/memory-MACHINE.json

Each case runs in a process of its own. Measured are the peak of what torch allocated, the peak of
what its allocator reserved, and what the process takes of the GPU beside that (the CUDA context).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes

CASES: dict[str, dict[str, Any]] = {
    "llama-1b nf4 resident": {"model": "llama-1b", "quant": "nf4", "share": 1.2},
    "llama-1b nf4 half": {"model": "llama-1b", "quant": "nf4", "share": 0.5},
    "llama-1b nf4 leanest": {"model": "llama-1b", "quant": "nf4", "share": 0.0},
    "llama-1b nf4-dq half": {"model": "llama-1b", "quant": "nf4-dq", "share": 0.5},
    "llama-1b int8 half": {"model": "llama-1b", "quant": "int8", "share": 0.5},
    "llama-1b none half": {"model": "llama-1b", "quant": "none", "share": 0.5},
    "gemma4-e4b nf4 resident": {"model": "gemma4-e4b", "quant": "nf4", "share": 1.2},
    "gemma4-e4b nf4 leanest": {"model": "gemma4-e4b", "quant": "nf4", "share": 0.0},
    "gemma4-e4b nf4 table": {"model": "gemma4-e4b", "quant": "nf4", "gpu": "4GiB"},
}
CONTEXT = 1024


def measure(case: dict[str, Any], folder: Path, adapter: Path) -> dict[str, Any]:
    from trimtab.api import load, plan
    from trimtab.errors import DoesNotFit

    asked = {"adapters": {"a": adapter}, "quant": case["quant"], "cpu": "60GiB",
             "context": CONTEXT}  # fmt: skip
    gpu = case.get("gpu")
    if gpu is None:
        roomy = plan(folder, gpu="130GiB", **asked).totals["gpu:0"]
        try:
            plan(folder, gpu=1, **asked)
            raise AssertionError("a byte was enough")
        except DoesNotFit as fault:
            smallest: Any = fault.parts["smallest"]
        gpu = int(smallest + (roomy - smallest) * case["share"])
    made = plan(folder, gpu=gpu, **asked)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.reset_peak_memory_stats()
    with load(made) as placed:
        loading = peaks()
        torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(1, 1000, (1, CONTEXT - 8), device="cuda")
        with torch.no_grad():
            for _ in range(2):  # the second has what the first has captured
                placed.model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
        running = peaks()
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        context = total - torch.cuda.mem_get_info()[0] - reserved
    after = torch.cuda.memory_allocated()
    return {
        "planned": made.totals["gpu:0"], "costs": dict(made.costs), "slots": made.slots,
        "modes": {mode: len(made.of_mode(mode)) for mode in
                  ("resident", "streamed", "idle", "looked up")},
        "loading": loading, "running": running, "context": context,
        "measured": max(loading["allocated"], running["allocated"]) + context,
        "measured_reserved": max(loading["reserved"], running["reserved"]) + context,
        "left_after_close": after,
    }  # fmt: skip


def peaks() -> dict[str, int]:
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.case:
        model = CASES[given.case]["model"]
        found = measure(CASES[given.case], given.folder / model, given.folder / f"{model}-lora")
        print("RESULT " + json.dumps(found))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wanted = [name for name in CASES if re.search(given.only, name)]
        # In a process of its own: a second CUDA context would be counted with the first.
        models = {CASES[name]["model"] for name in wanted}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            device = pool.apply(make, (folder, models))
        for name in wanted:
            results[name] = in_a_process(name, folder)
            print(row(name, results[name]), flush=True)
            if given.out:
                given.out.write_text(json.dumps({"machine": device, "cases": results}, indent=1))


def make(folder: Path, models: set[str]) -> str:
    configs = {
        "llama-1b": lambda: shapes.llama_config(**shapes.LLAMA_1B),
        "gemma4-e4b": lambda: shapes.gemma4_config(**shapes.GEMMA4_E4B),
    }
    for name in models:
        config = configs[name]()
        shapes.write_checkpoint(config, folder / name, device="cuda")
        shapes.write_adapter(config, folder / f"{name}-lora")
    return f"one {torch.cuda.get_device_name()}, torch {torch.__version__}"


def in_a_process(name: str, folder: Path) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, __file__, "--case", name, "--folder", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": ran.stderr[-2000:]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def row(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name}: {found['error']}"
    mib = 2**20
    planned, measured = found["planned"] / mib, found["measured"] / mib
    parts = {key: round(value / mib) for key, value in found["costs"].items() if value}
    return (
        f"{name:26} planned {planned:7.0f} measured {measured:7.0f} MiB "
        f"({planned - measured:+6.0f}, {100 * (planned / measured - 1):+.1f} %) "
        f"load {found['loading']['allocated'] / mib:.0f}/{found['loading']['reserved'] / mib:.0f} "
        f"run {found['running']['allocated'] / mib:.0f}/{found['running']['reserved'] / mib:.0f} "
        f"context {found['context'] / mib:.0f} {found['modes']} {parts}"
        f" left {found['left_after_close'] / mib:.1f}"
    )


if __name__ == "__main__":
    main()
