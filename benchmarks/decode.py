"""Tokens per second of captured and eager decoding, streamed and resident, against the floor.

    python benchmarks/decode.py --layers 16 --out benchmarks/results/decode-MACHINE.json

The floor of a step is the longer of its streamed bytes over the link, as measured in the same run,
and the resident model's captured step. Correctness comes first: what is streamed has the resident
model's tokens and logits to the last bit, and captured decoding has eager decoding's tokens, or
first differs where two tokens are within rounding of each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes

PROMPT = 32
EAGER_NEW = 64


class Logits:
    """A logits processor that keeps what it sees."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(scores.clone())
        return scores

    def digest(self) -> str:
        whole = torch.cat(self.rows).cpu().view(torch.uint8).numpy()
        return hashlib.sha256(whole.tobytes()).hexdigest()


def prompt() -> torch.Tensor:
    return torch.randint(1, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0)).cuda()


def generate(model: Any, count: int, **options: Any) -> tuple[list[int], float]:
    """`count` greedy tokens, and the seconds that they took."""
    ids = prompt()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                             **options)  # fmt: skip
    torch.cuda.synchronize()
    return out[0, PROMPT:].tolist(), time.perf_counter() - start


def rate(model: Any, count: int, options: Any = dict, times: int = 3) -> tuple[list[int], float]:
    """Greedy tokens, and tokens per second of all but the first eight; the best of `times`."""
    generate(model, 8, **options())
    generate(model, 8, **options())
    best = 0.0
    for _ in range(times):
        _, short = generate(model, 8, **options())
        tokens, long = generate(model, count, **options())
        best = max(best, (count - 8) / (long - short))
    return tokens, best


def captured(placed: Any, count: int) -> dict[str, Any]:
    from transformers import LogitsProcessorList

    tokens, per_second = rate(placed.model, count)
    peak = torch.cuda.max_memory_allocated()
    logits = Logits()
    again, _ = generate(placed.model, count, logits_processor=LogitsProcessorList([logits]))
    assert again == tokens
    return {"tokens": tokens, "per_second": per_second, "logits": logits.digest(), "peak": peak}


def eager(placed: Any) -> dict[str, Any]:
    """On the same kind of cache as the captured steps, since another rounds differently."""
    from trimtab import caches

    base = placed.model.get_base_model()
    recorder, placed.steps.recorder = placed.steps.recorder, None

    def options() -> dict[str, Any]:
        cache = caches.static_cache(base, placed.plan.context)
        return {caches.cache_argument(base): cache}

    try:
        tokens, per_second = rate(placed.model, EAGER_NEW, options, times=1)
    finally:
        placed.steps.recorder = recorder
    return {"tokens": tokens, "per_second": per_second}


def difference(placed: Any, one: list[int], other: list[int]) -> dict[str, Any] | None:
    """Where tokens first differ, and how near the two are, in roundings of the larger logit."""
    at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
    if at < 0:
        return None
    ids = torch.cat([prompt(), torch.tensor([one[:at]], dtype=torch.long, device="cuda")], dim=1)
    with torch.no_grad():
        logits = placed.model(input_ids=ids).logits[0, -1].float()
    best = logits.topk(2)
    margin = float(best.values[0] - logits[other[at]])
    rounding = 2.0 ** (int(torch.frexp(best.values[0])[1]) - 8)
    return {"at": at, "tokens": [one[at], other[at]], "best": best.indices.tolist(),
            "margin": margin, "roundings": margin / rounding}  # fmt: skip


def map_of(config: dict[str, Any], share: str) -> dict[str, Any] | None:
    """A device map with all, every second or none of the decoder layers in RAM; a budget plans."""
    if share.endswith("GiB"):
        return None
    text = config.get("text_config", config)
    prefix = "model.language_model.layers" if "text_config" in config else "model.layers"
    step = {"resident": 0, "half": 2, "all": 1}[share]
    away = range(0, text["num_hidden_layers"], step) if step else ()
    return {"": 0, **{f"{prefix}.{i}": "cpu" for i in away}}


def run(
    folder: Path, adapter: Path, share: str, link: float, given: argparse.Namespace
) -> dict[str, Any]:
    from trimtab.api import load, plan

    config = json.loads((folder / "config.json").read_text())
    gpu = share if share.endswith("GiB") else "100GiB"
    made = plan(folder, {"a": adapter}, quant=given.quant, gpu=gpu, cpu="60GiB", context=512,
                device_map=map_of(config, share))  # fmt: skip
    start = time.perf_counter()
    with load(made) as placed:
        loaded = time.perf_counter() - start
        streamed = sum(unit.moving_bytes for unit in made.of_mode("streamed"))
        result: dict[str, Any] = {"streamed": streamed, "load_s": loaded, "slots": made.slots}
        result["modes"] = {mode: len(made.of_mode(mode)) for mode in
                           ("resident", "streamed", "idle", "looked up")}  # fmt: skip
        result["captured"] = captured(placed, given.tokens)
        result["shortened"] = placed.steps.shortened
        with placed.using(None):
            result["without adapter"] = captured(placed, given.tokens)["per_second"]
        result["steps"] = {"captured": placed.steps.captured, "replayed": placed.steps.replayed,
                           "refusals": dict(placed.steps.refusals)}  # fmt: skip
        result["eager"] = eager(placed)
        tokens = result["captured"]["tokens"]
        result["difference"] = difference(placed, tokens, result["eager"]["tokens"])
        # Before the logits were kept.
        result["peak"] = result["captured"]["peak"]
        result["total_planned"] = made.totals["gpu:0"]
        result["planned"] = made.totals["gpu:0"] - made.costs["context"]
        result["forecast"] = made.forecast.tokens_per_second
        if streamed:
            result["link_per_second"] = link * 1e9 / streamed
    return result


def judge(found: dict[str, Any]) -> None:
    """Adds shares of the floor, and whether what is streamed is the resident model's."""
    resident = found["resident"]["captured"]
    for share in found["shares"]:
        one = found[share]
        floor = min(one.get("link_per_second", float("inf")), resident["per_second"])
        one["share"] = one["captured"]["per_second"] / floor
        one["equal"] = all(one["captured"][key] == resident[key] for key in ("tokens", "logits"))
        print(f"{share:9} eager {one['eager']['per_second']:6.1f} captured "
              f"{one['captured']['per_second']:6.1f} without adapter "
              f"{one['without adapter']:6.1f} tok/s, forecast {one['forecast']:.1f}, share of the "
              f"floor {one['share']:.3f}, tokens and logits equal to the resident's "
              f"{one['equal']}, first difference from eager {one['difference']}, shortened "
              f"{one['shortened']} {one['steps']} load {one['load_s']:.1f} s, peak "
              f"{one['peak'] / 2**20:.0f} planned {one['planned'] / 2**20:.0f} MiB",
              flush=True)  # fmt: skip


def write(folder: Path, given: argparse.Namespace) -> None:
    if given.model == "llama":
        shape = {**shapes.LLAMA_8B, "num_hidden_layers": given.layers}
        config = shapes.llama_config(**shape)
    else:
        config = shapes.gemma4_config(**shapes.GEMMA4_E4B)
    shapes.write_checkpoint(config, folder / "base", device="cuda")
    shapes.write_adapter(config, folder / "lora")
    torch.cuda.empty_cache()


def main() -> None:
    from trimtab.hardware import measured_link_gbps

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--folder", type=Path, help="where the checkpoint lies, or is written")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shares", default="resident,half,all", help="or a budget, as 4GiB")
    given = parser.parse_args()
    link = measured_link_gbps()
    found: dict[str, Any] = {
        "machine": f"one {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "link_gbps": link,
        "shares": given.shares.split(","),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = time.perf_counter()
        if given.folder:
            folder = given.folder
        if not (folder / "lora").exists():
            write(folder, given)
        print(f"checkpoint written in {time.perf_counter() - start:.1f} s", flush=True)
        for share in found["shares"]:
            start = time.perf_counter()
            found[share] = run(folder / "base", folder / "lora", share, link, given)
            print(share, f"{time.perf_counter() - start:.1f} s", found[share]["modes"],
                  f"load {found[share]['load_s']:.1f} s", flush=True)  # fmt: skip
            torch.cuda.reset_peak_memory_stats()
    judge(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
