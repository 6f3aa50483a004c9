"""The machine as facts: memory, and how fast bytes move."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.memory import Budget, MiB, parse_size

if TYPE_CHECKING:
    import torch

CUDA_CONTEXT = 784 * MiB
"""What a process takes of a GPU beside torch's tensors, when it has run: the CUDA context, cuBLAS,
bitsandbytes. Measured on an H200 with torch 2.11: 765 to 775 MiB; smaller cards take less."""

INT8_CONTEXT = 64 * MiB
"""What the kernels of int8 products add to it, measured there too."""

FRESH_CONTEXT = 480 * MiB
"""What of it is taken as soon as somebody asks for the free memory."""

ALLOCATOR = 64 * MiB
"""cuBLAS' workspace, 32 MiB of torch's own memory on Hopper, and what its allocator rounds up."""

CAPTURE = 32 * MiB
"""A second workspace, of the stream on which decode steps are captured."""

GPU_MARGIN = 256 * MiB
"""Left free of what is free, for the desktop and the allocator's rounding."""

RAM_SHARE = 0.8
"""Of the available RAM, by default: the rest is for Python, the page cache and other programs."""

ASSUMED_DISK_GBPS = 1.0
ASSUMED_LINK_GBPS = 12.0
"""Where nothing can be measured: a common SSD, and half of PCIe 4 x16."""


class Gpu(NamedTuple):
    """A GPU: its name, its memory and what of it is free, in bytes, without our own context."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Hardware:
    """What a plan needs to know of a machine; can be built by hand, for a machine that is not here.

    A plan runs on the first of `gpus`.

    Bandwidths are in 1e9 bytes a second: `link_gbps` from pinned host memory to the GPU (None
    without one), `device_gbps` of the GPU's own memory, `cpu_gbps` of RAM as a CPU's product of a
    matrix and a vector in bfloat16 reads it, `disk_gbps` of the disk (assumed: a measurement would
    tell the page cache's).

    Example:
        >>> card = Hardware(gpus=(Gpu("RTX 3060", 12 * GiB, 11 * GiB),), ram_total=32 * GiB,
        ...                 ram_available=24 * GiB, disk_free=200 * GiB, link_gbps=12.0,
        ...                 device_gbps=360.0)
    """

    gpus: tuple[Gpu, ...]
    ram_total: int
    ram_available: int
    disk_free: int
    link_gbps: float | None = None
    device_gbps: float | None = None
    cpu_gbps: float = 10.0
    disk_gbps: float = ASSUMED_DISK_GBPS
    cores: int = 1
    avx512_bf16: bool = False

    @classmethod
    def detect(cls, folder: str | Path | None = None, *, every_gpu: bool = False) -> Hardware:
        """This machine. Measuring takes about 0.1 s.

        Args:
            folder: it lies on the disk that is meant; by default that of temporary files.
            every_gpu: not the first alone. To ask a GPU for its free memory takes some of it.
        """
        import psutil
        import torch

        ram = psutil.virtual_memory()
        cuda = torch.cuda.is_available()
        count = torch.cuda.device_count() if cuda else 0
        return cls(
            gpus=tuple(_gpu(index) for index in range(count if every_gpu else min(count, 1))),
            ram_total=ram.total,
            ram_available=ram.available,
            disk_free=shutil.disk_usage(folder or tempfile.gettempdir()).free,
            link_gbps=measured_link_gbps() if cuda else None,
            device_gbps=_device_gbps() if cuda else None,
            cpu_gbps=_cpu_gbps(),
            cores=os.cpu_count() or 1,
            avx512_bf16=_has_avx512_bf16(),
        )


def default_budget(
    hardware: Hardware,
    gpu: str | int | None = None,
    cpu: str | int | None = None,
    disk: str | int | None = None,
    *,
    device_map: Mapping[str, Any] | None = None,
) -> Budget:
    """The sizes asked for, and for those that were not: what the machine has free.

    Args:
        hardware: the machine. A `gpu` size is taken as given, whether it has a GPU or not.
        gpu: bytes on the GPU; by default what is free, less a margin. 0 means: run on the CPU.
        cpu: bytes of RAM; by default 80 % of what is available.
        disk: bytes on the disk; by default none: nothing is written unless it is asked for.
        device_map: a map that names the disk asks for it, too: what is free.

    Raises:
        MemoryFault: TT402, not a size.

    Example:
        >>> default_budget(Hardware.detect(), gpu="6GiB").gpu
        6442450944
    """
    wanted, ram, stored = parse_size(gpu), parse_size(cpu), parse_size(disk)
    if wanted is None:
        wanted = max(0, hardware.gpus[0].free - GPU_MARGIN) if hardware.gpus else 0
    named = isinstance(device_map, Mapping) and "disk" in device_map.values()
    mapped = hardware.disk_free if named else 0
    return Budget(
        runs="gpu:0" if wanted else "cpu",
        gpu=wanted,
        cpu=int(hardware.ram_available * RAM_SHARE) if ram is None else ram,
        disk=mapped if stored is None else stored,
    )


def _gpu(index: int) -> Gpu:
    import torch

    # Asking for the free memory makes our context: the plan counts that by itself.
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(torch.cuda.get_device_name(index), total, min(total, free + FRESH_CONTEXT))


@functools.cache
def measured_link_gbps() -> float:
    """Bandwidth from pinned host memory to the first GPU, in 1e9 bytes a second."""
    import torch

    size = 64 * MiB
    host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    return size / _cuda_seconds(lambda: device.copy_(host, non_blocking=True)) / 1e9


@functools.cache
def _device_gbps() -> float:
    import torch

    size = 128 * MiB
    source = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    return 2 * size / _cuda_seconds(lambda: target.copy_(source)) / 1e9


def _cuda_seconds(copy: Callable[[], torch.Tensor], times: int = 5) -> float:
    import torch

    best = float("inf")
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(0):
            start.record()
            copy()
            end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


@functools.cache
def _cpu_gbps() -> float:
    import torch

    # Larger than most caches. Random numbers would take longer than all else here.
    matrix = torch.ones(8192, 4096, dtype=torch.bfloat16, device="cpu")
    vector = torch.ones(4096, dtype=torch.bfloat16, device="cpu")
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.nn.functional.linear(vector, matrix)
        best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best / 1e9


def _has_avx512_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags
