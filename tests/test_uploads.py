"""Copies to a GPU through pinned memory: the same bits, in order, only where that is of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from placing import AWAY, placed
from trimtab import store, uploads
from trimtab.uploads import Through, uploading

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)

MANY = {
    "flat": torch.arange(1000, dtype=torch.int16),
    "matrix": torch.randn(33, 41, dtype=torch.bfloat16),
    "one": torch.tensor(3.5),
    "flags": torch.arange(77) % 3 == 0,
    "nothing": torch.empty(0, 4),
    "a part": torch.arange(64, dtype=torch.uint8),
    "not numbers": torch.full((50,), torch.nan),
}


class Event:
    """Tells when it is waited for."""

    def __init__(self, said: list[tuple[str, int]], number: int) -> None:
        self._said = said
        self._number = number

    def synchronize(self) -> None:
        self._said.append(("waited", self._number))


class Device:
    """Marks as a GPU does, and keeps what was said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self._count = 0

    def mark(self) -> Event:
        self._count += 1
        self.said.append(("copied", self._count))
        return Event(self.said, self._count)


def through(device: Device, size: int = 64, count: int = 2) -> Through:
    return Through([torch.zeros(size, dtype=torch.uint8) for _ in range(count)], device.mark)


def bits(tensor: torch.Tensor) -> bytes:
    flat: bytes = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return flat


@pytest.mark.parametrize("name", MANY)
def test_a_copy_has_the_same_bits_and_its_own_memory(name: str) -> None:
    given = MANY[name]
    made = through(Device()).copy(given, CPU)
    assert made.shape == given.shape
    assert made.dtype == given.dtype
    assert bits(made) == bits(given)
    assert made.numel() == 0 or made.data_ptr() != given.data_ptr()


def test_a_buffer_is_written_to_again_when_its_copy_is_done() -> None:
    device = Device()
    copies = through(device)
    copies.copy(torch.zeros(64 * 3, dtype=torch.uint8), CPU)
    copies.copy(torch.zeros(64, dtype=torch.uint8), CPU)
    assert device.said == [
        ("copied", 1), ("copied", 2), ("waited", 1), ("copied", 3), ("waited", 2), ("copied", 4),
    ]  # fmt: skip


def test_on_a_cpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "LEAST", 0)
    given = torch.arange(10)
    with uploading(CPU):
        assert given.to("cpu") is given
        assert torch.overrides._get_current_function_mode() is None


class Copies:
    """What goes through pinned memory, by shape; all of it counts as large."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        own = Through.copy

        def copy(through: Through, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            self.shapes.append(tuple(tensor.shape))
            return own(through, tensor, device)

        monkeypatch.setattr(Through, "copy", copy)
        monkeypatch.setattr(uploads, "LEAST", 1)
        monkeypatch.setattr(uploads, "PART", 4096)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("where", [0, "cuda", "cuda:0", GPU])
def test_copies_to_the_gpu_go_through(copies: Copies, where: Any) -> None:
    given = torch.randn(100, 100)
    with uploading(GPU):
        first, second = given.to(where), given.to(device=where, dtype=torch.float32)
    assert copies.shapes == [(100, 100)] * 2
    for one in (first, second):
        assert one.device == GPU
        assert bits(one) == bits(given)
    given.to(where)
    assert len(copies.shapes) == 2


@pytest.mark.gpu
def test_what_is_more_than_a_copy_is_left_to_torch(copies: Copies) -> None:
    given = torch.randn(100, 100)
    on_gpu = given.to(GPU)
    with uploading(GPU):
        assert given.to(GPU, torch.float64).dtype == torch.float64
        assert given.to(device=GPU, dtype=torch.float16).dtype == torch.float16
        assert torch.equal(given.t().to(GPU), on_gpu.t())
        assert on_gpu.to(GPU) is on_gpu
        assert on_gpu.to("cpu").device == CPU
        assert given.to(torch.float64).device == CPU
        assert given.to(on_gpu).device == GPU
        assert given.clone().requires_grad_().to(GPU).requires_grad
        assert type(torch.nn.Parameter(given).to(GPU)) is torch.Tensor
        assert torch.empty(0).to(GPU).device == GPU
    assert copies.shapes == []


@pytest.mark.gpu
def test_small_copies_are_left_to_torch(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "LEAST", 401)
    with uploading(GPU):
        torch.zeros(100).to(GPU)
        torch.zeros(101).to(GPU)
    assert copies.shapes == [(101,)]


@pytest.mark.gpu
def test_where_nothing_can_be_pinned_nothing_changes(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_pin", lambda buffer: False)
    given = torch.randn(100, 100)
    with uploading(GPU):
        assert bits(given.to(GPU)) == bits(given)
    assert copies.shapes == []


@pytest.mark.gpu
def test_a_gpu_that_is_behind_gets_what_was_given_and_without_events_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is far ahead: each copy comes after a kernel that sleeps."""
    parts = 8
    given = torch.arange(parts, dtype=torch.uint8).repeat_interleave(uploads.PART)

    def found() -> bool:
        with uploading(GPU):
            torch.cuda._sleep(200_000_000)
            return torch.equal(given.to(GPU).cpu(), given)

    assert found()

    class Never:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda.Stream, "record_event", lambda stream: Never())
    assert not found()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["resident", "all", "table"])
@pytest.mark.parametrize("quant", ["none", "nf4", "nf4-dq", "int8"])
def test_a_model_is_loaded_with_the_same_bits(copies: Copies, quant: str, where: str) -> None:
    folder = tiny.checkpoint("llama")
    given = tiny.inputs(folder, device="cuda")
    wanted = tiny.reference(folder, quant, device="cuda")(**given).logits
    with placed(folder, quant, AWAY[where], device="cuda") as placement:
        assert torch.equal(placement.model(**given).logits, wanted)
    assert len(copies.shapes) > 10


@pytest.mark.gpu
def test_what_was_saved_too(copies: Copies, tmp_path: Any) -> None:
    folder = tiny.checkpoint("llama")
    given = tiny.inputs(folder, device="cuda")
    with placed(folder, "nf4", AWAY["all"], device="cuda") as placement:
        wanted = placement.model(**given).logits
        placement.save_quantized(tmp_path / "saved")
    copies.shapes.clear()
    with placed(tmp_path / "saved", "auto", AWAY["all"], device="cuda") as placement:
        assert torch.equal(placement.model(**given).logits, wanted)
    assert len(copies.shapes) > 10
