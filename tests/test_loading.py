"""What `from_pretrained` is asked for; what it then loads is in test_place and its neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.quantizers import AutoHfQuantizer

import tiny
from placing import AWAY, placed
from trimtab import loading
from trimtab.checkpoint import open_checkpoint
from trimtab.loading import where_and_how
from trimtab.skeleton import model_class_of

TABLE = "model.language_model.embed_tokens_per_layer"


def asked(folder: Path, plan: Any, device: str, tables: tuple[str, ...] = (TABLE,)) -> Any:
    checkpoint = open_checkpoint(folder)
    rooms: Any = SimpleNamespace(device=torch.device(device), tables=dict.fromkeys(tables))
    return where_and_how(checkpoint, model_class_of(checkpoint), plan, rooms)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("quant", ["nf4-dq", "int8"])
def test_a_table_beside_a_gpu_goes_to_host_memory_and_the_quantizer_lets_it(
    quant: str, stored: bool, tmp_path: Path
) -> None:
    base = tiny.checkpoint("gemma4")
    with placed(base, quant, AWAY["all"]) as one:
        plan = one.plan
        if stored:
            one.save_quantized(tmp_path / "out")
            base = tmp_path / "out"
    found = asked(base, plan, "cuda")
    assert found["device_map"] == {"": torch.device("cuda"), TABLE: "cpu"}
    assert set(found) == {"device_map", "config" if stored else "quantization_config"}
    how = found["config"].quantization_config if stored else found["quantization_config"]
    quantizer = AutoHfQuantizer.from_config(how, pre_quantized=stored)
    quantizer.validate_environment(device_map=found["device_map"], weights_only=True)
    assert quantizer.quantization_config.llm_int8_enable_fp32_cpu_offload
    assert quantizer.quantization_config.load_in_8bit == (quant == "int8")


def test_without_a_gpu_or_a_table_nothing_is_split(tmp_path: Path) -> None:
    base = tiny.checkpoint("gemma4")
    with placed(base, "nf4", AWAY["all"]) as one:
        one.save_quantized(tmp_path / "out")
        for device, tables in (("cpu", (TABLE,)), ("cuda", ())):
            assert asked(tmp_path / "out", one.plan, device, tables) == {
                "device_map": {"": torch.device(device)}
            }
            fresh = asked(base, one.plan, device, tables)
            assert not fresh["quantization_config"].llm_int8_enable_fp32_cpu_offload


def test_files_are_read_ahead_of_a_gpu_into_half_of_what_the_plan_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = open_checkpoint(tiny.checkpoint("llama"))
    asked: list[tuple[object, int]] = []

    @contextlib.contextmanager
    def read_ahead(checkpoint: object, room: int) -> Iterator[None]:
        asked.append((checkpoint, room))
        yield

    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(loading, "read_ahead", read_ahead)
    for runs, totals in (("cpu", {"cpu": 1}), ("gpu:0", {"gpu:0": 9, "cpu": 400}), ("gpu:1", {})):
        plan: Any = SimpleNamespace(runs=runs, totals=totals)
        with loading.reading_ahead(checkpoint, plan):
            pass
    assert asked == [(checkpoint, 300), (checkpoint, 500)]
