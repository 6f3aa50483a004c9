"""How fast a plan will run, from bytes and bandwidths."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.hardware import ASSUMED_LINK_GBPS, Hardware
from trimtab.plan import IDLE, LOOKED_UP, STREAMED, Forecast, PlacedUnit

LAUNCH_SECONDS = 200e-6
"""A decoder layer's own time as part of one CUDA graph: 296 tokens/s of 16 layers on an H200."""

FOUR_BIT_CPU_GBPS = 0.2
"""bitsandbytes' 4-bit kernels on a CPU without their AVX512-BF16 packing, which trimtab turns off."""


def forecast(units: Iterable[PlacedUnit], quant: str, runs: str, hardware: Hardware) -> Forecast:
    """Tokens a second at batch 1.

    A token takes as long as the slowest of: its streamed bytes over the link, those from the disk over the
    disk, all bytes it computes with over the device's memory. On a GPU not less than 200 us a
    decoder layer, which its kernels take however little they read (then `memory` binds as well).
    Tables are not counted: a token reads one row.
    """
    placed = tuple(units)
    streamed = [unit for unit in placed if unit.mode == STREAMED]
    link = sum(unit.moving_bytes for unit in streamed if unit.rests == "cpu")
    disk = sum(unit.moving_bytes for unit in streamed if unit.rests == "disk")
    read = sum(
        unit.moving_bytes + unit.staying_bytes
        for unit in placed
        if unit.mode not in (IDLE, LOOKED_UP) and unit.kind not in ("table", "tower")
    )
    if runs == "cpu":
        floor = 0.0
        slow = quant.startswith(("nf4", "fp4"))
        memory_gbps = FOUR_BIT_CPU_GBPS if slow else hardware.cpu_gbps
        basis = "4-bit kernels without AVX512-BF16" if slow else "RAM as measured"
    else:
        floor = LAUNCH_SECONDS * sum(unit.kind == "layer" for unit in placed)
        memory_gbps = hardware.device_gbps or 300.0
        basis = "as measured" if hardware.device_gbps else "assumed"
    link_gbps = hardware.link_gbps or ASSUMED_LINK_GBPS
    seconds = {
        "memory": max(read / memory_gbps / 1e9, floor),
        "link": link / link_gbps / 1e9,
        "disk": disk / hardware.disk_gbps / 1e9,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    told = {
        "memory": f"memory at {memory_gbps:.1f} GB/s ({basis})",
        "link": f"the link at {link_gbps:.1f} GB/s "
        f"({'as measured' if hardware.link_gbps else 'assumed'})",
        "disk": f"the disk at {hardware.disk_gbps:.1f} GB/s (assumed)",
    }
    return Forecast(
        tokens_per_second=1 / max(seconds[bound], 1e-6),
        bound=bound,
        bytes_per_token=link + disk,
        basis=told[bound],
    )
