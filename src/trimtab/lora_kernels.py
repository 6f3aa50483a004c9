"""The products of a LoRA as Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trimtab.lora import Lora

WIDTH = 2048
"""Inputs that a program of the first product takes at a time."""

ROWS = 64
"""Outputs of a program of the second."""


@triton.jit  # type: ignore[untyped-decorator]
def _down(x, weight, out, width, rank, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[token, row] = weight[row, :] . x[token, :], a program for each."""
    row, token = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        inside = at < width
        left = tl.load(x + token * width + at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(weight + row * width + at, mask=inside, other=0.0)
        total += left * right
    tl.store(out + token * rank + row, tl.sum(total))


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    base, down, weight, out, scale, width, rank,
    power: tl.constexpr, block: tl.constexpr, rounded: tl.constexpr,
):  # fmt: skip
    """out[token, n] = base[token, n] + scale * weight[n, :] . down[token, :].

    `power`: the power of two that is not below the rank.
    """
    at, token = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1)
    ranks = tl.arange(0, power)
    inside = at < width
    within = inside[:, None] & (ranks < rank)[None, :]
    rows = tl.load(weight + at[:, None] * rank + ranks[None, :], mask=within, other=0.0)
    left = tl.load(down + token * rank + ranks, mask=ranks < rank, other=0.0)
    added = tl.sum(rows * left[None, :], axis=1) * scale
    if rounded:
        added = added.to(out.dtype.element_ty).to(tl.float32)
    held = tl.load(base + token * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, (held + added).to(out.dtype.element_ty), mask=inside)


class Kernels:
    """`trimtab.lora.Products` on a CUDA device; the first product runs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device)

    def down(self, x: torch.Tensor, lora: Lora) -> torch.Tensor:
        rank, width = lora.down.shape
        tokens = x.numel() // width
        # Made on the main stream, which also lets it go: nobody has it while it is in use.
        out = torch.empty((tokens, rank), dtype=torch.float32, device=x.device)
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            kernel: Any = _down
            kernel[(rank, tokens)](x, lora.down, out, width, rank, block=WIDTH, num_warps=8)
        return out

    def add(self, base: torch.Tensor, down: torch.Tensor, lora: Lora) -> torch.Tensor:
        width, rank = lora.up.shape
        base = base.contiguous()
        out = torch.empty_like(base)
        torch.cuda.current_stream(self._device).wait_stream(self._beside)
        kernel: Any = _add
        kernel[(triton.cdiv(width, ROWS), base.numel() // width)](
            base, down, lora.up, out, lora.scale, width, rank,
            power=triton.next_power_of_2(rank), block=ROWS, rounded=lora.rounded, num_warps=4,
        )  # fmt: skip
        return out
