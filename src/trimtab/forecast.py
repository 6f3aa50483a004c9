"""How fast a plan will run, from bytes and bandwidths."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.formats import resident_bytes
from trimtab.hardware import ASSUMED_LINK_GBPS, Hardware
from trimtab.outline import Outline
from trimtab.plan import STREAMED, Forecast, PlacedUnit, Unit, WeightSpec

MATRIX_SECONDS = 4e-6
VECTOR_SECONDS = 30e-6
"""What a layer of a CUDA graph takes beside its products, for each of its matrices and of its
norms: the small kernels between them. Fitted to two models on an H200: 90 us for a Llama layer, of
seven matrices and two norms; 230 us for one of Gemma 4 E4B, of seven or nine and six or seven."""

TOKEN_SECONDS = 150e-6
"""The choice of a token and the inputs of the next (measured on an H200)."""

EAGER_SECONDS = 2.5e-3
"""A decoder layer with an adapter that is not part of a CUDA graph: the host launches its kernels
(measured beside an H200)."""

FOUR_BIT_GBPS = 960.0
"""The most that bitsandbytes' 4-bit product for a single token reads, of packed bytes (measured on
an H200, whose memory gives four times that)."""

READ_SHARE = {"gpu": 0.9, "cpu": 0.85}
"""Of the bandwidth, as a model's products read it (measured on an H200, and on two cores of a
server, where the bandwidth is a product's, too)."""

ASSUMED_DEVICE_GBPS = 300.0
"""Of a GPU that is not here to be measured: a card of the middle class."""

CPU_KERNEL_GBPS = {"4-bit": 1.0, "int8": 25.0}
CPU_LAYER_SECONDS = {"4-bit": 0.7e-3, "int8": 2e-3, "none": 0.7e-3}
"""bitsandbytes' own bound on a CPU, and what a decoder layer takes beside its products. Fitted to
three models (0.1 billion parameters to layers of the 8B shape) on two cores of an AMD EPYC with
AVX512, whose BF16 packing trimtab turns off. 4-bit products read 2.2 GB/s of a small matrix, and
0.75 of the largest; int8 counts on the processor's instructions for it."""


def forecast(
    outline: Outline, units: Sequence[PlacedUnit], runs: str, hardware: Hardware
) -> Forecast:
    """Tokens a second at batch 1.

    A token takes as long as the slowest of: its streamed bytes over the link, those from the disk
    over the disk, all bytes it computes with over the device's memory. The last has what lies
    between the products besides, which takes its time however little it reads.
    Tables are not counted: a token reads one row.
    """
    streamed = [unit for unit in units if unit.mode == STREAMED]
    link = sum(unit.moving_bytes for unit in streamed if unit.rests == "cpu")
    disk = sum(unit.moving_bytes for unit in streamed if unit.rests == "disk")
    link_gbps = hardware.link_gbps or ASSUMED_LINK_GBPS
    captured = not disk and outline.quant != "int8"
    memory, by_memory = _memory(outline, runs, hardware, captured=captured)
    seconds = {
        "memory": memory,
        "link": link / link_gbps / 1e9,
        "disk": disk / hardware.disk_gbps / 1e9,
    }
    basis = {
        "memory": by_memory,
        "link": f"link {link_gbps:.1f} GB/s, {_known(hardware.link_gbps)}",
        "disk": f"disk {hardware.disk_gbps:.1f} GB/s, assumed",
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return Forecast(1 / max(seconds[bound], 1e-6), bound, link + disk, basis[bound])


def _known(measured: float | None) -> str:
    return "measured" if measured else "assumed"


def _memory(
    outline: Outline, runs: str, hardware: Hardware, *, captured: bool
) -> tuple[float, str]:
    """Seconds a token for what is read on the device that runs, and how that is known."""
    used = [
        unit
        for unit in outline.units
        if unit.kind not in ("table", "tower") or outline.is_tied(unit)
    ]
    plain = sum(_nbytes(unit, quantized=False) for unit in used)
    packed = sum(_nbytes(unit, quantized=True) for unit in used)
    layers = [unit for unit in used if unit.kind == "layer"]
    if runs == "cpu":
        return _on_a_cpu(plain, packed, len(layers), outline.quant, hardware)
    gbps = (hardware.device_gbps or ASSUMED_DEVICE_GBPS) * READ_SHARE["gpu"]
    read = plain / gbps / 1e9 + packed / min(gbps, FOUR_BIT_GBPS) / 1e9
    small = TOKEN_SECONDS + sum(_small_kernels(one) for unit in layers for one in unit.weights)
    eager = EAGER_SECONDS * len(layers)
    if not captured and eager > read + small:
        return eager, f"{1e3 * EAGER_SECONDS:.1f} ms a layer to launch, as beside an H200"
    if small > read:
        return read + small, f"{1e6 * small:.0f} us of small kernels, as on an H200"
    return read + small, f"GPU memory {gbps:.0f} GB/s, {_known(hardware.device_gbps)}"


def _on_a_cpu(
    plain: int, packed: int, layers: int, quant: str, hardware: Hardware
) -> tuple[float, str]:
    kind = quant if quant in CPU_LAYER_SECONDS else "4-bit"
    read = plain / (hardware.cpu_gbps * READ_SHARE["cpu"]) / 1e9
    unpacked = packed / CPU_KERNEL_GBPS[kind] / 1e9 if packed else 0.0
    host = layers * CPU_LAYER_SECONDS[kind]
    slowest = max(read, unpacked, host)
    if slowest == read:
        basis = f"RAM {hardware.cpu_gbps:.1f} GB/s"
    elif slowest == unpacked:
        basis = f"{quant} kernels {CPU_KERNEL_GBPS[kind]:.1f} GB/s, as on a server"
    else:
        basis = (
            f"{1e3 * CPU_LAYER_SECONDS[kind]:.1f} ms a layer beside its products, as on a server"
        )
    return read + unpacked + host, basis


def _small_kernels(weight: WeightSpec) -> float:
    if weight.moves:
        return MATRIX_SECONDS
    # A product adds its bias.
    return 0.0 if weight.name.endswith(".bias") else VECTOR_SECONDS


def _nbytes(unit: Unit, quantized: bool) -> int:
    return sum(
        resident_bytes(one.storage, one.shape, one.dtype)
        for one in unit.weights
        if (one.storage != "plain") == quantized
    )
