"""One contract for every kind of slab."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tiny
from slabs import LAYOUT, WEIGHTS, bits, bring, contents, equal, fill
from trimtab import store
from trimtab.disk import DiskFolder, DiskSlab, Staging
from trimtab.errors import FormatFault
from trimtab.formats import ALIGNMENT
from trimtab.store import HostMemory, MemorySlab, Slab, SlabLayout

CPU = torch.device("cpu")
KINDS = ["memory", "disk"]


Make = Callable[[str], Slab]


@pytest.fixture
def make(folder: DiskFolder, device: str) -> Iterator[Make]:
    """Makes a slab of a kind for `device`; all are closed in the end."""
    made: list[Any] = []

    def one(kind: str) -> Slab:
        if kind == "memory":
            made.append(MemorySlab(LAYOUT, pin=device == "cuda"))
        else:
            staging = Staging(LAYOUT.nbytes, torch.device(device))
            made.extend([staging, DiskSlab(LAYOUT, folder, staging)])
        return made[-1]  # type: ignore[no-any-return]

    yield one
    for slab in reversed(made):
        slab.close()


devices = pytest.mark.parametrize("device", tiny.DEVICES)
kinds = pytest.mark.parametrize("kind", KINDS)

# ----------------------------------------------------------------------------------- the layout


def test_the_layout_is_exact_and_aligned() -> None:
    spans = [
        (weight, key, span.offset, span.nbytes)
        for weight, parts in LAYOUT.spans.items()
        for key, span in parts.items()
    ]
    assert spans == [
        ("a.weight", "data", 512, 42),
        ("b.weight", "data", 768, 4160),
        ("b.weight", "absmax", 5120, 130),
        ("b.weight", "nested_absmax", 5376, 4),
        ("b.weight", "offset", 5632, 4),
        ("c.weight", "CB", 5888, 320),
        ("c.weight", "SCB", 6400, 20),
        ("d.weight", "data", 6656, 390),
        ("d.weight", "absmax", 0, 26),
        ("e.weight", "data", 7168, 2080),
        ("e.weight", "absmax", 256, 130),
    ]
    assert LAYOUT.nbytes == 9472
    assert all(offset % ALIGNMENT == 0 for _, _, offset, _ in spans)


def test_what_rests_in_a_smaller_dtype_is_widened_behind_the_slab() -> None:
    assert LAYOUT.room == LAYOUT.nbytes + 2 * 512
    given = contents()
    buffer = torch.zeros(LAYOUT.room, dtype=torch.uint8)
    for weight in ("d.weight", "e.weight"):
        span = LAYOUT.spans[weight]["absmax"]
        assert span.resting(buffer).dtype is torch.bfloat16
        assert span.arrives % ALIGNMENT == 0
        span.resting(buffer).copy_(given[weight]["absmax"])
    bring(buffer)
    views = LAYOUT.views(buffer)
    for weight in ("d.weight", "e.weight"):
        assert views[weight]["absmax"].dtype is torch.float32
        assert bits(views[weight]["absmax"]) == bits(given[weight]["absmax"])
    assert SlabLayout.of(WEIGHTS[:3]).widening(buffer) is None


def test_views_are_of_the_buffer_itself() -> None:
    buffer = torch.zeros(LAYOUT.room, dtype=torch.uint8)
    LAYOUT.views(buffer)["c.weight"]["CB"].fill_(7)
    assert buffer[5888 : 5888 + 320].unique().tolist() == [7]
    assert buffer.count_nonzero() == 320


# ------------------------------------------------------------------------------- every slab


@devices
@kinds
def test_what_was_put_is_fetched_and_read(kind: str, device: str, make: Make) -> None:
    slab, given = make(kind), contents()
    fill(slab, given, device)
    buffer = torch.empty(LAYOUT.room + 512, dtype=torch.uint8, device=device).fill_(0xAB)
    slab.fetch(buffer)
    assert buffer[LAYOUT.nbytes :].unique().tolist() == [0xAB]
    buffer = bring(buffer)
    views = LAYOUT.views(buffer)
    assert all(equal(views[weight], given[weight]) for weight in given)
    assert buffer[LAYOUT.room :].unique().tolist() == [0xAB]
    for weight in given:
        private = slab.read(weight, torch.device(device))
        assert equal(private, given[weight])
        assert {one.device.type for one in private.values()} == {device}
    assert slab.tier == {"memory": "cpu", "disk": "disk"}[kind]
    assert slab.layout is LAYOUT


@devices
@kinds
def test_more_digits_than_planned_are_refused(kind: str, device: str, make: Make) -> None:
    slab, given = make(kind), contents()
    scales = given["d.weight"]["absmax"].to(device)
    slab.put("d.weight", "absmax", scales)
    scales[3] *= 1 + 2**-12
    with pytest.raises(
        FormatFault, match=r"d.weight \(absmax\) .* more digits than torch.bfloat16"
    ):
        slab.put("d.weight", "absmax", scales)


@devices
@kinds
def test_a_read_is_a_private_copy(kind: str, device: str, make: Make) -> None:
    slab, given = make(kind), contents()
    fill(slab, given, device)
    for one in slab.read("b.weight", torch.device(device)).values():
        one.zero_()
    assert equal(slab.read("b.weight", torch.device(device)), given["b.weight"])


@devices
@kinds
def test_two_slabs_do_not_touch_each_other(kind: str, device: str, make: Make) -> None:
    one, other = make(kind), make(kind)
    fill(one, contents(1), device)
    fill(other, contents(2), device)
    fill(one, contents(3), device)
    assert equal(other.read("c.weight", CPU), contents(2)["c.weight"])
    assert equal(one.read("c.weight", CPU), contents(3)["c.weight"])


@devices
@kinds
def test_a_tensor_that_is_not_contiguous_is_put_as_it_reads(
    kind: str, device: str, make: Make
) -> None:
    slab = make(kind)
    turned = torch.arange(21, dtype=torch.bfloat16).reshape(7, 3).T.to(device)
    slab.put("a.weight", "data", turned)
    assert torch.equal(slab.read("a.weight", CPU)["data"], turned.cpu())


@devices
@pytest.mark.parametrize(
    ("weight", "key", "tensor", "said"),
    [
        ("a.weight", "data", torch.zeros(7, 3, dtype=torch.bfloat16),
         "a.weight (data) was loaded as [7, 3] torch.bfloat16; the plan has [3, 7] torch.bfloat16"),
        ("a.weight", "data", torch.zeros(3, 7),
         "a.weight (data) was loaded as [3, 7] torch.float32; the plan has [3, 7] torch.bfloat16"),
        ("a.weight", "absmax", torch.zeros(3),
         "a.weight (absmax) was loaded as [3] torch.float32; the plan has nothing"),
    ],
    ids=["shape", "dtype", "part"],
)  # fmt: skip
@kinds
def test_what_was_not_planned_is_refused(
    kind: str, device: str, make: Make, weight: str, key: str, tensor: torch.Tensor, said: str
) -> None:
    slab = make(kind)
    fill(slab, contents(), device)
    with pytest.raises(FormatFault) as caught:
        slab.put(weight, key, tensor.to(device))
    assert (caught.value.code, caught.value.what) == ("TT508", said)
    assert equal(slab.read("a.weight", CPU), contents()["a.weight"])


@devices
@kinds
def test_closing_twice_does_nothing(kind: str, device: str, make: Make) -> None:
    slab = make(kind)
    slab.close()
    slab.close()


def test_the_memory_goes_with_the_last_view() -> None:
    memory = HostMemory(4096, pin=False)
    view = memory.buffer[:8]
    view.fill_(3)
    memory.close()
    assert memory.buffer.numel() == 0
    gc.collect()
    assert view.tolist() == [3] * 8


class Driver:
    """A driver that pins what it is let, and refuses what is not of whole pages."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.registered: set[int] = set()
        self.done: list[str] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.entered.set()
        assert self.gate.wait(10)
        if nbytes % 4096:
            return 1
        assert address not in self.registered
        self.registered.add(address)
        self.done.append("registered")
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered.remove(address)
        self.done.append("unregistered")
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.done.append("synchronized"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: fake.done.append("launched"))
    return fake


def test_who_asks_for_the_buffer_waits_until_a_thread_has_pinned_it(driver: Driver) -> None:
    with ThreadPoolExecutor(2) as threads:
        memory = HostMemory(8192, pin=True, by=threads)
        assert driver.entered.wait(10)
        asked = threads.submit(lambda: memory.buffer.fill_(3))
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        driver.gate.set()
        asked.result(10)
        assert (memory.pinned, memory.buffer.unique().tolist()) == (True, [3])
        assert len(driver.registered) == 1
        memory.close()
        memory.close()
    assert driver.done == ["registered", "synchronized", "unregistered"]
    assert (memory.pinned, memory.buffer.numel()) == (False, 0)


class PressedAtTheEnd(ThreadPoolExecutor):
    """Whoever waits for it to end is interrupted."""

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        raise KeyboardInterrupt


class PressedAtOnce(ThreadPoolExecutor):
    """Whoever gives it work is interrupted, right after that."""

    def submit(self, *work: Any, **options: Any) -> Any:
        super().submit(*work, **options)
        raise KeyboardInterrupt


@pytest.mark.parametrize("pressed", [PressedAtTheEnd, PressedAtOnce])
def test_an_interrupt_while_memory_is_pinned_leaves_nothing_pinned(
    pressed: type[ThreadPoolExecutor], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ThreadPoolExecutor", pressed)
    driver.gate.set()
    with pytest.raises(KeyboardInterrupt):
        HostMemory(4096, pin=True)
    gc.collect()
    assert driver.done == ["registered", "synchronized", "unregistered"]
    assert driver.registered == set()


def test_an_interrupt_before_memory_is_pinned_keeps_it_from_being_pinned(driver: Driver) -> None:
    with PressedAtOnce(1) as thread:
        ThreadPoolExecutor.submit(thread, driver.gate.wait, 10)
        with pytest.raises(KeyboardInterrupt):
            HostMemory(4096, pin=True, by=thread)
        gc.collect()
        driver.gate.set()
    assert driver.done == []


def test_what_fails_while_memory_is_pinned_meets_who_asks_for_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cudaHostRegister", lambda *_: 1 / 0)
    memory = HostMemory(4096, pin=True)
    with pytest.raises(ZeroDivisionError):
        memory.buffer  # noqa: B018
    memory.close()
    assert driver.done == []


def test_memory_that_is_closed_before_its_turn_is_never_pinned(driver: Driver) -> None:
    with ThreadPoolExecutor(1) as thread:
        first, second, third = (HostMemory(4096, pin=True, by=thread) for _ in range(3))
        assert driver.entered.wait(10)
        second.close()
        del third  # nobody closes it
        gc.collect()
        driver.gate.set()
        assert first.pinned
    assert driver.done == ["registered"]
    first.close()
    assert driver.registered == set()


def test_memory_that_is_closed_while_it_is_pinned_is_let_go_after_that(driver: Driver) -> None:
    with ThreadPoolExecutor(1) as thread:
        memory = HostMemory(4096, pin=True, by=thread)
        view = weakref.ref(memory._buffer)
        assert driver.entered.wait(10)
        memory.close()  # and nobody waits
        assert view() is not None
        driver.gate.set()
    assert driver.done == ["registered", "synchronized", "unregistered"]
    gc.collect()
    assert view() is None


def test_memory_that_the_driver_does_not_pin_is_memory(driver: Driver) -> None:
    driver.gate.set()
    with ThreadPoolExecutor(1) as thread:
        for by in (None, thread):
            memory = HostMemory(4097, pin=True, by=by)
            assert (memory.pinned, memory.buffer.unique().tolist()) == (False, [0])
            memory.close()
    # The next launch would find the refusal, were there none to take it.
    assert driver.done == ["launched", "launched"]


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [0, 1])
def test_pinned_memory_is_of_exact_size(threads: int) -> None:
    with ThreadPoolExecutor(1) as thread:
        memory = HostMemory(5 * 2**20 + 3, pin=True, by=thread if threads else None)
    assert (memory.buffer.numel(), memory.pinned, memory.buffer.is_pinned()) == (
        5 * 2**20 + 3, True, True,
    )  # fmt: skip
    memory.close()
