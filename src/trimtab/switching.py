"""Which adapter is active, changed in time that does not grow with the number of adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peft import PeftModel

from trimtab import foreign_peft
from trimtab.activity import AdapterLayers


class Switch:
    """Chooses among a model's adapters as PEFT's `set_adapter` does, for inference.

    PEFT walks all modules and all weights of all adapters; this remembers the layers. The weights
    stay frozen. Kinds of adapters for which it is done another way go PEFT's way.
    """

    def __init__(self) -> None:
        self.model: PeftModel | None = None
        self._known: AdapterLayers | None = None
        self._choice: Any = None

    def take_over(self, model: PeftModel) -> None:
        """From now on the model's `set_adapter` is this one; call it for each adapter.

        All weights are frozen, as `load_onto` leaves them: the next choice need not see to it.
        """
        if model is not self.model:
            self.model, self._known = model, AdapterLayers(model)
        vars(model)["set_adapter"] = self.choose
        active = model.active_adapter
        if model.active_adapters == [active] and active in model.peft_config:
            self._choice = ...
            self.choose(active)

    def let_go(self) -> None:
        """Undoes `take_over`, and forgets the model."""
        model, self.model = self.model, None
        if model is not None:
            vars(model).pop("set_adapter", None)
        self._known, self._choice = None, None

    def layers(self) -> list[Any]:
        """PEFT's layers and wrappers; the model is walked only when its adapters have changed."""
        assert self._known is not None
        return self._known.now()

    def choose(self, name: str | list[str], **options: Any) -> None:
        """Makes an adapter the active one, or several; PEFT's `options` are for training.

        Raises:
            ValueError: there is none of that name, as PEFT says it.
        """
        model = self.model
        assert model is not None
        names = [name] if isinstance(name, str) else name
        chosen = None
        if len(names) != 1:
            model.base_model.set_adapter(names)
        else:
            if names[0] in model.peft_config and not self._is_prompt(names[0]):
                chosen = foreign_peft.select_adapter(model, self.layers(), names[0], self._choice)
            if chosen is None:
                # Not the instance's own, which is this one.
                type(model).set_adapter(model, names[0])
        if chosen is None:
            # PEFT makes what it activates trainable; nothing here trains.
            model.requires_grad_(False)
        self._choice = chosen

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """While inside, the model is the base."""
        model = self.model
        assert model is not None
        active = model.active_adapter
        if active not in model.peft_config or self._is_prompt(active):
            with model.disable_adapter():
                yield
            return
        with foreign_peft.adapters_off(model, self.layers()):
            yield

    def _is_prompt(self, name: str) -> bool:
        """Kinds that PEFT switches by replacing methods or modules."""
        assert self.model is not None
        config = self.model.peft_config[name]
        return bool(config.is_prompt_learning or config.is_adaption_prompt)
