"""What a user calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import AdapterFault, PlacementFault
from trimtab.memory import parse_size
from trimtab.plan import Plan, PlannedAdapter

if TYPE_CHECKING:
    from trimtab.adapters import AdapterHeader
    from trimtab.hardware import Hardware
    from trimtab.outline import Outline
    from trimtab.placement import Placement

CONTEXT = 4096
"""Tokens that a plan counts when it is not told how many."""


def plan(
    model: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    quant: str = "auto",
    gpu: str | int | None = None,
    cpu: str | int | None = None,
    disk: str | int | None = None,
    context: int = CONTEXT,
    batch: int = 1,
    modalities: tuple[str, ...] = ("text",),
    device_map: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    adapter_memory: str | int | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """Decides from a memory budget where each part of a model lives. Nothing is loaded.

    An adapter that does not fit the model is counted all the same, and `notes` say so.

    Args:
        model: a folder, or a name on the hub; a folder with a config and no weights will do.
        adapters: name to folder or hub name of each PEFT adapter; they are resident, as far as
            `adapter_memory` lets them be.
        quant: format of the linears: `nf4`, `nf4-dq`, `fp4`, `fp4-dq`, `int8`, `none`, or `auto`:
            what the checkpoint is stored in.
        gpu: bytes of GPU memory, as `6GiB` or a whole number; by default what is free.
        cpu: bytes of RAM; by default 80 % of what is available.
        disk: bytes on the disk; by default none, or what is free if the map names it.
        context: tokens of prompt and answer together, in each sequence.
        batch: sequences at a time.
        modalities: what prompts will hold: of `text`, `image`, `video`, `audio`.
        device_map: a Hugging Face map (module name to `0`, `cpu`, `disk`), obeyed.
        dtype: torch's name of the dtype to compute in; `auto`: the config's.
        adapter_memory: the most bytes of adapters on a GPU, as `200MiB`: beyond it the least
            recently used ones rest in host memory until they are needed. By default all stay.
        hardware: the machine to plan for; by default this one. A plan needs no GPU.

    Raises:
        DoesNotFit: TT401, the budget is too small.
        MemoryFault: TT402, not a size.
        EnvironmentFault: TT101, TT103, TT104, TT105.
        FormatFault: TT501 to TT504, TT507, TT509, TT510: what is wrong with the checkpoint.
        PlacementFault: TT201 to TT204: what is wrong with the device map.
        AdapterFault: TT301, TT302: what is wrong with an adapter.
        RunningFault: TT607, a modality that the model does not have, or less than one token or
            sequence.

    Example:
        >>> trimtab.plan("google/gemma-4-E4B-it", quant="nf4", gpu="6GiB").totals["gpu:0"]
        5368709120
    """
    from trimtab.adapters import read_adapter
    from trimtab.checkpoint import open_checkpoint
    from trimtab.hardware import Hardware, default_budget
    from trimtab.outline import build_outline
    from trimtab.planner import make_plan

    machine = hardware or Hardware.detect()
    budget = default_budget(machine, gpu, cpu, disk, device_map=device_map)
    checkpoint = open_checkpoint(model, need_weights=False)
    outline = build_outline(checkpoint, quant, dtype)
    headers = {name: read_adapter(source) for name, source in (adapters or {}).items()}
    decided = make_plan(
        outline,
        budget,
        hardware=machine,
        model=checkpoint.source,
        fingerprint=checkpoint.fingerprint,
        adapters=[
            _planned(name, source, headers[name]) for name, source in (adapters or {}).items()
        ],
        context=context,
        batch=batch,
        modalities=modalities,
        device_map=device_map,
        adapter_memory=parse_size(adapter_memory),
    )
    misfits = (_misfit(name, one, outline, decided.model) for name, one in headers.items())
    return replace(decided, notes=(*decided.notes, *filter(None, misfits)))


def load(
    model: str | Path | Plan,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    disk_folder: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    allow_unused: Collection[str] = (),
    allow_other_base: Collection[str] = (),
    **planning: Any,
) -> Placement:
    """Loads base and adapters in one pass, as a plan says.

    Args:
        model: a `Plan`, or what `plan` takes; the plan is made first then.
        adapters: as for `plan`; a `Plan` has its own.
        disk_folder: where the bytes of the disk tier lie; by default a temporary folder. It is
            locked while the placement is open and emptied when it is closed.
        progress: called with the name of each parameter as it arrives.
        allow_unused: names of adapters whose file may hold tensors that match nothing.
        allow_other_base: names of adapters that may name another base model.
        planning: the further arguments of `plan`.

    Raises:
        TrimtabError: whatever `plan` raises; TT205, the plan is of another checkpoint; TT103, its
            GPU is not here; TT206 and TT403, the disk folder; TT505, TT506, the weights; TT3nn,
            an adapter. Nothing is left behind.

    Example:
        >>> with trimtab.load("./model", {"sql": "./sql-lora"}, quant="nf4", gpu="6GiB") as placed:
        ...     print(placed.generate("How many users?", adapter="sql"))
    """
    from trimtab.adapters import read_adapter
    from trimtab.checkpoint import open_checkpoint
    from trimtab.outline import build_outline
    from trimtab.place import place

    if isinstance(model, Plan):
        if adapters or planning:
            given = ", ".join([*planning, *(["adapters"] if adapters else [])])
            raise PlacementFault(
                "TT204",
                f"a plan is carried out as it is, and {given} was given beside it",
                fix="make the plan with it",
            )
        decided = model
    else:
        decided = plan(model, adapters, **planning)
    checkpoint = open_checkpoint(decided.model)
    if checkpoint.fingerprint != decided.fingerprint:
        raise PlacementFault(
            "TT205",
            f"the plan was made for the checkpoint {decided.fingerprint}, and {decided.model} is "
            f"{checkpoint.fingerprint}",
            why="it is another model's, or its config or tensors have changed since",
            fix="make the plan again",
        )
    outline = build_outline(checkpoint, decided.quant, decided.dtype)
    headers = {one.name: read_adapter(one.source) for one in decided.adapters}
    options = {
        name: {
            "allow_unused": name in allow_unused,
            "allow_other_base": name in allow_other_base,
        }
        for name in headers
    }
    for name, header in headers.items():
        _require_fit(header, outline, decided.model, options[name])
    return place(
        decided,
        outline,
        checkpoint,
        headers,
        disk_folder=disk_folder,
        progress=progress,
        adapter_options=options,
    )


def _require_fit(
    header: AdapterHeader, outline: Outline, model: str, allowed: Mapping[str, bool]
) -> None:
    """What will be refused is refused before minutes of loading."""
    from trimtab.compat import known_fields
    from trimtab.fit import fit

    fit(
        header,
        outline.shapes,
        model,
        known_fields=known_fields(header),
        ties=outline.ties,
        **allowed,
    )


def _misfit(name: str, header: AdapterHeader, outline: Outline, model: str) -> str | None:
    try:
        _require_fit(header, outline, model, {})
    except AdapterFault as error:
        return f"the adapter {name} does not fit as it is: {error.what} [{error.code}]"
    return None


def _planned(name: str, source: str | Path, header: AdapterHeader) -> PlannedAdapter:
    from trimtab.adapters import adapter_bytes

    modules = {_module(key) for key in header.tensors}
    return PlannedAdapter(name, str(source), adapter_bytes(header), len(modules))


def _module(key: str) -> str:
    """The module that an adapter's tensor belongs to: `...q_proj` of `...q_proj.lora_A.weight`."""
    parts = key.split(".")
    own = next((at for at, part in enumerate(parts) if part.startswith("lora_")), len(parts) - 1)
    return ".".join(parts[:own])
