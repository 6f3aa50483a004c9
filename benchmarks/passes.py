"""More tokens for each pass of the weights: prompt lookup and an assistant over streamed layers.

    python scripts/fetch_smollm2.py
    python benchmarks/passes.py --out benchmarks/results/passes-MACHINE.json

SmolLM2-135M in 16 bits, all decoder layers streamed (from RAM on a GPU, from the disk on a CPU),
repeats a text and answers a question. The assistant is the same model in NF4, resident. Passes are
counted: each brings all streamed layers in once, on any machine. Tokens may differ where two are
within rounding: a pass over several tokens rounds otherwise, on a resident model, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trimtab.api import load, plan

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from fetch_smollm2 import default_folder

TEXT = (
    "The trim tab is a small surface at the edge of a rudder. Turning it takes little force, and "
    "it turns the rudder, which turns the ship."
)
PROMPTS = {
    "repeat a text": f"Repeat this text word for word: {TEXT}",
    "answer a question": "How does a rudder steer a ship? Answer in three sentences.",
}
NEW = 32


def made(quant: str, away: bool, gpu: bool) -> Any:
    layers = json.loads((default_folder() / "config.json").read_text())["num_hidden_layers"]
    rests = "cpu" if gpu else "disk"
    where = {f"model.layers.{number}": rests for number in range(layers)} if away else {}
    runs: Any = 0 if gpu else "cpu"
    asked: dict[str, Any] = {"gpu": "8GiB"} if gpu else {}
    return plan(default_folder(), quant=quant, cpu="8GiB", disk="4GiB", context=512,
                device_map={"": runs, **where}, **asked)  # fmt: skip


def measure(placed: Any, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    passes: list[int] = []
    hook = placed.model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        start = time.perf_counter()
        out = placed.model.generate(**inputs, do_sample=False, max_new_tokens=NEW,
                                    min_new_tokens=NEW, **options)  # fmt: skip
        tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
        seconds = time.perf_counter() - start
    finally:
        hook.remove()
    return {"tokens": tokens, "passes": len(passes), "per_second": len(tokens) / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    found: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if gpu else
        f"a CPU ({platform.machine()}), threads: {torch.get_num_threads()}",
        "torch": torch.__version__,
    }  # fmt: skip
    with load(made("none", True, gpu)) as placed, load(made("nf4", False, gpu)) as helper:
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "prompt lookup": {"prompt_lookup_num_tokens": 8},
            "assistant": {"assistant_model": helper.model},
        }
        for name, prompt in PROMPTS.items():
            inputs = placed.encode(prompt)
            found[name] = {way: measure(placed, inputs, **asked) for way, asked in ways.items()}
            plain = found[name]["plain"]
            for way, one in found[name].items():
                one["equal"] = one["tokens"] == plain["tokens"]
                times = one["per_second"] / plain["per_second"]
                print(f"{name:18} {way:14} {one['passes']:3} passes for {NEW} tokens, "
                      f"{one['per_second']:6.2f} tok/s ({times:.2f} of plain), "
                      f"tokens equal {one['equal']}", flush=True)  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
