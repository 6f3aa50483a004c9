"""Tokens per second of captured and eager decoding, streamed and resident, against the floor.

    python benchmarks/decode.py --layers 16 --out benchmarks/results/decode-MACHINE.json

The floor of a step is the longer of its streamed bytes over the link and the resident model's
captured step. The link is measured before, between and after them, and its median counts: on a
server others use it too. Correctness comes first: what is streamed has the resident model's tokens
and logits to the last bit, and captured decoding has eager decoding's tokens, or first differs
where two tokens are within rounding of each other.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes
from generating import generate, prompt, with_logits

PROMPT = 32
EAGER_NEW = 64
TIMES = 5


def rate(
    model: Any, ids: torch.Tensor, count: int, options: Any = dict, times: int = 1
) -> tuple[list[int], float]:
    """Greedy tokens, and tokens per second of all but the first eight, by medians of `times`."""
    generate(model, ids, 8, **options())
    generate(model, ids, 8, **options())
    short, long = [], []
    for _ in range(times):
        short.append(generate(model, ids, 8, **options())[1])
        tokens, seconds = generate(model, ids, count, **options())
        long.append(seconds)
    return tokens, (count - 8) / (statistics.median(long) - statistics.median(short))


def captured(placed: Any, ids: torch.Tensor, count: int) -> dict[str, Any]:
    tokens, per_second = rate(placed.model, ids, count, times=TIMES)
    peak = torch.cuda.max_memory_allocated()
    again, logits = with_logits(placed.model, ids, count)
    assert again == tokens
    return {"tokens": tokens, "per_second": per_second, "logits": logits.digest(), "peak": peak}


def static(placed: Any) -> dict[str, Any]:
    """A cache of the captured steps' kind, since another rounds differently."""
    from trimtab import caches

    base = placed.model.get_base_model()
    return {caches.cache_argument(base): caches.static_cache(base, placed.plan.context)}


@contextlib.contextmanager
def uncaptured(placed: Any) -> Iterator[None]:
    recorder, placed.steps.recorder = placed.steps.recorder, None
    try:
        yield
    finally:
        placed.steps.recorder = recorder


def eager(placed: Any, ids: torch.Tensor) -> dict[str, Any]:
    with uncaptured(placed):
        tokens, per_second = rate(placed.model, ids, EAGER_NEW, lambda: static(placed))
    return {"tokens": tokens, "per_second": per_second}


def captured_by_peft(placed: Any, ids: torch.Tensor) -> list[int]:
    """Tokens of captured steps in which PEFT computes the LoRAs, not our kernels."""
    shortcuts, placed.steps.shortcuts = placed.steps.shortcuts, None
    placed.steps.clear()
    try:
        generate(placed.model, ids, 8)
        tokens, _ = generate(placed.model, ids, EAGER_NEW)
        assert placed.steps.shortened == 0
    finally:
        placed.steps.shortcuts = shortcuts
        placed.steps.clear()
    return tokens


def first_difference(one: list[int], other: list[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), None)


def compared(
    placed: Any, ids: torch.Tensor, tokens: list[int], eagerly: list[int]
) -> dict[str, Any]:
    """Captured against eager tokens, and where they part, how far each is from float32.

    Both compute in bfloat16 from the same weights. Where the best logits are nearer to each other
    than either way's logits are to those of the same weights in float32, which comes first is a
    matter of rounding.
    """
    by_peft = first_difference(captured_by_peft(placed, ids), eagerly)
    at = first_difference(tokens, eagerly)
    found: dict[str, Any] = {"with PEFT's own LoRA": by_peft, "with LoRA in two kernels": at}
    if at is None:
        return found
    _, ours = with_logits(placed.model, ids, at + 1)
    with uncaptured(placed):
        _, theirs = with_logits(placed.model, ids, at + 1, **static(placed))
    rows = {"captured": ours.rows[at][0].float(), "eager": theirs.rows[at][0].float()}
    whole = torch.cat(
        [ids, torch.tensor([tokens[:at]], dtype=torch.long, device=ids.device)], dim=1
    )
    exact = in_float32(placed.plan, whole)
    pair = [tokens[at], eagerly[at]]
    kept = exact.isfinite() & rows["eager"].isfinite()
    found |= {
        "tokens": pair,
        "margin": {name: float(row[pair[0]] - row[pair[1]]) for name, row in rows.items()},
        "margin in float32": float(exact[pair[0]] - exact[pair[1]]),
        "from float32, largest": {
            name: float((row - exact)[kept].abs().max()) for name, row in rows.items()
        },
        "from float32, relative": {
            name: float((row - exact)[kept].norm() / exact[kept].norm())
            for name, row in rows.items()
        },
    }
    return found


def in_float32(plan: Any, ids: torch.Tensor) -> torch.Tensor:
    """The last logits of the stock model with the plan's adapter, computed in float32."""
    import transformers
    from peft import PeftModel

    from trimtab.quantize import quantization_config

    kind = getattr(transformers, plan.architecture)
    stored = "quantization_config" in json.loads((Path(plan.model) / "config.json").read_text())
    model = kind.from_pretrained(
        plan.model, dtype=torch.bfloat16, device_map={"": 0},
        quantization_config=None if stored else quantization_config(plan.quant, plan.dtype),
    )  # fmt: skip
    model = PeftModel.from_pretrained(model, plan.adapters[0].source)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
    with torch.no_grad():
        row: torch.Tensor = model(input_ids=ids).logits[0, -1]
    assert row.dtype == torch.float32
    return row


def map_of(config: dict[str, Any], share: str) -> dict[str, Any] | None:
    """A device map with all, every second or none of the decoder layers in RAM; a budget plans."""
    if share.endswith("GiB"):
        return None
    text = config.get("text_config", config)
    prefix = "model.language_model.layers" if "text_config" in config else "model.layers"
    step = {"resident": 0, "half": 2, "all": 1}[share]
    away = range(0, text["num_hidden_layers"], step) if step else ()
    return {"": 0, **{f"{prefix}.{i}": "cpu" for i in away}}


def prompt_of(placed: Any, text: str | None) -> torch.Tensor:
    """A question to a real model; random numbers for one of random weights."""
    if text is None:
        return prompt(PROMPT)
    found: torch.Tensor = placed.encode(text)["input_ids"]
    return found


def run(folder: Path, adapter: Path, share: str, given: argparse.Namespace) -> dict[str, Any]:
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
        ids = prompt_of(placed, given.prompt)
        result["captured"] = captured(placed, ids, given.tokens)
        result["shortened"] = placed.steps.shortened
        with placed.using(None):
            result["without adapter"] = captured(placed, ids, given.tokens)["per_second"]
        result["steps"] = {"captured": placed.steps.captured, "replayed": placed.steps.replayed,
                           "refusals": dict(placed.steps.refusals)}  # fmt: skip
        result["eager"] = eager(placed, ids)
        if share == "resident":
            result["first difference from eager"] = compared(
                placed, ids, result["captured"]["tokens"], result["eager"]["tokens"]
            )
        # Before the logits were kept.
        result["peak"] = result["captured"]["peak"]
        result["total_planned"] = made.totals["gpu:0"]
        result["planned"] = made.totals["gpu:0"] - made.costs["context"]
        result["forecast"] = made.forecast.tokens_per_second
    return result


def judge(found: dict[str, Any]) -> None:
    """Adds shares of the floor, and whether what is streamed is the resident model's."""
    resident = found["resident"]["captured"]
    link = found["link_gbps"] = statistics.median(found["links"])
    for share in found["shares"]:
        one = found[share]
        floor = resident["per_second"]
        if one["streamed"]:
            one["link_per_second"] = link * 1e9 / one["streamed"]
            floor = min(one["link_per_second"], floor)
        one["of resident"] = one["captured"]["per_second"] / resident["per_second"]
        one["share"] = one["captured"]["per_second"] / floor
        one["equal"] = all(one["captured"][key] == resident[key] for key in ("tokens", "logits"))
        print(f"{share:9} eager {one['eager']['per_second']:6.1f} captured "
              f"{one['captured']['per_second']:6.1f} without adapter "
              f"{one['without adapter']:6.1f} tok/s, forecast {one['forecast']:.1f}, share of the "
              f"floor {one['share']:.3f}, of the resident's {one['of resident']:.3f}, tokens and "
              "logits equal to the resident's "
              f"{one['equal']}, first difference from eager "
              f"{one.get('first difference from eager')}, shortened {one['shortened']} "
              f"{one['steps']} load {one['load_s']:.1f} s, peak "
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
    parser.add_argument("--folder", type=Path, help="with base/ and lora/: taken, or written")
    parser.add_argument("--prompt", help="a text, for a model that has a tokenizer")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--shares", default="resident,half,all", help="or a budget, as 4GiB")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "machine": f"one {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "shares": given.shares.split(","),
        "links": [measured_link_gbps()],
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
            found[share] = run(folder / "base", folder / "lora", share, given)
            found["links"].append(measured_link_gbps.__wrapped__())
            print(share, f"{time.perf_counter() - start:.1f} s", found[share]["modes"],
                  f"load {found[share]['load_s']:.1f} s", flush=True)  # fmt: skip
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    judge(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
