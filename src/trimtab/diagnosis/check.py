"""Everything that is wrong with a model, a map, adapters, a budget, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from trimtab.adapters import AdapterHeader, adapter_bytes, read_adapter
from trimtab.checkpoint import Checkpoint, open_checkpoint
from trimtab.compat import known_fields
from trimtab.complete import check_files
from trimtab.devicemap import match_device_map, tier_of
from trimtab.diagnosis.finding import Finding
from trimtab.diagnosis.versions import check_versions, installed
from trimtab.errors import MemoryFault, PlacementFault, TrimtabError
from trimtab.fit import Shapes, fit, three
from trimtab.hardware import Hardware, default_budget
from trimtab.memory import Budget, parse_size
from trimtab.outline import Outline, build_outline
from trimtab.plan import Plan, PlannedAdapter
from trimtab.planner import make_plan

if TYPE_CHECKING:
    Adapters = Mapping[str, str | Path] | Sequence[str | Path] | str | Path

T = TypeVar("T")
Size = str | int | None

SHOWN: Final = 5
"""Wrong keys of a device map that get a finding each; the rest share one."""

_WAIVED: Final[Mapping[str, Mapping[str, Any]]] = {
    "TT303": {"allow_unused": True},
    "TT305": {"allow_other_base": True},
    "TT307": {"known_fields": None},
}
"""What to overlook in an adapter, once it is reported, to see what else is wrong with it."""


def check(
    model: str | Path,
    device_map: Mapping[str, Any] | None = None,
    adapters: Adapters | None = None,
    quant: str = "auto",
    gpu: Size = None,
    cpu: Size = None,
    disk: Size = None,
    context: int = 4096,
    batch: int = 1,
    modalities: tuple[str, ...] = ("text",),
    dtype: str = "auto",
    hardware: Hardware | None = None,
    adapter_memory: Size = None,
) -> list[Finding]:
    """Looks for everything that would go wrong, from headers and configs; nothing is loaded.

    Versions, the checkpoint, the map's names and values, each adapter against the model's names
    and shapes, the budget. A fault does not end the search: what does not depend on it is looked
    at too. The arguments are those of `trimtab.plan`; `adapters` may also be one folder or several
    without names.

    Returns:
        Errors first, then warnings, then notes: what was understood and adapted, such as map keys
        with a prefix. Empty: nothing was found.

    Example:
        >>> [one.code for one in check("./llama", {"transformer": 0})]
        ['TT201']
    """
    return look(
        model,
        device_map,
        adapters,
        quant=quant,
        gpu=gpu,
        cpu=cpu,
        disk=disk,
        context=context,
        batch=batch,
        modalities=modalities,
        dtype=dtype,
        hardware=hardware,
        adapter_memory=adapter_memory,
    ).findings


@dataclasses.dataclass(frozen=True)
class Look:
    """What is wrong, in the order of `check`, and the facts that it was found by.

    `plan` is called with a device map or None, and plans for the same model, adapters and budget;
    None where something that it needs is not known.
    """

    findings: list[Finding]
    outline: Outline | None
    runs: str = ""
    plan: Callable[[Mapping[str, Any] | None], Plan] | None = None


def look(
    model: str | Path,
    device_map: Mapping[str, Any] | None,
    adapters: Adapters | None,
    quant: str = "auto",
    gpu: Size = None,
    cpu: Size = None,
    disk: Size = None,
    dtype: str = "auto",
    hardware: Hardware | None = None,
    adapter_memory: Size = None,
    **asked: Any,
) -> Look:
    """Carries out `check`, whose arguments these are."""
    found: list[Finding] = []
    sizes = (gpu, cpu, disk)
    checkpoint = _checkpoint(model, found)
    found += check_versions(str(checkpoint.config.get("model_type", "")) if checkpoint else "")
    outline, exact = _outline(checkpoint, quant, dtype, found)
    if checkpoint is not None and outline is not None and exact:
        _persist(functools.partial(check_files, checkpoint, outline), found, {})
    planned = _adapters(adapters, outline, checkpoint, found)
    sizes_right = _sizes((*sizes, adapter_memory), found)
    told = Look(found, outline)
    if outline is not None:
        map_right = device_map is None or _match(device_map, outline, found)
        if device_map is not None and map_right:
            found += _overreach(device_map, outline)
        if exact and sizes_right:
            machine = hardware or Hardware.detect()
            budget = default_budget(machine, *sizes, device_map=device_map)
            asked |= {"hardware": machine, "adapters": planned}
            asked["adapter_memory"] = parse_size(adapter_memory)
            found += _plan(outline, budget, device_map if map_right else None, **asked)

            def plan(device_map: Mapping[str, Any] | None) -> Plan:
                return make_plan(outline, budget, device_map=device_map, **asked)

            told = Look(found, outline, budget.runs, plan)
    order = ("error", "warning", "note")
    found.sort(key=lambda one: order.index(one.severity))
    return told


def _persist(
    step: Callable[..., T], found: list[Finding], waivers: Mapping[str, Mapping[str, Any]]
) -> T | None:
    """What the step gives, or None; each of its faults is a finding.

    After a fault that has a waiver, keywords for the step that make it overlook the fault, the
    step is tried again.
    """
    waived: dict[str, Any] = {}
    met: set[str] = set()
    while True:
        try:
            return step(**waived)
        except TrimtabError as fault:
            finding = Finding.from_error(fault)
            if finding not in found:
                found.append(finding)
            if fault.code in met or fault.code not in waivers:
                return None
            met.add(fault.code)
            waived.update(waivers[fault.code])


def _note(code: str, what: str) -> Finding:
    return Finding(code, what, severity="note")


# ---------------------------------------------------------------------------- checkpoint, outline


def _checkpoint(model: str | Path, found: list[Finding]) -> Checkpoint | None:
    def read(need_weights: bool = True) -> Checkpoint:
        return open_checkpoint(model, need_weights)

    opened = _persist(read, found, {"TT503": {"need_weights": False}})
    return opened or _config_alone(model)


def _config_alone(model: str | Path) -> Checkpoint | None:
    """A folder whose weights cannot be read: names and shapes need only its config."""
    folder = Path(model).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Checkpoint(str(model), folder, config, {}, "") if isinstance(config, dict) else None


def _outline(
    checkpoint: Checkpoint | None, quant: str, dtype: str, found: list[Finding]
) -> tuple[Outline | None, bool]:
    """The outline, and whether it is that of the format asked for.

    Names and shapes do not depend on the format: where that is at fault, they are those of 16 bits.
    """
    if checkpoint is None or installed("transformers") is None:
        return None, False
    config = {key: one for key, one in checkpoint.config.items() if key != "quantization_config"}
    plain = {
        "checkpoint": dataclasses.replace(checkpoint, config=config),
        "quant": "none",
        "dtype": "auto",
    }
    before = len(found)

    def build(
        checkpoint: Checkpoint = checkpoint, quant: str = quant, dtype: str = dtype
    ) -> Outline:
        return build_outline(checkpoint, quant, dtype)

    outline = _persist(build, found, {"TT101": plain, "TT509": plain})
    return outline, len(found) == before


# ------------------------------------------------------------------------------------ device map


def _match(device_map: Mapping[str, Any], outline: Outline, found: list[Finding]) -> bool:
    """Whether the map is right; if not, what is wrong with each of its keys is a finding."""
    try:
        match_device_map(device_map, outline)
    except PlacementFault as fault:
        single = _match_each(device_map, outline) if isinstance(device_map, Mapping) else []
        found += single or [Finding.from_error(fault)]
        return False
    return True


def _match_each(device_map: Mapping[str, Any], outline: Outline) -> list[Finding]:
    found: list[Finding] = []

    def match(part: Mapping[str, Any]) -> bool:
        return _persist(lambda: match_device_map(part, outline), found, {}) is not None

    right: dict[str, Any] = {}
    waiting = dict(device_map)
    while waiting and len(found) < SHOWN:
        key = next(iter(waiting))
        value = waiting.pop(key)
        # The catch-all keeps what all other keys would have placed out of this.
        if match({"": 0, key: value}):
            right[key] = value
        elif found[-1].code != "TT201":
            right[key] = "cpu"  # the name is right; only the value is not
    if waiting:
        match({"": 0, **waiting})
    elif right:
        match(right)
    return found


def _overreach(device_map: Mapping[str, Any], outline: Outline) -> list[Finding]:
    """Notes on keys that the stock loader takes for further modules, to other tiers than here."""
    tiers = match_device_map(device_map, outline).tiers
    also: dict[str, dict[str, None]] = {}
    for name, tier in tiers.items():
        # It takes keys for beginnings of names, not of their components: 1 begins 10.
        keys = [key for key in device_map if key and name.startswith(key)]
        key = max(keys, key=lambda one: (one.count("."), len(one)), default="")
        if key and tier_of(key, device_map[key]) != tier:
            rest = name[len(key) :].partition(".")[0]
            also.setdefault(key, {})[key + rest] = None
    return [
        _note(
            "TT223", f"transformers takes the key {key!r} for {three(more)} too, trimtab does not"
        )
        for key, more in also.items()
    ]


# -------------------------------------------------------------------------------------- adapters


def _adapters(
    adapters: Adapters | None,
    outline: Outline | None,
    checkpoint: Checkpoint | None,
    found: list[Finding],
) -> list[PlannedAdapter]:
    """The adapters that can be read, with their bytes."""
    shapes = outline.shapes if outline else None
    base = checkpoint.source if checkpoint else None
    planned = []
    for name, source in _named(adapters).items():
        header = _persist(lambda source=source: read_adapter(source), found, {})
        if header is not None:
            planned.append(PlannedAdapter(name, str(source), adapter_bytes(header), 0))
            if shapes is not None:
                found += _fit(header, shapes, base, outline.ties if outline else ())
    return planned


def _named(adapters: Adapters | None) -> dict[str, str | Path]:
    if isinstance(adapters, Mapping):
        return dict(adapters)
    several = [adapters] if isinstance(adapters, str | Path) else adapters or []
    return {str(number): source for number, source in enumerate(several)}


def _fit(
    header: AdapterHeader, shapes: Shapes, base: str | None, ties: tuple[tuple[str, str], ...]
) -> list[Finding]:
    """Everything that keeps an adapter from the model; if nothing does, what is adapted."""
    found: list[Finding] = []
    fields = None
    if installed("peft") is not None:
        fields = _persist(lambda: known_fields(header), found, {})
        if fields is None:
            return found
    asked = {"known_fields": fields, "ties": ties}

    def decide(**waived: Any) -> tuple[str, ...]:
        return fit(header, shapes, base, **{**asked, **waived}).notes

    notes = _persist(decide, found, _WAIVED)
    if found or notes is None:
        return found
    said = (one if header.source in one else f"{header.source}: {one}" for one in notes)
    return [_note("TT316", one) for one in said]


# ---------------------------------------------------------------------------------------- budget


def _sizes(sizes: Sequence[Size], found: list[Finding]) -> bool:
    """Whether all of these are sizes."""
    right = True
    for size in sizes:
        try:
            parse_size(size)
        except MemoryFault as fault:
            found.append(Finding.from_error(fault))
            right = False
    return right


def _plan(
    outline: Outline, budget: Budget, device_map: Mapping[str, Any] | None, **asked: Any
) -> list[Finding]:
    """What keeps a plan from being made; if nothing does, what it makes of the map."""
    found: list[Finding] = []
    asked["device_map"] = device_map

    def decide(**waived: Any) -> Plan:
        return make_plan(outline, budget, **{**asked, **waived})

    waivers: dict[str, dict[str, Any]] = {
        "TT103": {"device_map": None},
        "TT607": {"modalities": ("text",)},
    }
    plan = _persist(decide, found, waivers)
    return found + [_note("TT210", one) for one in (plan.notes if plan else ())]
