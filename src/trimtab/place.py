"""A plan carried out: the model loaded into its tiers, and everything undone where that fails."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trimtab.adapters import AdapterHeader
from trimtab.decode import steps_of
from trimtab.intake import Intake
from trimtab.loading import load_model, settle
from trimtab.park import Gate, Wrapped
from trimtab.placement import Placement, Progress
from trimtab.plan import Plan
from trimtab.rooms import Rooms
from trimtab.shelf import Shelf
from trimtab.switching import Switch

if TYPE_CHECKING:
    from trimtab.checkpoint import Checkpoint
    from trimtab.outline import Outline


@torch.inference_mode(False)
def place(
    plan: Plan,
    outline: Outline,
    checkpoint: Checkpoint,
    adapters: Mapping[str, AdapterHeader],
    *,
    disk_folder: str | Path | None = None,
    progress: Progress | None = None,
    adapter_options: Mapping[str, Mapping[str, bool]] | None = None,
    poison: bool = False,
) -> Placement:
    """Loads the model that `outline` describes as `plan` says, then the adapters.

    `adapter_options` go to `add_adapter`, by adapter name.
    `poison` fills each slot when its unit has run, which shows a read that comes too late.

    Raises:
        TrimtabError: what it says; nothing is left behind.
    """
    with contextlib.ExitStack() as undo:
        rooms = Rooms(plan, outline, disk_folder)
        undo.callback(rooms.close)
        with Intake(rooms.homes, progress).open():
            model = load_model(checkpoint, outline, plan, rooms)
        gate = Gate(model)
        gate.units.extend(rooms.furnish(model, poison=poison))
        undo.enter_context(settle(model, plan))
        undo.callback(gate.close)
        for unit in gate.units:
            Wrapped(model.get_submodule(unit.name), functools.partial(gate.through, unit))
        steps = steps_of(plan, model, rooms)
        switch = Switch()
        cap = plan.adapter_memory if rooms.device.type == "cuda" else None
        shelf = Shelf(switch, rooms.device, cap, steps.forget_adapter)
        undo.callback(shelf.close)

        around = functools.partial(shelf.serving, gate.passing)
        Wrapped(model, around, whole=rooms.device, through=steps)
        Wrapped(
            model,
            contextlib.nullcontext,
            method="generate",
            whole=rooms.device,
            through=steps.generate,
        )
        source = checkpoint.folder or checkpoint.source
        placed = Placement(plan, model, rooms, gate, steps, switch, shelf, source, undo)
        for name, header in adapters.items():
            placed.add_adapter(name, header, **(adapter_options or {}).get(name, {}))
        if placed.adapters:
            switch.choose(placed.adapters[0])
        placed._shutdown = undo.pop_all()
    return placed
