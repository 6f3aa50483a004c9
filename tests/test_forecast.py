from __future__ import annotations

import pytest

from trimtab.forecast import (
    CPU_KERNEL_GBPS,
    CPU_LAYER_SECONDS,
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
    read = 2 * 4096 * 4096 * 2 / (50e9 * READ_SHARE["gpu"])
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


@pytest.mark.parametrize(
    ("storage", "kind", "gbps", "basis"),
    [
        ("plain", "none", 20.0 * READ_SHARE["cpu"], "RAM 20.0 GB/s"),
        ("nf4", "4-bit", CPU_KERNEL_GBPS["4-bit"], "nf4 kernels 1.0 GB/s, as on a server"),
        (
            "int8",
            "int8",
            CPU_KERNEL_GBPS["int8"],
            "2.0 ms a layer beside its products, as on a server",
        ),
    ],
)
def test_on_a_cpu_the_format_decides(storage: str, kind: str, gbps: float, basis: str) -> None:
    found = outline(storage)
    told = forecast(found, placed(found, "cpu"), "cpu", machine(None, None))
    read = 2 * moving_bytes(storage, SHAPE, "bfloat16") / gbps / 1e9
    assert told.tokens_per_second == pytest.approx(1 / (read + 2 * CPU_LAYER_SECONDS[kind]))
    assert told.bound == "memory"
    assert told.basis == basis


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ((576, 1536, 30, 49152, 3), {"none": 35.9, "nf4": 51.1, "int8": 66.1}),
        ((2048, 5632, 12, 2048, 2), {"none": 87.4, "nf4": 219.7, "int8": 48.6}),
        ((4096, 14336, 4, 2048, 4), {"none": 102.7, "nf4": 659.0, "int8": 36.6}),
    ],
)
def test_on_a_cpu_it_is_near_what_was_measured(
    shape: tuple[int, int, int, int, int], measured: dict[str, float]
) -> None:
    """Milliseconds a token on two cores: SmolLM2, 12 layers in between (NF4: the mean
    of 154 and 285), 4 layers of the 8B shape.

    `shape`: hidden and intermediate size, layers, words, and heads that share a key.
    """
    hidden, between, layers, words, shared = shape
    sizes = [hidden * hidden, hidden * hidden // shared, hidden * hidden // shared,
             hidden * hidden, *[hidden * between] * 3]  # fmt: skip
    for quant, wanted in measured.items():
        storage = "plain" if quant == "none" else quant
        units = [
            Unit(f"l.{index}", "layer", tuple(
                WeightSpec(f"l.{index}.{at}", (size // 64, 64), "bfloat16", storage)
                for at, size in enumerate(sizes)))
            for index in range(layers)
        ]  # fmt: skip
        head = WeightSpec("head.w", (words, hidden), "bfloat16")
        units.append(Unit("head", "head", (head,)))
        found = Outline("A", tuple(units), (), (), 8, 8, "bfloat16", quant, NONE, NONE)
        hardware = Hardware((), 1, 1, 1, cpu_gbps=20.8)
        told = 1e3 / forecast(found, placed(found, "cpu"), "cpu", hardware).tokens_per_second
        assert 0.7 < told / wanted < 1.7


def test_what_cannot_be_measured_is_assumed_and_said() -> None:
    found = outline("plain")
    told = forecast(found, placed(found, "gpu:0", "cpu"), "gpu:0", machine(None, None))
    assert told.basis == "link 12.0 GB/s, assumed"
