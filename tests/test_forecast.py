from __future__ import annotations

import pytest

from trimtab.forecast import (
    EAGER_SECONDS,
    FOUR_BIT_GBPS,
    MATRIX_SECONDS,
    READ_SHARE,
    TOKEN_SECONDS,
    VECTOR_SECONDS,
    forecast,
)
from trimtab.formats import moving_bytes
from trimtab.hardware import Hardware
from trimtab.outline import Outline
from trimtab.plan import RESIDENT, STREAMED, PlacedUnit, Unit, WeightSpec

SHAPE = (4096, 4096)
NONE: frozenset[str] = frozenset()


def machine(link: float | None = 10.0, device: float | None = 100.0) -> Hardware:
    return Hardware((), 1, 1, 1, link, device, cpu_gbps=20.0, disk_gbps=2.0)


def outline(storage: str, layers: int = 2) -> Outline:
    units = tuple(
        Unit(f"l.{index}", "layer", (WeightSpec(f"l.{index}.w", SHAPE, "bfloat16", storage),))
        for index in range(layers)
    )
    quant = "none" if storage == "plain" else storage
    return Outline("A", units, (), (), 8, 8, "bfloat16", quant, NONE, NONE)


def placed(found: Outline, runs: str, *rests: str) -> list[PlacedUnit]:
    size = moving_bytes(found.units[0].weights[0].storage, SHAPE, "bfloat16")
    return [
        PlacedUnit(unit.name, "layer", STREAMED, rests[at], runs, (), size, 0, "")
        if at < len(rests)
        else PlacedUnit(unit.name, "layer", RESIDENT, runs, runs, (), 0, size, "")
        for at, unit in enumerate(found.units)
    ]


def test_the_link_binds() -> None:
    found = outline("plain")
    told = forecast(found, placed(found, "gpu:0", "cpu", "cpu"), "gpu:0", machine())
    assert told.bytes_per_token == 2 * 4096 * 4096 * 2
    assert told.tokens_per_second == pytest.approx(10e9 / told.bytes_per_token)
    assert (told.bound, told.basis) == ("link", "link 10.0 GB/s, measured")


def test_the_disk_binds() -> None:
    found = outline("plain")
    told = forecast(found, placed(found, "gpu:0", "cpu", "disk"), "gpu:0", machine())
    assert told.tokens_per_second == pytest.approx(2e9 / (4096 * 4096 * 2))
    assert told.bound == "disk"


def test_the_memory_of_the_gpu_binds() -> None:
    found = outline("plain")
    told = forecast(found, placed(found, "gpu:0"), "gpu:0", machine(device=50.0))
    read = 2 * 4096 * 4096 * 2 / (50e9 * READ_SHARE)
    seconds = read + 2 * MATRIX_SECONDS + TOKEN_SECONDS
    assert told.tokens_per_second == pytest.approx(1 / seconds)
    assert (told.bound, told.bytes_per_token) == ("memory", 0)
    assert told.basis == "GPU memory 45 GB/s, measured"


def test_kernels_take_their_time() -> None:
    found = outline("nf4", layers=4)
    told = forecast(found, placed(found, "gpu:0"), "gpu:0", machine(device=5000.0))
    read = 4 * moving_bytes("nf4", SHAPE, "bfloat16") / (FOUR_BIT_GBPS * 1e9)
    assert told.tokens_per_second == pytest.approx(1 / (read + 4 * MATRIX_SECONDS + TOKEN_SECONDS))
    assert told.basis == "166 us of small kernels, as on an H200"


def test_a_norm_has_more_kernels_than_a_product_and_a_bias_none() -> None:
    units = (
        Unit(
            "l.0",
            "layer",
            tuple(
                WeightSpec(f"l.0.{name}", shape, "bfloat16")
                for name, shape in (("w.weight", (8, 8)), ("w.bias", (8,)), ("n.weight", (8,)))
            ),
        ),
    )
    found = Outline("A", units, (), (), 8, 8, "bfloat16", "none", NONE, NONE)
    told = forecast(found, placed(found, "gpu:0"), "gpu:0", machine(device=5000.0))
    small = MATRIX_SECONDS + VECTOR_SECONDS + TOKEN_SECONDS
    assert told.tokens_per_second == pytest.approx(1 / small, rel=1e-3)


@pytest.mark.parametrize(("storage", "rests"), [("int8", ()), ("nf4", ("disk",))])
def test_what_is_not_captured_takes_the_host_s_time(storage: str, rests: tuple[str, ...]) -> None:
    found = outline(storage, layers=40)
    told = forecast(found, placed(found, "gpu:0", *rests), "gpu:0", machine(device=5000.0))
    assert told.tokens_per_second == pytest.approx(1 / (40 * EAGER_SECONDS))
    assert told.basis == "2.5 ms a layer to launch, as beside an H200"


@pytest.mark.parametrize(("storage", "gbps"), [("plain", 20.0), ("nf4", 0.4), ("int8", 0.1)])
def test_on_a_cpu_the_format_decides(storage: str, gbps: float) -> None:
    found = outline(storage)
    told = forecast(found, placed(found, "cpu"), "cpu", machine(None, None))
    read = 2 * moving_bytes(storage, SHAPE, "bfloat16")
    assert told.tokens_per_second == pytest.approx(gbps * 1e9 / read)
    assert told.bound == "memory"


def test_what_cannot_be_measured_is_assumed_and_said() -> None:
    found = outline("plain")
    told = forecast(found, placed(found, "gpu:0", "cpu"), "gpu:0", machine(None, None))
    assert told.basis == "link 12.0 GB/s, assumed"
