"""Tensors of a checkpoint with adapters merged into them: PEFT merges, a module at a time."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from trimtab.adapters import ADAPTED
from trimtab.apply import peft_config, peft_refusals
from trimtab.errors import AdapterFault
from trimtab.fit import Fit, three
from trimtab.naming import ends_with
from trimtab.proof import account, check_injected

MERGEABLE: Final = frozenset(
    (
        "ADALORA", "BOFT", "BONE", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HRA", "IA3",
        "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "PSOFT", "ROAD", "SHIRA",
        "TRAINABLE_TOKENS", "WAVEFT",
    )
)  # fmt: skip
"""Kinds whose layers can be merged one by one."""

_NAME: Final = "default"


@dataclass(frozen=True)
class Delta:
    """An adapter to be merged: how it fits, its tensors by the file's keys, its weight.

    `own_base` maps the base's parameters that the file has its own values of to its keys.
    """

    decided: Fit
    tensors: Mapping[str, torch.Tensor]
    weight: float = 1.0
    own_base: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def source(self) -> str:
        return self.decided.header.source

    @property
    def paths(self) -> set[str]:
        """The modules that it changes."""
        return {*self.decided.modules, *(name.rpartition(".")[0] for name in self.own_base)}

    @property
    def whole(self) -> dict[str, str]:
        """The parameters that were trained whole, each with the file's key for it."""
        return {
            here.removeprefix(ADAPTED): key
            for key, here in self.decided.keys.items()
            if not self.decided.header.is_own(key)
        }

    def keeps_ties(self, path: str) -> bool:
        """Whether what it changes of a module goes for those that are tied to it, too.

        So do trained token rows, which PEFT puts into both, and the base's own tensors, which were
        tied when the file was written.
        """
        keys = [one for one in self.decided.keys.values() if below(one.removeprefix(ADAPTED), path)]
        return all(".trainable_tokens_" in one for one in keys)


def below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def outermost(paths: set[str]) -> list[str]:
    """The paths that lie below no other one, sorted."""
    found: list[str] = []
    for path in sorted(paths, key=lambda one: (one.count("."), one)):
        if not any(below(path, one) for one in found):
            found.append(path)
    return sorted(found)


def check_mergeable(delta: Delta) -> None:
    """Refuses what cannot be merged into one module after the other.

    Raises:
        AdapterFault: TT314; TT303, a file that holds two values for one tied tensor.
    """
    header = delta.decided.header
    shared = [key for key in delta.decided.keys.values() if not key.startswith(ADAPTED)]
    what = ""
    if header.peft_type not in MERGEABLE or header.is_prompt or shared:
        what = f"is of the kind {header.peft_type}, which cannot be merged module by module"
    elif header.config.get("ensure_weight_tying"):
        what = "was trained with ensure_weight_tying, and its layers cannot be merged one by one"
    elif delta.weight != 1 and (header.saved_keys or delta.own_base or _rows(delta)):
        what = f"holds whole trained tensors, which cannot be weighted with {delta.weight:g}"
    if what:
        raise AdapterFault(
            "TT314",
            f"{header.source} {what}",
            fix="run it beside the base, which is exact",
        )
    _check_repeats(delta)


def _check_repeats(delta: Delta) -> None:
    """What the file repeats for a module that is tied to a changed one is merged once."""
    held = {here.removeprefix(ADAPTED): key for key, here in delta.decided.keys.items()}
    own = {name for name in held if any(below(name, path) for path in delta.decided.modules)}
    for name in held.keys() - own:
        last = name.rpartition(".")[2]
        twins = [delta.tensors[held[one]] for one in own if one.endswith(f".{last}")]
        if not any(torch.equal(one, delta.tensors[held[name]]) for one in twins):
            raise AdapterFault(
                "TT303",
                f"{held[name]} of {delta.source} differs from what the file holds for the module"
                " that it is tied to",
                fix="check that the adapter was made for this model",
            )


def _rows(delta: Delta) -> bool:
    return any(".trainable_tokens_" in key for key in delta.decided.keys.values())


def merge_module(
    module: nn.Module, path: str, given: Mapping[str, torch.Tensor], deltas: Sequence[Delta]
) -> dict[str, torch.Tensor]:
    """The parameters of a module, by name, with adapters merged into them in their order.

    Args:
        module: the module, on `meta`.
        path: its name in the model.
        given: all its parameters by their names in the model; they are written to.
        deltas: the adapters.

    Raises:
        AdapterFault: TT303, TT306, TT312, TT314, TT315, as when an adapter is loaded; TT302 if the
            merged weights are not finite.
    """
    values = dict(given)
    for delta in deltas:
        _put_whole(path, values, delta)
        targets = _targets(path, delta)
        if targets:
            values = _merge(module, path, values, delta, targets)
        _put_rows(path, values, delta)
        broken = [name for name, one in values.items() if not torch.isfinite(one).all()]
        if broken:
            raise AdapterFault(
                "TT302",
                f"{three(broken)} is not finite after {delta.source} was merged",
                why="the adapter or the base holds NaN or infinite weights, or the sum is more than"
                " its dtype holds",
            )
    return values


def _put_whole(path: str, values: dict[str, torch.Tensor], delta: Delta) -> None:
    """Modules that were trained whole, and the base's own tensors where the file has others."""
    for name, key in {**delta.whole, **delta.own_base}.items():
        if below(name, path):
            values[name] = delta.tensors[key].to(values[name].dtype, copy=True)


def _put_rows(path: str, values: dict[str, torch.Tensor], delta: Delta) -> None:
    """Trained token rows beside a LoRA: they stand in the table's place."""
    if delta.decided.header.peft_type == "TRAINABLE_TOKENS":
        return
    for key, here in delta.decided.keys.items():
        module = here.removeprefix(ADAPTED).partition(".token_adapter.")[0]
        if ".trainable_tokens_delta" in here and below(module, path):
            name = f"{module}.weight"
            rows = torch.tensor(_indices(delta, module))
            values[name] = values[name].index_copy(
                0, rows, delta.tensors[key].to(values[name].dtype)
            )


def _indices(delta: Delta, module: str) -> list[int]:
    indices: Any = delta.decided.config.get("trainable_token_indices")
    if isinstance(indices, Mapping):
        indices = next((one for end, one in indices.items() if ends_with(module, [end])), None)
    if not indices:
        raise AdapterFault(
            "TT312",
            f"the config of {delta.source} does not say which rows of {module} it trained",
            fix="restore the adapter_config.json that was saved with these weights",
        )
    return [int(one) for one in indices]


def _targets(path: str, delta: Delta) -> dict[str, str]:
    """The keys of the file that PEFT is to merge at `path`, to what PEFT calls them."""
    return {
        key: here
        for key, here in delta.decided.keys.items()
        if below(here.removeprefix(ADAPTED), path)
        and delta.decided.header.is_own(key)
        and ".token_adapter." not in here
    }


def _merge(
    module: nn.Module,
    path: str,
    values: dict[str, torch.Tensor],
    delta: Delta,
    keys: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    tree = _tree(module, path, values)
    names = {here.removeprefix(ADAPTED) for here in keys.values()}
    own = tuple(one for one in delta.decided.modules if any(below(name, one) for name in names))
    decided = dataclasses.replace(
        delta.decided,
        keys=keys,
        modules=own,
        base_tensors={},
        config=_config(delta, own, list(values)),
    )
    given = {here: delta.tensors[key] for key, here in keys.items()}
    with peft_refusals(decided.header), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT misses the modules that are not in this tree
        adapted = PeftModel(
            tree,
            peft_config(decided),
            _NAME,
            autocast_adapter_dtype=True,
            low_cpu_mem_usage=False,
        )
        check_injected(adapted, decided, given, _NAME)
        set_peft_model_state_dict(adapted, dict(given), adapter_name=_NAME)
        adapted.eval()
        account(adapted, decided, given, _NAME)
        if delta.weight != 1:
            _weigh(adapted, delta)
        # Not safe_merge, which rounds the difference to the base's dtype before it is added.
        merged = adapted.merge_and_unload()
    return {name: one.detach() for name, one in merged.named_parameters()}


def _weigh(model: nn.Module, delta: Delta) -> None:
    layers = [one for one in model.modules() if isinstance(one, BaseTunerLayer)]
    for layer in layers:
        scaling: Any = getattr(layer, "scaling", None)
        if not isinstance(scaling, dict) or _NAME not in scaling:
            raise AdapterFault(
                "TT314",
                f"{delta.source} is of the kind {delta.decided.header.peft_type}, which has no"
                f" scale that could be weighted with {delta.weight:g}",
                fix="leave the weight out",
            )
        scaling[_NAME] *= delta.weight


def _config(delta: Delta, own: tuple[str, ...], names: list[str]) -> dict[str, Any]:
    """The adapter's config for one module by its full name."""
    config = dict(delta.decided.config)
    aimed = config.get("target_parameters") or ()
    parameters = [name for one in aimed for name in names if ends_with(name, [one])]
    holders = {name.rpartition(".")[0] for name in parameters}
    config["target_modules"] = [one for one in own if one not in holders]
    if "target_parameters" in config:
        config["target_parameters"] = parameters or None
    if config.get("feedforward_modules"):
        rules = config["feedforward_modules"]
        config["feedforward_modules"] = [one for one in own if ends_with(one, rules)]
    for field in (
        "modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern", "task_type",
    ):  # fmt: skip
        if field in config:
            config[field] = None
    if delta.decided.header.peft_type != "TRAINABLE_TOKENS":
        config.pop("trainable_token_indices", None)
    if "bias" in config:
        config["bias"] = "none"
    return config


class _Branch(nn.Module):
    """A module on the way to the one that is merged."""


def _tree(module: nn.Module, path: str, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """A model that has one module only, under its full name, with its true parameters."""
    leaf = copy.deepcopy(module)
    for name, value in values.items():
        holder, _, last = name.removeprefix(f"{path}.").rpartition(".")
        setattr(leaf.get_submodule(holder), last, nn.Parameter(value, requires_grad=False))
    root = node = _Branch()
    *steps, last = path.split(".")
    for step in steps:
        node.add_module(step, _Branch())
        node = getattr(node, step)
    node.add_module(last, leaf)
    return root
