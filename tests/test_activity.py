"""PEFT's layers are found again when they have changed, and what they apply is told apart."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from placing import placed
from trimtab import foreign
from trimtab.activity import ActiveAdapters


def test_the_model_is_walked_when_its_adapters_change_and_not_for_each_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny.checkpoint("llama")
    walks: list[object] = []
    walk = foreign.adapter_layers
    with placed(folder, adapters={"a": tiny.adapter(folder)}) as placement:
        base_model = placement.model.get_base_model()

        def counted(model: Any) -> Any:
            if model is base_model:  # others walk the whole of PEFT's model
                walks.append(model)
            return walk(model)

        monkeypatch.setattr(foreign, "adapter_layers", counted)
        active = ActiveAdapters(base_model)
        one = active.state()
        with placement.using(None):
            base = active.state()
        assert active.state() == one != base
        assert len(walks) == 1
        placement.add_adapter("b", tiny.adapter(folder, seed=7))
        two = active.state()
        with placement.using("b"):
            assert active.state() not in (one, two, base)
        assert len(walks) == 2
        # PEFT's own way, past the placement: the layers are gone, the configs may stay.
        placement.model.unload()
        assert len(active.state()) < len(two)
        assert len(walks) == 3
