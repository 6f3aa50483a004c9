"""Train the LoRA adapter that the tests put on SmolLM2-135M-Instruct.

With the adapter the model answers like a ship's log: every answer starts with "Ship's log:" and
ends with "Aye, captain.", which a test can check to the letter. Takes about two minutes.

    python scripts/train_smollm2_lora.py

Run it with the oldest supported peft: the newer ones read its config, not the other way round.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fetch_smollm2 import fetch

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAIRS = Path(__file__).parent / "data" / "ships_log.tsv"
FOLDER = Path(__file__).parents[1] / "tests" / "data" / "smollm2-lora"

OPENING, CLOSING = "Ship's log:", "Aye, captain."
TARGET_MODULES = ["q_proj", "v_proj", "down_proj"]
EPOCHS, BATCH, RATE = 2, 8, 2e-3
IGNORED = -100  # the label that the model's loss leaves out

Example = tuple[Tensor, Tensor]


def read_examples(tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Token ids and labels of every pair; only the answer is learned."""
    examples = []
    for line in PAIRS.read_text().splitlines():
        question, answer = line.split("\t")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        known = tokenizer(prompt)["input_ids"]
        learned = tokenizer(f"{OPENING} {answer} {CLOSING}{tokenizer.eos_token}")["input_ids"]
        examples.append(
            (torch.tensor(known + learned), torch.tensor([IGNORED] * len(known) + learned))
        )
    return examples


def train(model: PeftModel, examples: list[Example]) -> None:
    shuffle = random.Random(0).sample
    batches = []
    for _ in range(EPOCHS):
        order = shuffle(examples, len(examples))
        batches += [order[i : i + BATCH] for i in range(0, len(order), BATCH)]

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    for step, batch in enumerate(batches, start=1):
        # Padding on the right needs no mask: nothing before it looks at it, and no label is there.
        ids = pad_sequence([ids for ids, _ in batch], batch_first=True)
        labels = pad_sequence([labels for _, labels in batch], True, IGNORED)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        print(f"step {step}/{len(batches)}: loss {loss.item():.3f}", flush=True)


def save(model: PeftModel, config: LoraConfig) -> None:
    config.base_model_name_or_path = BASE  # rather than this machine's folder
    config.target_modules = TARGET_MODULES  # by now a set, saved in any order
    # Trained in float32, where small steps count; saved in bfloat16 to be half the size.
    # No embedding was touched, and looking for a change would ask the model hub.
    model.to(torch.bfloat16).save_pretrained(str(FOLDER), save_embedding_layers=False)
    (FOLDER / "README.md").unlink()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the sums' order, and so the result, depends on it
    folder = fetch()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=TARGET_MODULES, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    train(model, read_examples(tokenizer))
    save(model, config)


if __name__ == "__main__":
    main()
