"""Bases that accelerate has placed, and where; `from dispatched import ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tiny import checkpoint, quantization_config, reference, writable

LAYERS = {"gemma4": "model.language_model.layers", "gemma3-vlm": "model.language_model.layers"}


def mixed_map(model: torch.nn.Module, name: str, runs: Any = "cpu", rests: str = "disk") -> Any:
    """Every other layer, and the towers, rest elsewhere; what is around them runs on `runs`."""
    layers = LAYERS.get(name, "model.layers")
    chosen = {
        f"{layers}.{number}": rests
        for number in range(len(model.get_submodule(layers)))
        if number % 2
    }
    chosen |= {
        full: rests
        for full in ("model.vision_tower", "model.audio_tower")
        if any(one == full for one, _ in model.named_modules())
    }

    def fill(prefix: str, module: torch.nn.Module) -> None:
        for last, child in module.named_children():
            full = f"{prefix}{last}"
            if any(one.startswith(f"{full}.") for one in chosen):
                fill(f"{full}.", child)
            elif full not in chosen:
                chosen[full] = runs

    fill("", model)
    return chosen


def placed(folder: Path, device_map: Any, offload: Path, quant: str = "none") -> Any:
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, kind).from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map=device_map,
        offload_folder=str(offload),
        quantization_config=quantization_config(quant),
    )


def half_on_disk(name: str, tmp_path: Path) -> tuple[Path, Any]:
    folder = writable(checkpoint(name), tmp_path)
    return folder, placed(folder, mixed_map(reference(folder), name), tmp_path / "offload")


def placement(base: torch.nn.Module) -> list[Any]:
    """Hooks, map, and where each of the base's parameters is, whatever PEFT has put around them."""

    def plain(name: str) -> str:
        return name.replace(".base_layer", "")

    hooks = sorted(
        (plain(name), id(one._hf_hook))
        for name, one in base.named_modules()
        if "_hf_hook" in vars(one)
    )
    homes = sorted(
        (plain(name), str(one.device))
        for name, one in base.named_parameters()
        if ".lora_" not in name
    )
    return [hooks, dict(base.hf_device_map), homes]
