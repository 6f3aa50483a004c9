"""The decision as data: which unit rests where, in how many bytes, and why."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.memory import Budget

SCHEMA_VERSION = 1

RESIDENT = "resident"
STREAMED = "streamed"
LOOKED_UP = "looked up"
IDLE = "idle"


@dataclass(frozen=True)
class WeightSpec:
    """A parameter before anything is loaded.

    `shape` is that of the unquantized weight, `dtype` torch's name of the dtype it computes in,
    `storage` the name of its format (`plain`, `nf4`, `nf4-dq`, `fp4`, `fp4-dq`, `int8`),
    `quantized_from` the dtype that it was quantized from, where that is known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str = "plain"
    quantized_from: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def moves(self) -> bool:
        """Whether the weight may leave the device: parameters of one dimension stay."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Unit:
    """What is placed as one.

    `kind` is `layer` (a decoder layer), `table` (an embedding), `tower` (vision, audio and their
    projectors), `head` (the output projection), `projection` (any other module with a matrix) or
    `rest` (what is left: norms, scalars). `needs` are the modalities that use the unit; empty
    means always. `tied_to` names the unit that owns the bytes. `kv_from` names the layer whose
    keys and values this layer reuses.
    """

    name: str
    kind: str
    weights: tuple[WeightSpec, ...]
    buffer_bytes: int = 0
    needs: tuple[str, ...] = ()
    tied_to: str | None = None
    kv_from: str | None = None


@dataclass(frozen=True)
class PlacedUnit:
    """A unit with its place.

    `moving` are the names of the weights that rest in `rests`; `moving_bytes` is their size in
    their format, as one aligned slab. `staying_bytes` stay on the device that runs: parameters
    of one dimension, buffers, code books, and for a resident unit everything.
    """

    name: str
    kind: str
    mode: str
    rests: str
    runs: str
    moving: tuple[str, ...]
    moving_bytes: int
    staying_bytes: int
    reason: str


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter that the plan counts: `nbytes` in the dtype that PEFT gives it."""

    name: str
    source: str
    nbytes: int
    modules: int


@dataclass(frozen=True)
class Forecast:
    """Tokens per second that the plan expects, and the bound that binds.

    `bound` is `link` (streamed bytes over the measured bandwidth), `memory` (resident bytes over
    the device's own bandwidth) or `disk`. `bytes_per_token` are the streamed bytes.
    """

    tokens_per_second: float
    bound: str
    bytes_per_token: int
    basis: str


@dataclass(frozen=True)
class Plan:
    """Where each unit of a model rests and runs.

    `costs` are the bytes that the device that runs holds beside the weights: `kv_cache`,
    `transient`, `logits`, `adapters`, `slots`, `context` (the CUDA context), `allocator` (torch's
    own), `bring_in` (room for an idle tower that prompts need). `totals` are bytes per tier,
    everything counted. `fingerprint` names the checkpoint the plan was made for.
    `storage` is the format of the linears, `dtype` the one that is computed in. `adapter_memory`
    are the most bytes of adapters on the device that runs, the others rest in host memory; None:
    all of them run from where they are.
    """

    model: str
    fingerprint: str
    architecture: str
    quant: str
    dtype: str
    budget: Budget
    context: int
    batch: int
    modalities: tuple[str, ...]
    units: tuple[PlacedUnit, ...]
    adapters: tuple[PlannedAdapter, ...]
    slots: int
    slot_bytes: int
    costs: Mapping[str, int]
    totals: Mapping[str, int]
    forecast: Forecast
    notes: tuple[str, ...] = ()
    device_map: Mapping[str, Any] | None = field(default=None)
    adapter_memory: int | None = None

    @property
    def runs(self) -> str:
        return self.budget.runs

    @property
    def spare(self) -> int:
        """Bytes of the running device's budget that the plan leaves free."""
        return max(0, self.budget.running - self.totals.get(self.runs, 0))

    def of_mode(self, *modes: str) -> tuple[PlacedUnit, ...]:
        """The units of these modes, in the order in which the model runs them."""
        return tuple(unit for unit in self.units if unit.mode in modes)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote.

        Raises:
            ValueError: a schema version that this trimtab does not know.
        """
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"plan schema {data.get('schema_version')!r}, not {SCHEMA_VERSION}")
        fields = {name: value for name, value in data.items() if name != "schema_version"}
        fields["budget"] = Budget(**fields["budget"])
        fields["units"] = tuple(
            PlacedUnit(**{**unit, "moving": tuple(unit["moving"])}) for unit in fields["units"]
        )
        fields["adapters"] = tuple(PlannedAdapter(**one) for one in fields["adapters"])
        fields["forecast"] = Forecast(**fields["forecast"])
        fields["modalities"] = tuple(fields["modalities"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
