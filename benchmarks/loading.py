"""Seconds of loading: 16-bit weights to NF4, and the saved NF4 form, against reading the files.

    python benchmarks/loading.py --layers 16 --out benchmarks/results/loading-MACHINE.json

Each loader runs in a process of its own, everything imported and the GPU started before its clock:
once with the files thrown out of the page cache (cold), then again (warm). Correctness comes first:
the logits of every load have the same bits. `--tiny` runs all of it on a CPU, to check the code.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

CASES = (
    "stock base resident", "trimtab base all", "stock saved resident", "trimtab saved all",
    "trimtab base resident", "trimtab saved resident", "trimtab base half", "trimtab saved half",
)  # fmt: skip
"""Who loads, what, and which layers are streamed. In order of interest, for `--seconds` may end
them."""

TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def throw_out(folder: Path) -> None:
    """The files leave the page cache, where the system lets them."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Seconds of reading the files from the first byte to the last."""
    buffer = bytearray(16 * 2**20)
    start = time.perf_counter()
    for path in files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def map_of(layers: int, share: str, tiny: bool) -> dict[str, Any]:
    """A device map with all, every second or none of the decoder layers away."""
    step = {"resident": 0, "half": 2, "all": 1}[share]
    away = range(0, layers, step) if step else ()
    return {"": "cpu" if tiny else 0, **{f"model.layers.{i}": "disk" if tiny else "cpu"
                                         for i in away}}  # fmt: skip


class Trimtab:
    def __init__(self, folder: Path, share: str, layers: int, tiny: bool) -> None:
        from trimtab.api import load, plan

        start = time.perf_counter()
        self.made = plan(folder, quant="nf4" if folder.name == "base" else "auto", context=128,
                         device_map=map_of(layers, share, tiny),
                         **({"cpu": "4GiB", "disk": "4GiB"} if tiny
                            else {"gpu": "100GiB", "cpu": "60GiB"}))  # fmt: skip
        self.plan_s = time.perf_counter() - start
        self._load = load

    def load(self) -> Any:
        self.placed = self._load(self.made)
        return self.placed.model

    def close(self) -> None:
        self.placed.close()


class Stock:
    plan_s = 0.0

    def __init__(self, folder: Path, share: str, layers: int, tiny: bool) -> None:
        self.folder, self.device = folder, "cpu" if tiny else 0

    def load(self) -> Any:
        import torch
        from transformers import BitsAndBytesConfig, LlamaForCausalLM

        from trimtab import foreign

        asked: dict[str, Any] = {}
        if self.folder.name == "base":
            asked["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
        model = LlamaForCausalLM.from_pretrained(
            self.folder, dtype=torch.bfloat16, device_map={"": self.device}, **asked
        )
        foreign.keep_four_bit_unpacked(model)
        return model

    def close(self) -> None:
        pass


def digest(model: Any) -> str:
    """Of the logits of a fixed prompt."""
    import torch

    ids = torch.arange(3, 35).reshape(1, -1).to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float().cpu()
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def one(case: str, root: Path, layers: int, tiny: bool) -> dict[str, Any]:
    """A case in this process: seconds cold and warm, and the digest of what was loaded."""
    import bitsandbytes  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import trimtab.place  # noqa: F401

    if not tiny:
        torch.zeros(1, device="cuda")
    who, what, share = case.split()
    folder = root / what
    loader = {"trimtab": Trimtab, "stock": Stock}[who](folder, share, layers, tiny)
    found: dict[str, Any] = {"plan_s": loader.plan_s}
    for state in ("cold", "warm"):
        if state == "cold":
            throw_out(folder)
        start = time.perf_counter()
        model = loader.load()
        if not tiny:
            torch.cuda.synchronize()
        found[state] = time.perf_counter() - start
        found.setdefault("digest", digest(model))
        if not tiny:
            found["peak"] = torch.cuda.max_memory_allocated()
        if state == "warm" and case == "trimtab base all":
            start = time.perf_counter()
            loader.placed.save_quantized(root / "saved")
            found["save"] = time.perf_counter() - start
        loader.close()
        del model
        gc.collect()
        if not tiny:
            torch.cuda.empty_cache()
    return found


def elsewhere(case: str, root: Path, layers: int, tiny: bool) -> dict[str, Any]:
    """The same in a process of its own."""
    asked = [sys.executable, __file__, "--case", case, "--root", str(root), "--layers", str(layers)]
    done = subprocess.run(asked + ["--tiny"] * tiny, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(root: Path, layers: int, tiny: bool, until: float) -> dict[str, Any]:
    found: dict[str, Any] = {"loads": {}, "read": {}}
    for case in CASES:
        if time.monotonic() > until:
            found["loads"][case] = {"skipped": "no time was left"}
            continue
        what = case.split()[1]
        if what not in found["read"]:
            throw_out(root / what)
            reads = {"cold": read(root / what), "warm": read(root / what)}
            reads["bytes"] = sum(one.stat().st_size for one in files(root / what))
            found["read"][what] = reads
        print(case, json.dumps(told := elsewhere(case, root, layers, tiny)), flush=True)
        found["loads"][case] = told
    return found


def judge(found: dict[str, Any]) -> None:
    """Adds the shares of transformers' load and of the plain read, and whether all are equal."""
    done = {case: told for case, told in found["loads"].items() if "digest" in told}
    found["equal"] = len({told["digest"] for told in done.values()}) == 1
    stock = done.get("stock base resident", {})
    for case, told in done.items():
        who, what, _ = case.split()
        for state in ("cold", "warm"):
            told[f"{state}_of_read"] = told[state] / found["read"][what][state]
            if stock and who == "trimtab" and what == "base":
                told[f"{state}_of_stock"] = told[state] / stock[state]
    for what, told in found["read"].items():
        for state in ("cold", "warm"):
            told[f"{state}_gbps"] = told["bytes"] / told[state] / 1e9
        print(what, json.dumps(told))
    for case, told in done.items():
        print(f"{case:24}", {key: round(value, 2) for key, value in told.items()
                             if isinstance(value, float)})  # fmt: skip
    print("logits of all loads equal:", found["equal"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", help="where the files lie; default: a temporary folder")
    parser.add_argument("--seconds", type=float, default=140, help="no case begins later")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(one(given.case, given.root, given.layers, given.tiny)))
        return
    until = time.monotonic() + given.seconds

    import shapes
    import torch

    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        root = Path(temporary)
        shape = TINY if given.tiny else shapes.LLAMA_8B
        config = shapes.llama_config(**{**shape, "num_hidden_layers": given.layers})
        start = time.perf_counter()
        shapes.write_checkpoint(config, root / "base", device="cpu" if given.tiny else "cuda")
        print(f"checkpoint written in {time.perf_counter() - start:.1f} s", flush=True)
        if not given.tiny:
            torch.cuda.empty_cache()
        found = measured(root, given.layers, given.tiny, until)
    name = "a CPU" if given.tiny else f"one {torch.cuda.get_device_name()}"
    found = {"machine": f"{name}, torch {torch.__version__}", "layers": given.layers, **found}
    judge(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
