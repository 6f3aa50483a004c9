"""What torch tells of this machine, for `doctor`, in a process of its own: prints one JSON line."""

from __future__ import annotations

import json
import os
import tempfile
import time
from typing import Any

from trimtab.memory import MiB, format_size


def probe() -> dict[str, Any]:
    """Devices with their free memory, and bandwidths in 1e9 bytes a second.

    Example:
        >>> probe()["RAM"]
        '10.2 GB/s'
    """
    import torch

    from trimtab.hardware import Hardware

    machine = Hardware.detect(every_gpu=True)
    found = {"torch": f"{torch.__version__}, CUDA {torch.version.cuda}"}
    for number, gpu in enumerate(machine.gpus):
        free, total = format_size(gpu.free), format_size(gpu.total)
        found[f"cuda:{number}"] = f"{gpu.name}, {free} of {total} free"
    if machine.link_gbps:
        found["link, pinned"] = f"{machine.link_gbps:.1f} GB/s"
    found["RAM"] = f"{machine.cpu_gbps:.1f} GB/s"
    return {**found, **_disk(), "AVX512-BF16": "yes" if machine.avx512_bf16 else "no"}


def _disk(size: int = 64 * MiB) -> dict[str, str]:
    """How fast the folder for temporary files is; reading where the page cache can be emptied."""
    data = os.urandom(MiB) * (size // MiB)
    with tempfile.TemporaryFile() as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        found = {"disk, writing": _rate(size, start)}
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            file.read()
            found["disk, reading"] = _rate(size, start)
    return found


def _rate(size: int, start: float) -> str:
    return f"{size / (time.perf_counter() - start) / 1e9:.1f} GB/s"


if __name__ == "__main__":
    print(json.dumps(probe()))
