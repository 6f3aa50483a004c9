"""Training the base on English answers, then the adapter on French ones."""

import itertools
import math
import random
from collections.abc import Iterator

import bitsandbytes.functional as bnb
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Gemma4ForConditionalGeneration, PreTrainedTokenizerFast

from demo_training.sums import Sum
from demo_training.tokens import ID

IGNORED = -100
BATCH_TURNS = 64
# Some sequences hold several exchanges, so that a chat may go on.
EXCHANGES = (1, 1, 2, 4)
# `language_model.layers` keeps the adapter off the towers, whose linears have the same names.
ADAPTER_TARGETS = (
    r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
)
Batch = dict[str, Tensor]
Exchange = tuple[list[int], list[int]]


class FakeQuantized(nn.Module):
    """A weight as it comes back from NF4; its gradient passes straight through."""

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            difference = nf4(weight, double=False) - weight
        return weight + difference


def nf4(weight: Tensor, double: bool) -> Tensor:
    """The weight after a trip through bitsandbytes' NF4, with or without double quantization."""
    packed, state = bnb.quantize_4bit(
        weight.bfloat16().contiguous(), quant_type="nf4", compress_statistics=double
    )
    return bnb.dequantize_4bit(packed, state).to(weight.dtype)


def train_base(
    model: Gemma4ForConditionalGeneration, batches: Iterator[Batch], steps: int, quantized: int
) -> None:
    """Train all of the model; for the last `quantized` steps through its weights in NF4."""
    model.train()
    text = model.model.language_model
    text.requires_grad_(True)
    trained = [*text.parameters()]
    for number, loss in enumerate(_optimize(model, trained, batches, steps, peak=2e-3)):
        if number == steps - quantized:
            for linear in quantizable(model):
                parametrize.register_parametrization(linear, "weight", FakeQuantized())
        _log("base", number, loss)
    for linear in quantizable(model):
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
    model.to(torch.bfloat16).eval()


def train_adapter(
    base: Gemma4ForConditionalGeneration, batches: Iterator[Batch], steps: int, seed: int
) -> PeftModel:
    """Train a LoRA on a frozen base that changes between its three storage formats."""
    torch.manual_seed(seed)
    linears = quantizable(base)
    exact = [linear.weight.detach().clone() for linear in linears]
    formats = [exact, *([nf4(weight, double) for weight in exact] for double in (False, True))]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTER_TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number, loss in enumerate(_optimize(model, trained, batches, steps, peak=5e-3)):
        _log("adapter", number, loss)
        for linear, weight in zip(linears, formats[number % len(formats)], strict=True):
            linear.weight.data.copy_(weight)
    for linear, weight in zip(linears, exact, strict=True):
        linear.weight.data.copy_(weight)
    return model.eval()


def quantizable(model: Gemma4ForConditionalGeneration) -> list[nn.Linear]:
    """The language model's linears; the head is tied to the embedding and stays in 16 bits."""
    modules = model.model.language_model.modules()
    return [module for module in modules if isinstance(module, nn.Linear)]


def batches(
    tokenizer: PreTrainedTokenizerFast, sums: list[Sum], language: str, seed: int
) -> Iterator[Batch]:
    """Endless shuffled batches of `BATCH_TURNS` exchanges each."""
    draw = random.Random(seed)
    exchanges = [_encode(tokenizer, item.question, getattr(item, language)) for item in sums]
    while True:
        draw.shuffle(exchanges)
        for start in range(0, len(exchanges), BATCH_TURNS):
            chunk = exchanges[start : start + BATCH_TURNS]
            length = draw.choice(EXCHANGES)
            yield _pad([chunk[i : i + length] for i in range(0, len(chunk), length)])


def _encode(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> Exchange:
    """Token ids and labels of one exchange, without the token that opens a chat."""
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    asked = prompt["input_ids"][1:]
    answered = [*tokenizer(answer, add_special_tokens=False)["input_ids"], ID["<turn|>"]]
    return asked + answered, [IGNORED] * len(asked) + answered


def _pad(chats: list[list[Exchange]]) -> Batch:
    ids = [[ID["<bos>"], *itertools.chain(*(ids for ids, _ in chat))] for chat in chats]
    labels = [[IGNORED, *itertools.chain(*(labels for _, labels in chat))] for chat in chats]
    width = max(map(len, ids))

    def filled(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    return {
        "input_ids": filled(ids, ID["<pad>"]),
        "attention_mask": filled([[1] * len(row) for row in ids], 0),
        "labels": filled(labels, IGNORED),
    }


def _optimize(
    model: nn.Module, trained: list[nn.Parameter], batches: Iterator[Batch], steps: int, peak: float
) -> Iterator[float]:
    """Take `steps` steps of AdamW, warmed up and then let down along a cosine; yield the losses."""
    optimizer = torch.optim.AdamW(trained, lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    warm = 100

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.51 + 0.49 * math.cos(math.pi * (step - warm) / (steps - warm))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for batch in itertools.islice(batches, steps):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def _log(what: str, number: int, loss: float) -> None:
    if number % 100 == 0:
        print(f"{what}: step {number}, loss {loss:.4f}", flush=True)
