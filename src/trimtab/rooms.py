"""The memory of a placement: a slab or a table for each unit that does not rest where it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.disk import DiskFolder, DiskSlab, Staging, map_file
from trimtab.errors import EnvironmentFault, FormatFault, MemoryFault, RunningFault
from trimtab.formats import by_name
from trimtab.intake import Home, ParkingHome, TableHome, seen_by_gpu
from trimtab.memory import format_size
from trimtab.park import Carrier, Joined, ParkedUnit, ParkedWeight
from trimtab.plan import IDLE, LOOKED_UP, RESIDENT, STREAMED, PlacedUnit, Plan, WeightSpec
from trimtab.store import HostMemory, MemorySlab, Slab, SlabLayout
from trimtab.stream import Ring

if TYPE_CHECKING:
    from trimtab.outline import Outline


class Rooms:
    """Owns every slab, slot, table and file of one placement.

    `homes` say, by parameter name, where the loader's weights go. After loading, `furnish` makes
    the parked units. `close` frees everything, in any state.

    Raises:
        EnvironmentFault: TT103, the plan runs on a GPU that is not here.
        MemoryFault: TT403, TT404.
    """

    def __init__(self, plan: Plan, outline: Outline, disk_folder: str | Path | None) -> None:
        self.plan = plan
        self.device = device_of(plan.runs)
        self.before = 0
        """Bytes that the process held of the GPU already."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        self.slabs: dict[str, Slab] = {}
        self.held: dict[str, MemorySlab] = {}
        self.homes: dict[str, Home] = {}
        self.ring: Ring | None = None
        self.tables: dict[str, torch.Tensor] = {}
        self.resting: dict[str, torch.Tensor] = {}
        """The bytes of tables as the host sees them: flat uint8."""
        self._pinner: ThreadPoolExecutor | None = None
        self._shared: dict[tuple[str, bytes], torch.Tensor] = {}
        self._undo = contextlib.ExitStack()
        specs = {weight.name: weight for weight in outline.weights}
        try:
            self._make(plan, specs, disk_folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        ring, self.ring = self.ring, None
        try:
            if ring is not None:
                ring.close()
        finally:
            self._undo.close()
        self.homes.clear()
        self.slabs.clear()
        self.tables.clear()
        self.resting.clear()
        self._shared.clear()

    @property
    def pageable(self) -> int:
        """Bytes of slabs that should have been pinned."""
        if self.device.type != "cuda":
            return 0
        slabs = (one for one in self.slabs.values() if isinstance(one, MemorySlab))
        return sum(slab.layout.nbytes for slab in slabs if not slab.pinned)

    def read_gbps(self) -> float:
        """Bandwidth of the streamed slabs, each read once into memory of its own.

        On a CPU; a GPU's is `hardware.measured_link_gbps`.
        """
        slabs = [self.slabs[unit.name] for unit in self.plan.of_mode(STREAMED)]
        largest = max((slab.layout.nbytes for slab in slabs), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device="cpu")
        start = time.perf_counter()
        for slab in slabs:
            slab.fetch(buffer)
        seconds = max(time.perf_counter() - start, 1e-9)
        return sum(slab.layout.nbytes for slab in slabs) / seconds / 1e9

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """One copy for all equal tensors: code books, elements of stand-ins."""
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        key = (str(tensor.dtype), flat.numpy().tobytes())
        return self._shared.setdefault(key, tensor.detach().clone())

    def furnish(self, model: torch.nn.Module, *, poison: bool = False) -> list[ParkedUnit]:
        """The parked units, with the ring and the carriers that bring them.

        Raises:
            FormatFault: TT505, a planned weight never came.
        """
        if self._pinner is not None:
            self._pinner.shutdown()
        owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, attribute))
        weights = {unit: self._arrived(unit, owners) for unit in self.slabs}
        streamed = [unit.name for unit in self.plan.of_mode(STREAMED)]
        ring = self.ring = Ring(
            [self.slabs[name] for name in streamed], self.plan.slots, self.device, poison=poison
        )
        carriers: dict[str, Carrier] = {
            name: RingCarrier(ring, number, self.slabs[name], weights[name])
            for number, name in enumerate(streamed)
        }
        for unit in self.plan.of_mode(IDLE):
            if unit.name in self.slabs:
                carriers[unit.name] = BringIn(unit, self.slabs[unit.name], weights[unit.name], self)
        for name, slab in self.held.items():
            carriers[name] = Held(slab, weights[name])
        self.homes.clear()
        return [ParkedUnit(name, weights[name], one) for name, one in carriers.items()]

    def _arrived(
        self, unit: str, owners: Mapping[int, list[tuple[torch.nn.Module, str]]]
    ) -> list[ParkedWeight]:
        found = []
        for name in self.slabs[unit].layout.spans:
            home = self.homes[name]
            if not isinstance(home, ParkingHome) or home.parked is None:
                raise FormatFault(
                    "TT505",
                    f"{name} was planned as parked and was never loaded",
                    fix="make the plan again from the checkpoint as it is now",
                )
            mine = owners.get(id(home.parked.parameter))
            if mine is not None:
                home.parked.owners = mine
            found.append(home.parked)
        return found

    def _make(
        self, plan: Plan, specs: Mapping[str, WeightSpec], disk_folder: str | Path | None
    ) -> None:
        parked = [unit for unit in plan.of_mode(STREAMED, IDLE) if unit.moving]
        tables = plan.of_mode(LOOKED_UP)
        layouts = {unit.name: SlabLayout.of(specs[name] for name in unit.moving) for unit in parked}
        folder = None
        if any(unit.rests == "disk" for unit in (*parked, *tables)):
            folder = DiskFolder(disk_folder)
            self._undo.callback(folder.close)
        on_disk = [layouts[unit.name].nbytes for unit in parked if unit.rests == "disk"]
        staging = Staging(max(on_disk, default=0), self.device)
        self._undo.callback(staging.close)
        if self.device.type == "cuda":
            # While the first files are read.
            self._pinner = ThreadPoolExecutor(1, thread_name_prefix="trimtab-pin")
            self._undo.callback(self._pinner.shutdown)
        for unit in parked:
            slab = self._slab(unit, layouts[unit.name], folder, staging)
            self._undo.callback(slab.close)
            self.slabs[unit.name] = slab
            for name in unit.moving:
                self.homes[name] = ParkingHome(specs[name], slab, self.device, self.share)
        for unit in tables:
            for name in unit.moving:
                self._table(unit, specs[name], folder)
        self._hold(plan, specs)

    def _hold(self, plan: Plan, specs: Mapping[str, WeightSpec]) -> None:
        """Resident int8 layers of a CPU are bound for each forward too, from where they rest.

        PEFT's DoRA replaces a weight that is on a CPU (`module.weight = module.weight.to(device)`),
        and an int8 weight loses its scales by that.
        """
        if self.device.type != "cpu" or plan.quant != "int8":
            return
        for unit in plan.of_mode(RESIDENT):
            mine = [
                spec
                for name, spec in specs.items()
                if spec.storage == "int8" and name.startswith(f"{unit.name}.")
            ]
            if not mine or not unit.name:
                continue
            slab = self.held[unit.name] = MemorySlab(SlabLayout.of(mine), pin=False)
            self._undo.callback(slab.close)
            self.slabs[unit.name] = slab
            for spec in mine:
                self.homes[spec.name] = ParkingHome(spec, slab, self.device, self.share)

    def _slab(
        self, unit: PlacedUnit, layout: SlabLayout, folder: DiskFolder | None, staging: Staging
    ) -> Slab:
        if folder is not None and unit.rests == "disk":
            return DiskSlab(layout, folder, staging)
        with out_of_memory(unit.name, layout.nbytes):
            return MemorySlab(layout, pin=self.device.type == "cuda", by=self._pinner)

    def _table(self, unit: PlacedUnit, spec: WeightSpec, folder: DiskFolder | None) -> None:
        nbytes = by_name(spec.storage).layout(spec.shape, spec.dtype)[0].nbytes
        if folder is not None and unit.rests == "disk":
            resting = seen = map_file(folder.reserve(nbytes), nbytes)
        else:
            with out_of_memory(unit.name, nbytes):
                memory = HostMemory(nbytes, pin=self.device.type == "cuda")
            self._undo.callback(memory.close)
            if self.device.type == "cuda" and not memory.pinned:
                raise MemoryFault(
                    "TT404",
                    f"{format_size(nbytes)} of memory for {unit.name} could not be pinned",
                    why="a GPU looks rows up in pinned memory only",
                    fix="raise the limit of locked memory, or plan with a larger --gpu",
                    needed=nbytes,
                )
            resting = memory.buffer
            seen = resting if self.device.type == "cpu" else seen_by_gpu(memory, self.device)
        self.tables[spec.name] = seen
        self.resting[spec.name] = resting
        self.homes[spec.name] = TableHome(spec, resting, seen)


class RingCarrier:
    """Brings a streamed unit through the ring; what it binds is made once for each slot."""

    def __init__(
        self, ring: Ring, number: int, slab: Slab, weights: Sequence[ParkedWeight]
    ) -> None:
        self._ring = ring
        self._number = number
        self._joined = [join(weights, slab, slot.buffer) for slot in ring.slots]
        self._widened = [slab.layout.widening(slot.buffer) for slot in ring.slots]

    def take(self) -> tuple[Joined, int]:
        slot = self._ring.take(self._number)
        widen(self._widened[slot])
        return self._joined[slot], slot

    def give(self, claim: Any) -> None:
        self._ring.give(claim)

    def forget(self) -> None:
        self._ring.forget(self._number)


class BringIn:
    """Brings an idle unit in whole, into memory that is had for the call and freed after it."""

    def __init__(
        self, unit: PlacedUnit, slab: Slab, weights: Sequence[ParkedWeight], rooms: Rooms
    ) -> None:
        self._unit = unit
        self._slab = slab
        self._weights = weights
        self._device = rooms.device
        self._room = rooms.plan.spare + rooms.plan.costs.get("bring_in", 0)

    def take(self) -> tuple[Joined, torch.Tensor]:
        needed = self._slab.layout.room
        if needed > self._room:
            raise RunningFault(
                "TT603",
                f"{self._unit.name} is needed, and the plan left it out: it takes "
                f"{format_size(needed)} and {format_size(self._room)} are spare",
                why=self._unit.reason,
                fix="plan with the modality that needs it, or with a larger budget",
                unit=self._unit.name,
                needed=needed,
            )
        with torch.inference_mode(False):
            buffer = torch.empty(needed, dtype=torch.uint8, device=self._device)
        self._slab.fetch(buffer)
        widen(self._slab.layout.widening(buffer))
        return join(self._weights, self._slab, buffer), buffer

    def give(self, claim: Any) -> None:
        pass

    def forget(self) -> None:
        pass


class Held:
    """Binds a unit that rests where it runs: to its slab itself, without a copy."""

    def __init__(self, slab: MemorySlab, weights: Sequence[ParkedWeight]) -> None:
        self._joined = join(weights, slab, slab.buffer)

    def take(self) -> tuple[Joined, None]:
        return self._joined, None

    def give(self, claim: Any) -> None:
        pass

    def forget(self) -> None:
        pass


def widen(views: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Gives what moved in a smaller dtype its own, where the unit runs: its copy is then done."""
    if views is not None:
        target, source = views
        target.copy_(source)


def join(weights: Sequence[ParkedWeight], slab: Slab, buffer: torch.Tensor) -> Joined:
    """What the weights of a unit are bound to when its slab lies in `buffer`."""
    with torch.inference_mode(False):
        views = slab.layout.views(buffer)
        return {one.name: one.storage.join(views[one.name], one.recipe) for one in weights}


def device_of(tier: str) -> torch.device:
    """torch's device of a tier that runs.

    Raises:
        EnvironmentFault: TT103, if it is not here.
    """
    if tier == "cpu":
        return torch.device("cpu")
    index = int(tier.partition(":")[2] or 0)
    if index:
        raise EnvironmentFault(
            "TT103",
            f"the plan runs on {tier}, and trimtab runs on the first GPU",
            fix="make that GPU the first, with the variable CUDA_VISIBLE_DEVICES",
        )
    if index >= torch.cuda.device_count():
        raise EnvironmentFault(
            "TT103",
            f"the plan runs on {tier}, and torch sees {torch.cuda.device_count()} CUDA devices",
            fix="make the plan without --gpu, to run on the CPU, or install a CUDA build of torch",
        )
    return torch.device("cuda", index)


@contextlib.contextmanager
def out_of_memory(unit: str, nbytes: int) -> Any:
    """Translates what a failed allocation of host memory raises."""
    try:
        yield
    except (MemoryError, OSError) as error:
        raise MemoryFault(
            "TT404",
            f"{format_size(nbytes)} of memory for {unit} could not be had",
            why=str(error),
            fix="plan with a smaller --cpu budget",
            needed=nbytes,
        ) from error
