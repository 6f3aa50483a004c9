"""Ask the saved model, loaded as a user loads it."""

from pathlib import Path

import bitsandbytes
import torch
from peft import PeftModel
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from demo_training.sums import Sum

FORMATS = ("bf16", "nf4", "nf4-dq")
BATCH = 256
Model = PreTrainedModel | PeftModel


def load(base: Path, storage: str, adapter: Path | None = None) -> Model:
    """The base in one of `FORMATS`, with the adapter if one is given."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=storage == "nf4-dq",
    )
    model, info = AutoModelForImageTextToText.from_pretrained(
        base,
        dtype=torch.bfloat16,
        device_map="cpu",
        quantization_config=None if storage == "bf16" else settings,
        output_loading_info=True,
    )
    wrong = {what: keys for what, keys in info.items() if keys}
    if wrong:
        raise RuntimeError(f"the checkpoint does not match the model: {wrong}")
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # On CPUs with AVX512-BF16 the first forward would repack the weight, lossily.
            module.support_avx512bf16_for_cpu = False
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


def ask(model: Model, folder: Path, questions: list[str]) -> list[str]:
    """The greedy answers to chats of one message each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for start in range(0, len(questions), BATCH):
        prompt = tokenizer.apply_chat_template(
            [[{"role": "user", "content": text}] for text in questions[start : start + BATCH]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            tokens = model.generate(**prompt)
        new = tokens[:, prompt["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new, skip_special_tokens=True)
    return answers


def right(
    base: Path, storage: str, sums: list[Sum], language: str, adapter: Path | None = None
) -> list[bool]:
    """Which of the sums the model answers to the letter."""
    answers = ask(load(base, storage, adapter), base, [item.question for item in sums])
    expected = [getattr(item, language) for item in sums]
    return [answer == text for answer, text in zip(answers, expected, strict=True)]
