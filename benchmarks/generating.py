"""Greedy decoding, timed, and what it computed."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch


def prompt(count: int, device: torch.device | str = "cuda", below: int = 1000) -> torch.Tensor:
    """Token ids [1, count], always the same."""
    generator = torch.Generator("cpu").manual_seed(0)
    # mmgp makes the GPU the default device.
    return torch.randint(1, below, (1, count), generator=generator, device="cpu").to(device)


def generate(model: Any, ids: torch.Tensor, count: int, **options: Any) -> tuple[list[int], float]:
    """`count` greedy tokens, and the seconds until they were known.

    What the device does after that, such as fetching ahead, is not waited for.
    """
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                             **options)  # fmt: skip
    tokens = out[0, ids.shape[1] :].tolist()
    return tokens, time.perf_counter() - start


class Logits:
    """A logits processor that keeps what it sees."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(scores.clone())
        return scores

    def digest(self) -> str:
        """A hash of all bits."""
        whole = torch.cat(self.rows).cpu().view(torch.uint8).numpy()
        return hashlib.sha256(whole.tobytes()).hexdigest()


def with_logits(
    model: Any, ids: torch.Tensor, count: int, **options: Any
) -> tuple[list[int], Logits]:
    """Greedy tokens, and the logits that each was taken from."""
    from transformers import LogitsProcessorList

    logits = Logits()
    tokens, _ = generate(
        model, ids, count, logits_processor=LogitsProcessorList([logits]), **options
    )
    return tokens, logits
