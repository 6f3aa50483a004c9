"""The exception tree: one class a family, one code a fault.

Families: TT1nn environment, TT2nn device maps and placement, TT3nn adapters, TT4nn memory,
TT5nn formats and checkpoints, TT6nn running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

TITLES: Final[dict[str, str]] = {
    "TT101": "a package that this needs is not installed",
    "TT102": "an installed package is older than what is supported",
    "TT103": "the device asked for does not exist here",
    "TT104": "the model needs code from its own repository",
    "TT105": "no such model",
    "TT106": "torch or a library of a quantizer does not work here",
    "TT201": "a device-map key matches no module",
    "TT202": "the device map gives a module no device",
    "TT203": "a device-map value names no tier",
    "TT204": "the device map asks for something that cannot be placed",
    "TT205": "the plan was made for another checkpoint",
    "TT206": "the disk folder is in use by another placement",
    "TT207": "the base model was not placed by transformers or accelerate",
    "TT208": "the placement is closed",
    "TT209": "the module is already placed",
    "TT210": "the device map was understood, and carried out with a difference",
    "TT211": "a quantization state was left on meta",
    "TT212": "weights were left on meta by a second placement",
    "TT213": "a catch-all of the device map covers a part that is on the disk",
    "TT214": "the base's device map was given to PEFT",
    "TT215": "PEFT does not find the base's offloaded weights by their names",
    "TT216": "layers that share keys and values do not find them",
    "TT217": "PEFT's plan fails over the set of modules not to split",
    "TT218": "a folder for offloaded weights is missing",
    "TT219": "bitsandbytes refuses a device map with CPU or disk",
    "TT220": "tensors of one layer are on different devices",
    "TT221": "a second placement moved the model without a word",
    "TT222": "an offload folder was used twice",
    "TT223": "a device-map key also covers modules whose names begin like it",
    "TT224": "a forked process uses a placement that its parent made",
    "TT301": "no adapter there",
    "TT302": "the adapter file is damaged",
    "TT303": "tensors of the adapter match nothing in the model",
    "TT304": "the adapter's targets match no module",
    "TT305": "the adapter was made for another base model",
    "TT306": "a tensor of the adapter has the wrong size",
    "TT307": "the adapter's config has fields that the installed PEFT does not know",
    "TT308": "the adapter's initialisation reads base weights that are parked",
    "TT309": "merging into a placed model is refused",
    "TT310": "the adapter carries tensors of the base model",
    "TT311": "no adapter of that name, or the name is taken",
    "TT312": "the adapter file lacks tensors that its config promises",
    "TT313": "the adapter targets a module that PEFT cannot adapt",
    "TT314": "this kind of adapter is not supported",
    "TT315": "PEFT refused the adapter",
    "TT316": "the adapter fits, with something mapped, skipped or dropped",
    "TT317": "this kind of adapter does not compute on quantized layers",
    "TT318": "the merged model cannot be written there",
    "TT319": "a swap of adapters changed only some of the layers",
    "TT321": "the adapter cannot take another's place",
    "TT401": "the model does not fit the budget",
    "TT402": "not a size",
    "TT403": "the disk is full",
    "TT404": "out of memory",
    "TT405": "the loader's warm-up takes the memory of the whole model",
    "TT406": "adapters that are needed at once exceed the adapter memory",
    "TT501": "the folder has no config.json",
    "TT502": "a checkpoint file is truncated or damaged",
    "TT503": "a checkpoint file is missing",
    "TT504": "the checkpoint index names tensors that its files do not hold",
    "TT505": "the checkpoint lacks tensors that the model needs",
    "TT506": "a tensor of the checkpoint has the wrong shape",
    "TT507": "the checkpoint was rewritten by an offloaded PeftModel.from_pretrained",
    "TT508": "a loaded weight is not laid out as planned",
    "TT509": "the storage format is not supported",
    "TT510": "the config is not understood",
    "TT511": "the scales of a quantized weight are not found by name",
    "TT512": "a quantized parameter is rebuilt with a flag that it does not take",
    "TT513": "bitsandbytes cannot pack a 4-bit weight for this CPU",
    "TT514": "a place in the checkpoint is not certain",
    "TT515": "a device map kept the model from being quantized",
    "TT516": "the quantized model cannot be saved",
    "TT601": "a parked weight was written to",
    "TT602": "a parked weight was replaced",
    "TT603": "a part that the plan left out is needed",
    "TT604": "gradients do not flow through streamed layers",
    "TT605": "a placed model cannot be copied",
    "TT606": "the prompt is longer than the planned context",
    "TT607": "the call does not fit the placed model",
    "TT608": "a part of the model does not have the attention asked for",
}


class TrimtabError(Exception):
    """Base of every error that trimtab raises on purpose.

    Args:
        code: the stable code, a key of `TITLES`.
        what: one sentence: what happened, with full names and numbers with units.
        why: the cause, if it is known.
        fix: what to do.
        parts: further named facts (names, bytes), for programs that read the error.
    """

    exit_code: int = 1

    def __init__(
        self, code: str, what: str, *, why: str = "", fix: str = "", **parts: object
    ) -> None:
        if code not in TITLES:
            raise KeyError(f"unknown error code {code}")
        super().__init__(what)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix
        self.parts = parts

    @property
    def title(self) -> str:
        return TITLES[self.code]

    def __str__(self) -> str:
        said = [f"{self.what} [{self.code}]"]
        if self.why:
            said.append(f"why: {self.why}")
        if self.fix:
            said.append(f"fix: {self.fix}")
        said.append(f"see: trimtab explain {self.code}")
        return "\n".join(said)


class EnvironmentFault(TrimtabError):
    """TT1nn: a package, a device or a model that is not there."""


class PlacementFault(TrimtabError):
    """TT2nn: a device map or a placement that cannot be carried out."""


class AdapterFault(TrimtabError):
    """TT3nn: an adapter that does not fit, or would not be applied."""


class MemoryFault(TrimtabError):
    """TT4nn: a budget, a size, a full disk."""


class DoesNotFit(MemoryFault):
    """TT401: even the leanest plan is above the budget. `parts["shortfall"]` is in bytes."""

    exit_code = 3


class FormatFault(TrimtabError):
    """TT5nn: a checkpoint or a storage format that cannot be used."""


class RunningFault(TrimtabError):
    """TT6nn: something that a placed model refuses."""


def chain(problem: BaseException) -> Iterator[BaseException]:
    """The exception, what caused it, and so on; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__context__, one.__cause__]


def first_three(names: Sequence[str]) -> str:
    """Up to three of the names, and dots where there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type's name where it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
