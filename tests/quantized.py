"""Single layers of every storage format, plain and parked; `from quantized import ...`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tiny
from trimtab.fakes import RecordingSlab
from trimtab.intake import ParkingHome
from trimtab.park import ParkedWeight
from trimtab.plan import WeightSpec
from trimtab.store import SlabLayout


@dataclass
class Made:
    """A quantized layer, and the input that shows what it computes."""

    module: Any
    inputs: torch.Tensor
    bias: torch.Tensor

    @property
    def weight(self) -> Any:
        return self.module.weight

    def out(self) -> torch.Tensor:
        with torch.no_grad():
            return self.module(self.inputs)  # type: ignore[no-any-return]


def make(
    name: str,
    shape: tuple[int, int],
    device: str,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Made:
    """A layer of that format with random weights, quantized by bitsandbytes itself."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    dtype = dtype or (torch.float16 if name == "int8" else torch.bfloat16)
    weight = (torch.randn(shape, generator=generator) * columns**-0.5).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype).to(device)
    module: Any
    if name == "plain":
        module = nn.Linear(columns, rows, dtype=dtype)
        module.weight.data = weight.to(device)
    else:
        import bitsandbytes as bnb

        if name == "int8":
            module = bnb.nn.Linear8bitLt(columns, rows, has_fp16_weights=False)
            module.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            module = bnb.nn.Linear4bit(
                columns,
                rows,
                compute_dtype=dtype,
                quant_type=name[:3],
                compress_statistics=name.endswith("-dq"),
            )
            module.weight.data = weight
        module = module.to(device)
        tiny.plain_kernels(module)
        if module.weight.device.type == "cpu" and name == "int8" and module.weight.CB is None:
            module.weight.cpu()
    module.bias = nn.Parameter(bias, requires_grad=False)
    module.weight.requires_grad_(False)
    inputs = torch.randn(4, columns, generator=generator).to(dtype).to(device)
    return Made(module, inputs, bias)


@dataclass
class Parked:
    """A layer whose weight is parked, and its twin that is not."""

    made: Made
    twin: Made
    slab: RecordingSlab
    parked: ParkedWeight

    @property
    def weight(self) -> Any:
        return self.made.weight

    @property
    def true(self) -> Any:
        return self.twin.weight


def park(
    name: str, shape: tuple[int, int] = (64, 128), device: str = "cpu", seed: int = 0
) -> Parked:
    """A layer of that format, parked as a placement parks it."""
    made = make(name, shape, device, seed)
    dtype = str(made.bias.dtype).removeprefix("torch.")
    label = f"layers.{seed}.weight" if seed else "layer.weight"
    spec = WeightSpec(label, shape, dtype, name)
    slab = RecordingSlab(SlabLayout.of([spec]))
    home = ParkingHome(spec, slab, torch.device(device), torch.clone)
    with torch.no_grad():
        home.receive(made.module, "weight", made.weight)
    assert home.parked is not None
    return Parked(made, make(name, shape, device, seed), slab, home.parked)
