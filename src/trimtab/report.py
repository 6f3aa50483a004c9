"""Planned against measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.guard import is_guarded
from trimtab.hardware import measured_link_gbps
from trimtab.plan import LOOKED_UP, STREAMED, Plan

if TYPE_CHECKING:
    from trimtab.proof import Applied
    from trimtab.rooms import Rooms
    from trimtab.shelf import Shelf


@dataclass(frozen=True)
class TierReport:
    """Bytes on one tier: what the plan counted for it, and what is (or at most was) there."""

    tier: str
    planned: int
    measured: int


@dataclass(frozen=True)
class Report:
    """What a placement uses and does.

    `bytes_per_token` are the streamed bytes of one forward. `adapters` says for each adapter how
    many modules it changed and how many tensors of its file are used. `share_of_link` is the
    streamed bytes over what the measured link could have moved in the time of the last answer;
    None while there was none, and on a CPU. `pageable` are bytes that should have been pinned.
    `adapter_bytes` are those of the adapters on the device that runs now, `adapter_peak` the most
    that they were, and `resting` names the adapters that rest in host memory.
    `notes` say what of the adapters was mapped, skipped or not known.
    """

    runs: str
    tiers: tuple[TierReport, ...]
    bytes_per_token: int
    adapters: Mapping[str, Mapping[str, int]]
    share_of_link: float | None = None
    pageable: int = 0
    adapter_bytes: int = 0
    adapter_peak: int = 0
    resting: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure(
    plan: Plan,
    model: torch.nn.Module,
    rooms: Rooms,
    applied: Mapping[str, Applied],
    pace: float | None,
    shelf: Shelf,
) -> Report:
    """The report of an open placement.

    On a GPU the measured bytes of the device are torch's peak since loading began, less what the
    process held before, and the planned ones those without the CUDA context, which torch does not
    see. On a CPU, and for host memory and disk, they are the bytes of what lies there now. `pace`
    is the tokens per second of the last answer.
    """
    measured = {
        "cpu": sum(slab.layout.nbytes for slab in rooms.slabs.values() if slab.tier == "cpu"),
        "disk": sum(slab.layout.nbytes for slab in rooms.slabs.values() if slab.tier == "disk"),
    }
    for unit in plan.units:
        if unit.mode == LOOKED_UP:
            held = [rooms.tables[name] for name in unit.moving]
            measured[unit.rests] += sum(one.numel() for one in held)
    measured["cpu"] += shelf.host_bytes
    if rooms.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(rooms.device)
        measured[plan.runs] = max(0, peak - rooms.before)
    else:
        measured["cpu"] += live_bytes(model, rooms)
    return Report(
        runs=plan.runs,
        tiers=tuple(
            TierReport(
                tier,
                nbytes - (plan.costs["context"] if tier == plan.runs else 0),
                measured.get(tier, 0),
            )
            for tier, nbytes in plan.totals.items()
        ),
        bytes_per_token=sum(unit.moving_bytes for unit in plan.of_mode(STREAMED)),
        adapters={
            name: {"modules": len(one.modules), "tensors": one.tensors}
            for name, one in applied.items()
        },
        share_of_link=share_of_link(plan, pace),
        pageable=rooms.pageable,
        adapter_bytes=shelf.here,
        adapter_peak=shelf.peak,
        resting=shelf.resting,
        notes=tuple(note for one in applied.values() for note in one.notes),
    )


def share_of_link(plan: Plan, pace: float | None) -> float | None:
    """Bytes that the last answer brought in over what the measured link moves in its time."""
    streamed = sum(one.moving_bytes for one in plan.of_mode(STREAMED) if one.rests == "cpu")
    if pace is None or not streamed or plan.runs == "cpu":
        return None
    return pace * streamed / (measured_link_gbps() * 1e9)


def live_bytes(model: torch.nn.Module, rooms: Rooms) -> int:
    """Bytes of all parameters, quantization states, buffers and slots that lie in memory."""
    storages: dict[int, int] = {}
    tables = {table.data_ptr() for table in rooms.tables.values()}

    def count(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and not is_guarded(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in tables:
                storages[storage.data_ptr()] = storage.nbytes()

    for tensor in (*model.parameters(), *model.buffers()):
        count(tensor)
        if not is_guarded(tensor):
            state = getattr(tensor, "quant_state", None)
            for part in (state, getattr(state, "state2", None)):
                count(getattr(part, "absmax", None))
                count(getattr(part, "code", None))
    for module in model.modules():
        count(getattr(getattr(module, "state", None), "SCB", None))
    if rooms.ring is not None:
        for slot in rooms.ring.slots:
            count(slot.buffer)
    return sum(storages.values())
