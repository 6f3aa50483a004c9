"""How fast a placement runs, against the floor that its link sets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.errors import RunningFault
from trimtab.hardware import measured_link_gbps
from trimtab.placement import Placement
from trimtab.plan import STREAMED

WARM_UP = 8
"""Tokens that are generated first: kernels are loaded, decode steps are captured."""


@dataclass(frozen=True)
class Bench:
    """Figures of one placement, batch 1.

    `link_gbps` is what streamed bytes come over, in 1e9 bytes a second: pinned memory to the GPU,
    or as a CPU's disk gives them now (its cache included). `floor` is the tokens per second that it
    allows, `share` what decoding reaches of it, `stall_ms` what a step takes above it for each
    streamed unit; all None where nothing is streamed. `switch_ms` is the host's time to make
    another adapter active. `steps` counts captured and replayed decode steps, and the reasons why
    others were not.
    """

    decode: float
    prefill: float
    load_seconds: float | None
    forecast: float
    streamed_bytes: int
    link_gbps: float | None
    floor: float | None
    share: float | None
    stall_ms: float | None
    switch_ms: float | None
    steps: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def bench(
    placed: Placement,
    *,
    prompt_tokens: int = 64,
    new_tokens: int = 32,
    load_seconds: float | None = None,
) -> Bench:
    """Measures a placement with random tokens, the active adapter on.

    Args:
        placed: the open placement.
        prompt_tokens: tokens of the prompt; prefill is measured with it.
        new_tokens: tokens of the answer, at least 2.
        load_seconds: what loading took, to be among the figures.

    Raises:
        RunningFault: TT606, if the planned context is too short.

    Example:
        >>> bench(placed).decode
        46.3
    """
    if new_tokens < 2:
        raise RunningFault(
            "TT607", "decoding is measured from the second token on", fix="ask for 2"
        )
    ids = torch.randint(10, 100, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    placed.check_length(ids, max(new_tokens, WARM_UP))
    _generate(placed, ids, WARM_UP)
    first = _generate(placed, ids, 1)
    step = max(_generate(placed, ids, new_tokens) - first, 1e-9) / (new_tokens - 1)
    units = placed.plan.of_mode(STREAMED)
    streamed = sum(unit.moving_bytes for unit in units)
    link = _link(placed) if streamed else None
    floor = link * 1e9 / streamed if link else None
    steps = placed.steps
    return Bench(
        decode=1 / step,
        prefill=prompt_tokens / first,
        load_seconds=load_seconds,
        forecast=placed.plan.forecast.tokens_per_second,
        streamed_bytes=streamed,
        link_gbps=link,
        floor=floor,
        share=1 / step / floor if floor else None,
        stall_ms=max(0.0, step - 1 / floor) * 1e3 / len(units) if floor else None,
        switch_ms=_switch(placed),
        steps={
            "captured": steps.captured,
            "replayed": steps.replayed,
            "refusals": dict(steps.refusals),
        },
    )


def _generate(placed: Placement, ids: torch.Tensor, count: int) -> float:
    """Seconds until `count` tokens are known; what is fetched ahead is not waited for."""
    if placed.device.type == "cuda":
        torch.cuda.synchronize(placed.device)
    start = time.perf_counter()
    with placed.running() as ran:
        out = placed.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
        )
        out.tolist()
        ran.tokens = count
    return time.perf_counter() - start


def _link(placed: Placement) -> float:
    if placed.device.type == "cuda":
        return measured_link_gbps()
    return placed.read_gbps()


def _switch(placed: Placement) -> float | None:
    """Milliseconds to make another adapter active, and back, halved; None with fewer than two."""
    if len(placed.adapters) < 2:
        return None
    before, other = placed.adapters[:2]
    with placed.using(before):
        start = time.perf_counter()
        with placed.using(other):
            pass
        return (time.perf_counter() - start) * 1e3 / 2
