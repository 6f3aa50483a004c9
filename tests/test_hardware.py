from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.errors import MemoryFault
from trimtab.hardware import FRESH_CONTEXT, GPU_MARGIN, Gpu, Hardware, default_budget
from trimtab.memory import Budget, GiB

BARE = Hardware(gpus=(), ram_total=32 * GiB, ram_available=10 * GiB, disk_free=100 * GiB)
CARD = Hardware(
    gpus=(Gpu("a card", 12 * GiB, 11 * GiB),),
    ram_total=32 * GiB,
    ram_available=10 * GiB,
    disk_free=100 * GiB,
    link_gbps=12.0,
    device_gbps=360.0,
)


@pytest.mark.parametrize(
    ("hardware", "asked", "budget"),
    [
        (BARE, {}, Budget("cpu", 0, 8 * GiB, 0)),
        (BARE, {"cpu": "1GiB", "disk": "2GB"}, Budget("cpu", 0, GiB, 2 * 10**9)),
        (BARE, {"gpu": "6GiB"}, Budget("gpu:0", 6 * GiB, 8 * GiB, 0)),
        (CARD, {}, Budget("gpu:0", 11 * GiB - GPU_MARGIN, 8 * GiB, 0)),
        (CARD, {"gpu": 0}, Budget("cpu", 0, 8 * GiB, 0)),
        (CARD, {"gpu": "2GiB", "cpu": 0}, Budget("gpu:0", 2 * GiB, 0, 0)),
    ],
)
def test_default_budget(hardware: Hardware, asked: dict[str, str], budget: Budget) -> None:
    assert default_budget(hardware, **asked) == budget


@pytest.mark.parametrize(
    ("asked", "disk"), [({}, 100 * GiB), ({"disk": "2GiB"}, 2 * GiB), ({"disk": 0}, 0)]
)
def test_a_map_that_names_the_disk_asks_for_it(asked: dict[str, Any], disk: int) -> None:
    device_map = {"": 0, "model.layers.1": "disk"}
    assert default_budget(CARD, **asked, device_map=device_map).disk == disk
    assert default_budget(CARD, device_map={"": 0}).disk == 0


@pytest.mark.parametrize("size", ["-1", "abc", "6 potatoes", -1])
def test_a_budget_that_is_no_size(size: str | int) -> None:
    with pytest.raises(MemoryFault) as caught:
        default_budget(BARE, cpu=size)
    assert caught.value.code == "TT402"


def test_detect_is_consistent() -> None:
    here = Hardware.detect()
    assert 0 < here.ram_available <= here.ram_total
    assert here.disk_free > 0
    assert here.cpu_gbps > 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert len(here.gpus) == min(count, 1)
    assert len(Hardware.detect(every_gpu=True).gpus) == count
    assert (here.link_gbps is None) == (not here.gpus)


@pytest.mark.gpu
def test_detect_measures_the_gpu() -> None:
    here = Hardware.detect()
    _, total = torch.cuda.mem_get_info(0)
    assert here.gpus[0].total == total
    # Other processes may take and give in between.
    assert FRESH_CONTEXT <= here.gpus[0].free <= total
    assert here.link_gbps is not None
    assert here.device_gbps is not None
    assert 1 < here.link_gbps < here.device_gbps


def test_the_disk_is_that_of_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a placement makes its folder, unless it is given one."""
    asked: list[object] = []

    def usage(folder: object) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=5)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert Hardware.detect().disk_free == Hardware.detect("here").disk_free == 5
    assert asked == [tempfile.gettempdir(), "here"]
