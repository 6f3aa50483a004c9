"""An adapter's weights put into the place of a loaded one's: no layer is made, nothing is moved."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import PeftModel

from trimtab import foreign, foreign_peft
from trimtab.adapted import adapter_state
from trimtab.adapters import ADAPTED, load_tensors
from trimtab.apply import ReadBase, check_base_tensors, peft_config
from trimtab.compat import HARMLESS
from trimtab.errors import AdapterFault
from trimtab.fit import Fit, three
from trimtab.naming import pattern_value
from trimtab.proof import Applied

_SHOWN_BY_KEYS: Final = frozenset(
    (
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "modules_to_save", "lora_dropout",
    )
)  # fmt: skip
"""Config fields that say where an adapter goes, which its keys say too, or that only train."""

_SCALES: Final = frozenset(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"))
"""Config fields of a LoRA that make its ranks and its scaling."""

_PLAIN_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal")

_RANK_AXIS: Final = {
    "lora_A.weight": 0, "lora_B.weight": 1, "lora_embedding_A": 0, "lora_embedding_B": 1,
}  # fmt: skip
"""Which dimension of a LoRA's matrix is its rank, by the end of its key."""


@dataclass(frozen=True)
class Exchange:
    """A tensor in the model and the values that come there; `axis` is that of a LoRA's rank.

    A smaller rank leaves zeros beside it; a larger one `grows`, and needs memory of its own.
    """

    here: torch.Tensor
    new: torch.Tensor
    axis: int | None

    @property
    def grows(self) -> bool:
        return self.axis is not None and self.new.shape[self.axis] > self.here.shape[self.axis]

    @property
    def filled(self) -> torch.Tensor:
        """The part of the tensor in the model that holds the values."""
        axis = self.axis or 0
        return self.here.detach().narrow(axis, 0, self.new.shape[axis])

    def carry_out(self) -> None:
        if self.grows:
            shape = self.new.shape
            self.here.data = torch.empty(shape, dtype=self.here.dtype, device=self.here.device)
        elif self.filled.shape != self.here.shape:
            self.here.zero_()
        self.filled.copy_(self.new)

    def is_done(self) -> bool:
        filled = self.filled
        if not torch.equal(filled, self.new.to(filled)):
            return False
        return filled.shape == self.here.shape or torch.equal(
            filled.count_nonzero(), self.here.count_nonzero()
        )


@dataclass(frozen=True)
class Scale:
    """A layer's scaling, which is `alpha / rank` or, with rsLoRA, `alpha / sqrt(rank)`."""

    layer: Any
    path: str
    value: float
    rank: int
    alpha: float


class Swap:
    """What an adapter in the place of a loaded one changes, found before anything is changed.

    Args:
        model: the model.
        decided: how the new adapter fits the base.
        name: that of the loaded adapter.
        read_base: reads a parameter of the base, if the model's own is not to be read.

    Raises:
        AdapterFault: TT321, it cannot take that place; TT310, the file holds other values for
            tensors of the base.
    """

    def __init__(
        self, model: PeftModel, decided: Fit, name: str, read_base: ReadBase | None = None
    ) -> None:
        tensors = load_tensors(decided.header)
        check_base_tensors(model, decided, tensors, read_base)
        self._decided, self._name = decided, name
        self._config, self._fresh = model.peft_config[name], peft_config(decided)
        # The ranks of experts stand side by side in one matrix: no zeros fit between.
        self._scaled = decided.header.peft_type == "LORA" and not decided.header.target_parameters
        self._check_config()
        given = {here: tensors[key] for key, here in decided.keys.items()}
        layers = [layer for _, _, layer in foreign.adapter_layers(model)]
        with foreign_peft.adapters_hidden(layers, shown=name):
            state = adapter_state(model, decided.header, name)
        self._exchanges = self._match(state, given)
        self._scales = self._new_scales(model, given) if self._scaled else []

    @property
    def growth(self) -> int:
        """Bytes of the new places that larger ranks need."""
        return sum(
            one.new.numel() * one.here.element_size() for one in self._exchanges if one.grows
        )

    @property
    def keeps_steps(self) -> bool:
        """Whether what was captured with the loaded adapter computes the new one."""
        return not self.growth and all(
            one.layer.scaling[self._name] == one.value for one in self._scales
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def carry_out(self) -> Applied:
        """Swaps, and compares every tensor with the file's; if that fails, all is as it was.

        Raises:
            AdapterFault: TT303, a tensor did not arrive.
        """
        header = self._decided.header
        with self._undone():
            for one in self._exchanges:
                one.carry_out()
            wrong = sum(not one.is_done() for one in self._exchanges)
            if wrong:
                raise AdapterFault(
                    "TT303", f"{wrong} tensors of {header.source} did not arrive in the model"
                )
            for scale in self._scales:
                scale.layer.scaling[self._name] = scale.value
                scale.layer.r[self._name] = scale.rank
                scale.layer.lora_alpha[self._name] = scale.alpha
            # The same object: captured steps know an adapter by it.
            vars(self._config).update(vars(self._fresh), **self._padded_fields())
        held = {id(one.here): one.here.nbytes for one in self._exchanges}
        return Applied(
            self._name,
            header.source,
            self._decided.modules,
            len(self._exchanges),
            sum(held.values()),
            self._decided.notes,
        )

    def _check_config(self) -> None:
        header = self._decided.header
        if header.is_prompt or header.peft_type == "ADAPTION_PROMPT":
            raise self._refusal(
                f"an adapter of the kind {header.peft_type} is not made of weights in layers"
            )
        if self._config.peft_type != self._fresh.peft_type:
            raise self._refusal(f"it is {header.peft_type}, not {self._config.peft_type.value}")
        old, new = vars(self._config), vars(self._fresh)
        free = HARMLESS | _SHOWN_BY_KEYS | (_SCALES if self._scaled else frozenset())
        starts = [one.get("init_lora_weights", True) for one in (old, new)]
        if all(one in _PLAIN_STARTS for one in starts):
            free |= {"init_lora_weights"}
        names = sorted(
            name
            for name in {*old, *new} - free
            if not name.startswith("_") and _plain(old.get(name)) != _plain(new.get(name))
        )
        if names:
            told = ", ".join(f"{one} is {new.get(one)!r}, not {old.get(one)!r}" for one in names)
            raise self._refusal(f"its config differs: {told}")

    def _match(
        self,
        state: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> list[Exchange]:
        own = {key: one for key, one in state.items() if isinstance(one, torch.nn.Parameter)}
        reached = {id(own[key]) for key in given if key in own}
        lacking = [key for key, one in own.items() if id(one) not in reached]
        strange = [key for key in given if key not in state]
        for what, keys in (("lacks", lacking), ("has also", strange)):
            if keys:
                raise self._refusal(f"its file {what} {len(keys)} tensors: {three(keys)}")
        found = []
        for key, new in given.items():
            here, axis = state[key], self._axis(key)
            differs = [n for n in range(new.ndim) if new.ndim != here.ndim or
                       new.shape[n] != here.shape[n]]  # fmt: skip
            if differs and (axis is None or differs != [axis] or new.ndim != 2):
                raise self._refusal(f"{key} is {list(new.shape)}, not {list(here.shape)}")
            found.append(Exchange(here, new, axis))
        return found

    def _axis(self, key: str) -> int | None:
        if not self._scaled:
            return None
        return next((axis for end, axis in _RANK_AXIS.items() if key.endswith(f".{end}")), None)

    def _new_scales(self, model: PeftModel, given: Mapping[str, torch.Tensor]) -> list[Scale]:
        found = []
        config: Any = self._fresh
        for key, one in zip(given, self._exchanges, strict=True):
            if not key.endswith((".lora_A.weight", ".lora_embedding_A")):
                continue
            path = key.removeprefix(ADAPTED).rpartition(".lora_")[0]
            asked = pattern_value(config.rank_pattern or {}, path, config.r)
            alpha = pattern_value(config.alpha_pattern or {}, path, config.lora_alpha)
            root = math.sqrt if config.use_rslora else float
            value = alpha / root(asked)
            rank = max(one.here.shape[0], one.new.shape[0])
            if rank != asked:
                alpha = _alpha(value, root(rank))
            found.append(Scale(model.get_submodule(ADAPTED + path), path, value, rank, alpha))
        return found

    def _padded_fields(self) -> dict[str, Any]:
        """The ranks as they are in the model, zeros included, so that it is saved as it is."""
        if not self._scales:
            return {}
        config: Any = self._fresh
        ranks, alphas = dict(config.rank_pattern or {}), dict(config.alpha_pattern or {})
        exact: tuple[dict[str, int], dict[str, float]] = ({}, {})
        for one in self._scales:
            told = f"^{re.escape(one.path)}"
            if one.rank != pattern_value(ranks, one.path, config.r):
                exact[0][told], exact[1][told] = one.rank, one.alpha
        kinds = {(one.rank, one.alpha) for one in self._scales}
        if exact[0] and len(kinds) == 1:
            ((rank, alpha),) = kinds
            return {"r": rank, "lora_alpha": alpha, "rank_pattern": {}, "alpha_pattern": {}}
        if not exact[0]:
            return {}
        # The first pattern that matches counts.
        return {"rank_pattern": {**exact[0], **ranks}, "alpha_pattern": {**exact[1], **alphas}}

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Puts back weights, scalings and config if what is inside fails."""
        config = dict(vars(self._config))
        # What grows leaves its old place as it is; what is written over is kept in host memory.
        places = [(one.here, one.here.data) for one in self._exchanges if one.grows]
        values = [
            (one.here, one.here.detach().to("cpu", copy=True))
            for one in self._exchanges
            if not one.grows
        ]
        scales = [
            (held, held[self._name])
            for one in self._scales
            for held in (one.layer.scaling, one.layer.r, one.layer.lora_alpha)
        ]
        try:
            yield
        except BaseException:
            for here, place in places:
                here.data = place
            for here, value in values:
                here.copy_(value)
            for held, before in scales:
                held[self._name] = before
            vars(self._config).clear()
            vars(self._config).update(config)
            raise

    def _refusal(self, why: str) -> AdapterFault:
        return AdapterFault(
            "TT321",
            f"{self._decided.header.source} cannot take the place of the adapter {self._name!r}",
            why=why,
            fix="remove that adapter and add this one, or load it under another name",
        )


def _plain(value: Any) -> Any:
    """A config's value, where nothing is nothing and an order that PEFT does not keep is none."""
    return (sorted(value) if isinstance(value, set | list) else value) or None


def _alpha(scale: float, divisor: float) -> float:
    """What divided by `divisor` is `scale`, to the last bit if there is such a number."""
    near = scale * divisor
    candidates = (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf))
    return next((one for one in candidates if one / divisor == scale), near)
