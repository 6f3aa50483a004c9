"""trimtab beside what people use today: the same random weights, one GPU, each in a process.

    python benchmarks/peers.py --layers 32 --out benchmarks/results/peers-MACHINE.json

Correctness comes first: each way's logits of one prompt are compared with the all-resident model's
of the same weights. Then tokens per second of greedy decoding at batch 1, the seconds of a prompt
of 2,048 tokens, the seconds of loading, and the peak of what torch allocated on the GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import shapes
from generating import generate, prompt, with_logits

LONG = 2048
CONTEXT = LONG + 64
SECONDS = 110
"""The most that one way may take, loading included."""

MMGP_BUDGET = 500
"""Megabytes: about one decoder layer in int8, twice."""


EQUAL = 256
"""Tokens whose logits are compared between trimtab's ways."""


def seconds(model: Any, length: int, count: int, **options: Any) -> float:
    """Seconds for `count` greedy tokens after a prompt of `length`."""
    return generate(model, prompt(length), count, **options)[1]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(input_ids=prompt(32)).logits[0, -1].float().cpu()
    assert found.isfinite().all()
    return found


def measure(model: Any, count: int, **options: Any) -> dict[str, float]:
    """Tokens per second, and the seconds of a long prompt, the best of four."""
    per_second = rate(model, count, **options)
    prefill = min(seconds(model, LONG, 1, **options) for _ in range(4))
    return {"tokens_per_second": per_second, "prefill_s": prefill}


def rate(model: Any, count: int, **options: Any) -> float:
    """Tokens per second of all but the first four, by medians of three."""
    for _ in range(2):
        seconds(model, 32, 4, **options)
    turns = [[seconds(model, 32, new, **options) for new in (4, count)] for _ in range(3)]
    short, long = (statistics.median(taken) for taken in zip(*turns, strict=True))
    return (count - 4) / (long - short)


def nf4(folder: Path, skipped: list[str] | None = None) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_use_double_quant=quant(folder) == "nf4-dq",
                              bnb_4bit_compute_dtype=torch.bfloat16,
                              llm_int8_enable_fp32_cpu_offload=True,
                              llm_int8_skip_modules=skipped)  # fmt: skip


def quant(folder: Path) -> str:
    return (folder / "quant").read_text()


def stock(
    folder: Path, where: Any, quantized: bool = True, skipped: list[str] | None = None
) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"quantization_config": nf4(folder, skipped)} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.bfloat16, device_map=where, **options
    ).eval()


def all_on_cpu(folder: Path) -> dict[str, Any]:
    """All decoder layers in RAM, the rest on the GPU."""
    count = json.loads((folder / "base" / "config.json").read_text())["num_hidden_layers"]
    return {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0,
            **{f"model.layers.{number}": "cpu" for number in range(count)}}  # fmt: skip


Way = Callable[[Path, dict[str, Any]], None]


def resident(folder: Path, found: dict[str, Any]) -> None:
    from peft import PeftModel

    start = time.perf_counter()
    model = stock(folder, {"": 0})
    base = time.perf_counter() - start
    torch.save(logits(model), folder / "nf4.pt")
    start = time.perf_counter()
    model = PeftModel.from_pretrained(model, folder / "lora")
    found["load_s"] = base + time.perf_counter() - start
    torch.save(logits(model), folder / "nf4+lora.pt")
    found |= measure(model, 40)
    found["peak"] = torch.cuda.max_memory_allocated()


def sixteen_bits(folder: Path, found: dict[str, Any]) -> None:
    start = time.perf_counter()
    model = stock(folder, {"": 0}, quantized=False)
    found["load_s"] = time.perf_counter() - start
    torch.save(logits(model), folder / "bf16.pt")
    found |= measure(model, 40)
    found["peak"] = torch.cuda.max_memory_allocated()
    del model
    torch.cuda.empty_cache()
    # What accelerate's split computes: some layers in NF4, the others in 16 bits.
    away = [name for name, where in accelerated(folder).items() if where == "cpu"]
    torch.save(logits(stock(folder, {"": 0}, skipped=[*away, "lm_head"])), folder / "mixed.pt")


def compiled(folder: Path, found: dict[str, Any]) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(stock(folder, {"": 0}), folder / "lora")
    gate(found, model, folder / "nf4+lora.pt", 0.01)
    base = model.get_base_model()
    base.forward = torch.compile(base.forward)
    options = {"cache_implementation": "static", "max_length": None, "disable_compile": True}
    start = time.perf_counter()
    seconds(model, 32, 4, **options)
    seconds(model, 32, 4, **options)
    found["compile_s"] = time.perf_counter() - start
    short = seconds(model, 32, 4, **options)
    found["tokens_per_second"] = 36 / (seconds(model, 32, 40, **options) - short)
    found["peak"] = torch.cuda.max_memory_allocated()


def static(folder: Path, found: dict[str, Any]) -> None:
    """As transformers does it when asked for a static cache: it compiles what its quantizer says
    can be compiled, and bitsandbytes' does not say so."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(stock(folder, {"": 0}), folder / "lora")
    gate(found, model, folder / "nf4+lora.pt", 0.01)
    found["compiles"] = model.get_base_model().hf_quantizer.is_compileable
    found |= measure(model, 40, cache_implementation="static")
    found["peak"] = torch.cuda.max_memory_allocated()


def accelerated(folder: Path) -> dict[str, Any]:
    """As many layers on the GPU, in NF4, as take what trimtab's slots, adapter and cache take; the
    others in RAM, in 16 bits, as bitsandbytes leaves what is not on a GPU."""
    where = all_on_cpu(folder)
    away = [name for name, device in where.items() if device == "cpu"]
    return where | dict.fromkeys(away[: 6 * len(away) // 32], 0)


def accelerate(folder: Path, found: dict[str, Any]) -> None:
    start = time.perf_counter()
    model = stock(folder, accelerated(folder))
    found["load_s"] = time.perf_counter() - start
    gate(found, model, folder / "mixed.pt", 0.01)
    seconds(model, 32, 1)
    torch.cuda.reset_peak_memory_stats()
    short = seconds(model, 32, 1)
    found["tokens_per_second"] = 5 / (seconds(model, 32, 6) - short)
    found["prefill_s"] = seconds(model, LONG, 1)
    found["peak"] = torch.cuda.max_memory_allocated()


def diffusers(folder: Path, found: dict[str, Any]) -> None:
    from diffusers.hooks import apply_group_offloading

    start = time.perf_counter()
    model = stock(folder, {"": 0})
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    apply_group_offloading(model.model.layers, onload_device=gpu, offload_device=cpu,
                           offload_type="leaf_level", use_stream=True)  # fmt: skip
    found["load_s"] = time.perf_counter() - start
    gate(found, model, folder / "nf4.pt", 0.01)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found |= measure(model, 24)
    found["peak"] = torch.cuda.max_memory_allocated()


def mmgp(folder: Path, found: dict[str, Any]) -> None:
    start = time.perf_counter()
    model = stock(folder, "cpu", quantized=False)
    from mmgp import offload  # it replaces what transformers loads with

    offload.all({"transformer": model}, pinnedMemory=True, quantizeTransformer=True,
                budgets={"transformer": MMGP_BUDGET}, verboseLevel=0)  # fmt: skip
    found["load_s"] = time.perf_counter() - start
    gate(found, model, folder / "bf16.pt", 0.1)
    torch.cuda.reset_peak_memory_stats()
    found |= measure(model, 16)
    found["peak"] = torch.cuda.max_memory_allocated()


def mapped(share: str) -> Callable[[Path], Any]:
    """A plan with all, every second or no decoder layer away, and all else on the GPU."""
    step = {"resident": 0, "half": 2, "all": 1}[share]

    def made(folder: Path) -> Any:
        names = [name for name, where in all_on_cpu(folder).items() if where == "cpu"]
        away = dict.fromkeys(names[::step] if step else (), "cpu")
        return planned(folder, "100GiB", device_map={"": 0, **away})

    return made


def as_much_as(peer: str) -> Callable[[Path], Any]:
    """A plan for as much memory as a peer took, the prompt of 2,048 tokens included."""

    def made(folder: Path) -> Any:
        from trimtab.hardware import CUDA_CONTEXT

        return planned(folder, peaks(folder)[peer] + CUDA_CONTEXT)

    return made


def planned(folder: Path, gpu: str | int, **options: Any) -> Any:
    from trimtab.api import plan

    return plan(folder / "base", {"a": folder / "lora"}, quant=quant(folder), gpu=gpu, cpu="60GiB",
                context=CONTEXT, **options)  # fmt: skip


def peaks(folder: Path) -> dict[str, int]:
    """Bytes on the GPU, of the ways that are done."""
    found: dict[str, int] = json.loads((folder / "peaks.json").read_text())
    return found


def trimtab(plan_of: Callable[[Path], Any]) -> Way:
    def way(folder: Path, found: dict[str, Any]) -> None:
        from trimtab.api import load

        made = plan_of(folder)
        start = time.perf_counter()
        with load(made) as placed:
            found["load_s"] = time.perf_counter() - start
            gate(found, placed.model, folder / "nf4+lora.pt", 0.01)
            found |= measure(placed.model, 64)
            found["peak"] = torch.cuda.max_memory_allocated()
            tokens, kept = with_logits(placed.model, prompt(32), EQUAL)
            found["tokens"] = tokens
            found["logits"] = kept.digest()
            with placed.using(None):
                found["without_adapter"] = rate(placed.model, 64)
            found["planned"] = made.totals["gpu:0"] - made.costs["context"]
            found["forecast"] = made.forecast.tokens_per_second
            found["streamed"] = sum(unit.moving_bytes for unit in made.of_mode("streamed"))
            found["units"] = len(made.of_mode("streamed"))
            found["steps"] = {"captured": placed.steps.captured, "replayed": placed.steps.replayed,
                              "refusals": dict(placed.steps.refusals)}  # fmt: skip

    return way


ACCELERATE = "accelerate, 26 layers of 32 (or as many of fewer) on cpu, no adapter"
DIFFUSERS = "diffusers group offload, leaf, stream, no adapter"
BESIDE = {
    "trimtab, in as much memory as accelerate": ACCELERATE,
    "trimtab, in as much memory as diffusers": DIFFUSERS,
}

WAYS: dict[str, Way] = {
    "transformers, all on the GPU": resident,
    "transformers, 16 bits, all on the GPU, no adapter": sixteen_bits,
    "trimtab, resident": trimtab(mapped("resident")),
    "trimtab, half streamed": trimtab(mapped("half")),
    "trimtab, all streamed": trimtab(mapped("all")),
    ACCELERATE: accelerate,
    DIFFUSERS: diffusers,
    **{name: trimtab(as_much_as(peer)) for name, peer in BESIDE.items()},
    "transformers, all on the GPU, static cache": static,
    "mmgp, int8, no adapter": mmgp,
    "transformers, all on the GPU, static cache, torch.compile": compiled,
}
"""The first two write what the others are compared with; the last may not be done in time."""


def gate(found: dict[str, Any], model: Any, reference: Path, most: float) -> None:
    theirs = torch.load(reference)
    found["error"] = float((logits(model) - theirs).norm() / theirs.norm())
    if found["error"] > most:
        raise AssertionError(f"logits are {found['error']:.3f} from the reference")


def start() -> None:
    """All is imported and the GPU runs, so that loading is measured and not that."""
    import accelerate
    import bitsandbytes
    import peft
    from transformers import LlamaForCausalLM

    import trimtab.place

    assert all((accelerate, bitsandbytes, peft, LlamaForCausalLM, trimtab.place))
    torch.zeros(1, device="cuda")


def in_a_process(name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--way", name, "--folder", str(folder)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {SECONDS} s"}
    for line in ran.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    return {"failed": ran.stderr.strip().splitlines()[-1:], "trace": ran.stderr[-1500:]}


def floors(found: dict[str, Any]) -> None:
    """Adds what the link allows, and what each of trimtab's ways reaches of it.

    The link is measured before each way, and its median counts: on a server others use it too.
    """
    found["link_gbps"] = statistics.median(found["links"])
    ways = found["ways"]
    resident = ways.get("trimtab, resident", {})
    for name, one in ways.items():
        if not one.get("streamed") or "prefill_s" not in resident:
            continue
        link = one["streamed"] / found["link_gbps"] / 1e9
        one["equal"] = all(one[key] == resident[key] for key in ("tokens", "logits"))
        one["share"] = one["tokens_per_second"] * max(link, 1 / resident["tokens_per_second"])
        one["prefill_ratio"] = one["prefill_s"] / max(link, resident["prefill_s"])
        if peer := ways.get(BESIDE.get(name), {}).get("tokens_per_second"):
            one["times_the_peer"] = one["tokens_per_second"] / peer


def main() -> None:
    from trimtab.hardware import measured_link_gbps

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--only", default="", help="a regular expression: ways by name")
    parser.add_argument("--way")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.way:
        one: dict[str, Any] = {}
        start()
        WAYS[given.way](given.folder, one)
        print("\nRESULT " + json.dumps(one))
        return
    found: dict[str, Any] = {
        "machine": f"one {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "shape": f"Llama 8B shape, {given.layers} layers, random weights, {given.quant}, LoRA r=16 "
        "on all linears, batch 1",
        "links": [],
        "ways": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = shapes.llama_config(**{**shapes.LLAMA_8B, "num_hidden_layers": given.layers})
        shapes.write_checkpoint(config, folder / "base", device="cuda")
        shapes.write_adapter(config, folder / "lora")
        (folder / "quant").write_text(given.quant)
        torch.cuda.empty_cache()
        for name in (name for name in WAYS if re.search(given.only, name)):
            found["links"].append(measured_link_gbps.__wrapped__())
            found["ways"][name] = one = in_a_process(name, folder)
            print(name, {k: v for k, v in one.items() if k != "steps"}, flush=True)
            done = {way: told["peak"] for way, told in found["ways"].items() if "peak" in told}
            (folder / "peaks.json").write_text(json.dumps(done))
            if given.out:
                given.out.write_text(json.dumps(found, indent=1))
    floors(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
