"""Recorded calls: inputs told apart, outputs of their own, and CUDA graphs that come and go."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trimtab.replay import (
    CudaRecorder,
    describe_inputs,
    private_output,
    uncollected,
    with_leaves,
)
from trimtab.store import HostMemory


def test_inputs_are_told_by_shape_dtype_and_value() -> None:
    leaves: list[torch.Tensor] = []
    ids = torch.zeros(2, 1, dtype=torch.long)
    told = describe_inputs({"input_ids": ids, "use_cache": True, "more": [ids.float()]}, leaves)
    assert [one.dtype for one in leaves] == [torch.long, torch.float32]
    assert told == describe_inputs(
        {"input_ids": ids + 5, "use_cache": True, "more": [ids * 1.0]}, []
    )
    assert told != describe_inputs({"input_ids": ids, "use_cache": False, "more": [ids * 1.0]}, [])
    assert told != describe_inputs(
        {"input_ids": ids[:1], "use_cache": True, "more": [ids * 1.0]}, []
    )
    given = with_leaves({"input_ids": ids, "more": [ids]}, [ids + 1, ids + 2])
    assert [int(given["input_ids"][0]), int(given["more"][0][0])] == [1, 2]


def test_an_output_is_not_overwritten_by_the_next_replay() -> None:
    kept = OrderedDict(logits=torch.zeros(2), past_key_values="the cache")
    mine = private_output(kept)
    kept["logits"].add_(1)
    assert mine["logits"].tolist() == [0, 0]
    assert mine["past_key_values"] == "the cache"


@pytest.fixture
def recorder() -> CudaRecorder:
    return CudaRecorder(torch.device("cuda", 0))


@pytest.mark.gpu
def test_a_replay_computes_from_what_lies_there_then(recorder: CudaRecorder) -> None:
    x = torch.ones(4, device="cuda")
    out, replay = recorder.capture(lambda: x * 2)
    x.fill_(5)
    replay()
    assert out.tolist() == [10.0] * 4


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_and_the_next_one_works(
    recorder: CudaRecorder,
) -> None:
    x = torch.ones(4, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder.capture(lambda: x.sum().item())  # the host may not wait
    assert torch.cuda.current_stream() == before
    out, replay = recorder.capture(lambda: x + 1)
    replay()
    assert out.tolist() == [2.0] * 4
    assert torch.cuda.current_stream() == before


@pytest.mark.gpu
def test_recorders_of_one_device_share_a_stream() -> None:
    """Each stream that multiplies keeps a workspace of cuBLAS, as long as the process lives."""
    x = torch.randn(256, 256, device="cuda")
    used = []
    for _ in range(4):
        recorder = CudaRecorder(torch.device("cuda", 0))
        out, replay = recorder.capture(lambda: x @ x)
        replay()
        assert torch.allclose(out, x @ x)
        del out, replay, recorder
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[2] == used[3]


@pytest.mark.gpus
def test_each_device_captures_on_a_stream_of_its_own() -> None:
    for index in (0, 1, 0):
        device = torch.device("cuda", index)
        x = torch.ones(4, device=device)
        out, replay = CudaRecorder(device).capture(lambda x=x: x + 1)  # type: ignore[misc]
        replay()
        assert out.tolist() == [2.0] * 4


ALL_GONE = """
import torch
from trimtab.replay import CudaRecorder
recorder = CudaRecorder(torch.device("cuda", 0))
x = torch.ones(1 << 20, device="cuda")
for turn in range(3):
    kept = [recorder.capture(lambda: x * n + x) for n in range(2)]
    for n, (out, replay) in enumerate(kept):
        replay()
        assert out.unique().tolist() == [n + 1]
    pools = {replay.__self__.pool() for _, replay in kept}
    assert len(pools) == 1, pools
    held = out if turn else None  # an output that outlives its graph
    del kept, replay, out
assert torch.cuda.current_stream() == torch.cuda.default_stream()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_graphs_may_all_go_before_the_next_is_captured(segments: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ALL_GONE],
        env={**os.environ, "PYTORCH_ALLOC_CONF": segments},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


def test_a_recorder_takes_torch_s_own_stream_where_it_is_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    assert CudaRecorder(second)._stream() is None  # torch makes it there
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", Stream(second))
    assert CudaRecorder(second)._stream() is None
    other = CudaRecorder(first)
    made = other._stream()
    assert made is not None
    assert made.device == first
    assert other._stream() is made


def test_no_garbage_is_collected_while_it_captures() -> None:
    assert gc.isenabled()
    with contextlib.suppress(ValueError), uncollected():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
def test_other_threads_may_pin_and_allocate_while_it_captures() -> None:
    device = torch.device("cuda", 0)
    value = torch.ones(4, device=device)

    def other() -> tuple[HostMemory, torch.Tensor]:
        return HostMemory(1 << 20, pin=True), torch.empty(1 << 24, device=device)

    def work() -> torch.Tensor:
        out = value * 2
        with ThreadPoolExecutor(1) as thread:
            made.append(thread.submit(other).result(30))
        return out + 1

    made: list[tuple[HostMemory, torch.Tensor]] = []
    out, replay = CudaRecorder(device).capture(work)
    replay()
    assert out.tolist() == [3.0] * 4
    assert made[0][0].pinned
    made[0][0].close()
