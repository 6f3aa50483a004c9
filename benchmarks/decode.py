"""Tokens per second of captured and eager decoding, streamed and resident, against the floor.

    python benchmarks/decode.py --layers 16 --out benchmarks/results/decode-MACHINE.json

The floor of a streamed step is its bytes over the link as measured in the same run. Correctness
comes first: the tokens of all runs of one kind must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes

NEW = 64


def run(folder: Path, adapter: Path, share: str, link: float) -> dict[str, Any]:
    from trimtab.api import load, plan

    count = {"resident": 0, "half": 2, "all": 1}[share]
    layers = json.loads((folder / "config.json").read_text())
    total = layers.get("num_hidden_layers") or layers["text_config"]["num_hidden_layers"]
    prefix = "model.language_model.layers" if "text_config" in layers else "model.layers"
    away = {f"{prefix}.{i}": "cpu" for i in range(0, total, count)} if count else {}
    made = plan(folder, {"a": adapter}, quant="nf4", gpu="100GiB", cpu="60GiB", context=256,
                device_map={"": 0, **away})  # fmt: skip
    start = time.perf_counter()
    with load(made) as placed:
        loaded = time.perf_counter() - start
        ids = torch.randint(1, 1000, (1, 32), generator=torch.Generator().manual_seed(0)).cuda()
        streamed = sum(unit.moving_bytes for unit in made.of_mode("streamed"))
        result: dict[str, Any] = {"streamed": streamed, "load_s": loaded, "slots": made.slots}
        recorder = placed.steps.recorder
        for way in ("eager", "captured"):
            placed.steps.recorder = recorder if way == "captured" else None
            tokens, rate = decode(placed, ids, way == "eager")
            result[way] = {"tokens": tokens, "per_second": rate}
        result["steps"] = {"captured": placed.steps.captured, "replayed": placed.steps.replayed,
                           "refusals": dict(placed.steps.refusals)}  # fmt: skip
        result["peak"] = torch.cuda.max_memory_allocated()
        result["planned"] = made.totals["gpu:0"] - made.costs["context"]
        if streamed:
            result["floor_per_second"] = link * 1e9 / streamed
            result["share"] = result["captured"]["per_second"] / result["floor_per_second"]
    return result


def decode(placed: Any, ids: torch.Tensor, own_cache: bool) -> tuple[list[int], float]:
    """Greedy tokens, and tokens per second of all but the first tokens of the second run."""
    from trimtab import caches

    base = placed.model.get_base_model()
    options: dict[str, Any] = {"min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        if own_cache:
            # The same cache as the captured steps have, or the logits differ within rounding.
            options[caches.cache_argument(base)] = caches.static_cache(base, placed.plan.context)
        with torch.no_grad():
            torch.cuda.synchronize()
            first = time.perf_counter()
            placed.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                                  max_new_tokens=8, **{**options, "min_new_tokens": 8})  # fmt: skip
            if own_cache:
                options[caches.cache_argument(base)] = caches.static_cache(
                    base, placed.plan.context
                )
            torch.cuda.synchronize()
            second = time.perf_counter()
            out = placed.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids),
                                        max_new_tokens=NEW, **options)  # fmt: skip
            torch.cuda.synchronize()
            third = time.perf_counter()
    return out[0, 32:].tolist(), (NEW - 8) / ((third - second) - (second - first))


def main() -> None:
    from trimtab.hardware import measured_link_gbps

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--model", default="llama")
    given = parser.parse_args()
    link = measured_link_gbps()
    found: dict[str, Any] = {
        "machine": f"one {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "link_gbps": link,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.model == "llama":
            shape = {**shapes.LLAMA_8B, "num_hidden_layers": given.layers}
            config = shapes.llama_config(**shape)
        else:
            config = shapes.gemma4_config(**shapes.GEMMA4_E4B)
        shapes.write_checkpoint(config, folder / "base", device="cuda")
        shapes.write_adapter(config, folder / "lora")
        torch.cuda.empty_cache()
        for share in ("resident", "half", "all"):
            found[share] = one = run(folder / "base", folder / "lora", share, link)
            eager, captured = one["eager"], one["captured"]
            print(f"{share:9} eager {eager['per_second']:6.1f} captured "
                  f"{captured['per_second']:6.1f} tok/s, share of the floor "
                  f"{one.get('share', 0):.3f}, equal {eager['tokens'] == captured['tokens']}, "
                  f"{one['steps']} peak {one['peak'] / 2**20:.0f} planned "
                  f"{one['planned'] / 2**20:.0f} MiB", flush=True)  # fmt: skip
    first = found["resident"]["captured"]["tokens"]
    print(
        "streamed equals resident:",
        [found[s]["captured"]["tokens"] == first for s in ("half", "all")],
    )
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
