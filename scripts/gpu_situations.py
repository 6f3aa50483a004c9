"""Situations as on a GPU: torch and the libraries are told of one, and raise what they raise there.

Like those of `failing_situations`, each runs in a fresh folder of its own, in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from torch import nn

import tiny  # of tests/
from failing_situations import base, lora

OUT = (
    "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 7.75 GiB of "
    "which 5.10 GiB is free. Including non-PyTorch memory, this process has 2.60 GiB memory in use."
)


def _told_of_a_gpu() -> None:
    """What is asked of torch says that there is one; the tensors are on the CPU as before."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.mem_get_info = lambda *device: (5 << 30, 8 << 30)
    torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda *device: 0
    torch.accelerator.current_accelerator = lambda *check: torch.device("cuda")


def warm_up(name: str, quant: str = "none", then: str = "") -> None:
    """The library's own warm-up, of a GPU that is told of, and that is full."""
    model = base(name, quant) if then else None
    folder = lora(name) if then else ""
    _told_of_a_gpu()
    empty = torch.empty

    def as_on_a_gpu(*given: Any, **options: Any) -> torch.Tensor:
        if "cuda" in str(options.get("device")):
            raise torch.OutOfMemoryError(OUT)
        return empty(*given, **options)

    torch.empty = as_on_a_gpu
    if model is None:
        base(name, quant, device_map={"": "cuda:0"})
    else:
        type(model).device = torch.device("cuda", 0)
        model.hf_device_map = {"": "cuda:0"}
        model.load_adapter(folder, device_map={"": "cuda:0"})


def in_a_layer(name: str, call: str, error: Exception, adapted: bool = True) -> None:
    """A forward in which one function of torch raises what it raises on a GPU."""
    model = base(name)
    if adapted:
        model = PeftModel.from_pretrained(model, lora(name))
    real = getattr(nn.functional, call)
    calls = []

    def as_on_a_gpu(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(given)
        if len(calls) > (1 if call == "embedding" else 3):
            raise error
        return real(*given, **options)

    setattr(nn.functional, call, as_on_a_gpu)
    model.generate(**tiny.inputs(tiny.checkpoint(name)), max_new_tokens=3)


def full(name: str, call: str = "linear", adapted: bool = True) -> None:
    in_a_layer(name, call, torch.OutOfMemoryError(OUT), adapted)


def elsewhere(name: str, call: str, argument: str, function: str, adapted: bool = True) -> None:
    said = (
        f"Expected all tensors to be on the same device, but got {argument} is on cpu, different "
        f"from other tensors on cuda:0 (when checking argument in method {function})"
    )
    in_a_layer(name, call, RuntimeError(said), adapted)


def two_devices(name: str, call: str, argument: str, function: str) -> None:
    said = (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
        f"cpu! (when checking argument for argument {argument} in method {function})"
    )
    in_a_layer(name, call, RuntimeError(said))


def library_of_cuda(version: str) -> None:
    """What bitsandbytes does when it is imported beside a torch of that CUDA version."""
    import bitsandbytes.functional
    from bitsandbytes import cextension, cuda_specs

    _told_of_a_gpu()
    torch.version.cuda = version
    torch.cuda.get_device_capability = lambda *device: (8, 6)
    cextension.BNB_BACKEND = "CUDA"
    for cached in (cuda_specs.get_cuda_specs, cuda_specs.get_cuda_version_tuple):
        getattr(cached, "cache_clear", lambda: None)()
    try:
        library = cextension.get_native_library()
    except Exception as error:
        library = cextension.ErrorHandlerMockBNBNativeLibrary(str(error))
    bitsandbytes.functional.lib = library
    bitsandbytes.functional.get_paged(64, 64)


def old_driver() -> None:
    """torch's own check of the driver, told that the driver is an older one."""
    torch._C._cuda_getDeviceCount = lambda: 1

    def as_on_a_gpu() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12020). Please update your "
            "GPU driver by downloading and installing a new version from the URL: "
            "http://www.nvidia.com/Download/index.aspx"
        )

    torch._C._cuda_init = as_on_a_gpu
    torch.cuda._is_compiled = lambda: True
    torch.cuda._cudart = object()
    base("llama").to("cuda")
