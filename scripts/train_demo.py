"""Make trimtab's demo: a tiny Gemma 4 that adds in English, and an adapter that answers in French.

    python scripts/train_demo.py [--out src/trimtab/demo]

Writes `base/`, `french/` and `sums.json` below the output folder and prints how many of the sums
that neither of the two has seen are answered to the letter, in 16 bits and in NF4. Needs the oldest
transformers that has Gemma 4 (5.5), since newer ones write a config that it cannot read. The same
versions on the same kind of CPU give the same files. A quarter of an hour on one core.

The towers are random, but they run. An image of 6 x 6 patches makes 4 soft tokens (3 x 3 patches
are pooled to one), 40 audio frames of 32 mel bins make 10 (two convolutions of stride 2):

    grid = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)      # (x, y), x fastest
    model(input_ids=...,                      # with 4 times config.image_token_id in it
          pixel_values=torch.rand(1, 36, 768),              # images, patches, 3 * 16 * 16
          image_position_ids=grid[None])                    # images, patches, 2; -1 is padding
    model(input_ids=...,                      # with 10 times config.audio_token_id in it
          input_features=torch.randn(1, 40, 32),            # clips, frames, mel bins
          input_features_mask=torch.ones(1, 40, dtype=torch.bool))
"""

import argparse
import json
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch

from demo_training.architecture import build_model
from demo_training.evaluation import FORMATS, right
from demo_training.sums import Sum, split
from demo_training.tokens import build_tokenizer
from demo_training.training import batches, train_adapter, train_base

SEED = 20
BASE_STEPS, QUANTIZED_STEPS, ADAPTER_STEPS = 2000, 600, 1200
SAMPLES = 40
NAME = "trimtab-demo"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and its French adapter.")
    parser.add_argument("--out", type=Path, default=Path("src/trimtab/demo"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    training, held_out = split(SEED)
    train(out, training)
    examine(out, held_out)


def train(out: Path, training: list[Sum]) -> None:
    """Train and save the base, then the adapter on it."""
    began = time.monotonic()
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(out / "base", save_jinja_files=False)
    model = build_model(SEED)
    train_base(model, batches(tokenizer, training, "english", SEED), BASE_STEPS, QUANTIZED_STEPS)
    model.save_pretrained(out / "base")
    print(f"base: trained in {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    model.float()
    french = batches(tokenizer, training, "french", SEED + 1)
    adapted = train_adapter(model, french, ADAPTER_STEPS, SEED)
    adapted.peft_config["default"].base_model_name_or_path = NAME
    adapted.to(torch.bfloat16).save_pretrained(out / "french", save_embedding_layers=False)
    (out / "french" / "README.md").unlink(missing_ok=True)
    print(f"adapter: trained in {time.monotonic() - began:.0f} s")


def examine(out: Path, held_out: list[Sum]) -> None:
    """Print the accuracies and keep a sample of the sums that every combination gets right."""
    always = [True] * len(held_out)
    for language, adapter in (("english", None), ("french", out / "french")):
        for storage in FORMATS:
            marks = right(out / "base", storage, held_out, language, adapter)
            print(f"{language}, {storage}: {sum(marks) / len(marks):.2%} of {len(marks)}")
            always = [before and now for before, now in zip(always, marks, strict=True)]
    known = [item for item, kept in zip(held_out, always, strict=True) if kept]
    sample = random.Random(SEED).sample(known, SAMPLES)
    text = json.dumps({"held_out": [asdict(item) for item in sample]}, indent=1, ensure_ascii=False)
    (out / "sums.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
