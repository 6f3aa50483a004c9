"""Situations that people reported, end to end: each loads, and equals the all-resident model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from placing import carried_out, placed, planned
from trimtab.api import load, plan
from trimtab.errors import PlacementFault, RunningFault
from trimtab.plan import IDLE, LOOKED_UP, STREAMED

SIZES: dict[str, Any] = {"cpu": "2GiB", "disk": "2GiB", "context": 64}
TOWERS = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")
LAYER = "model.language_model.layers."


@pytest.fixture(scope="module")
def gemma4() -> Path:
    return tiny.checkpoint("gemma4")


def equal(found: Any, wanted: Any, given: dict[str, torch.Tensor]) -> None:
    assert torch.equal(tiny.logits(found, given), tiny.logits(wanted, given))
    assert torch.equal(tiny.tokens(found, given), tiny.tokens(wanted, given))


def test_gemma4_towers_off_the_device_and_double_quant(gemma4: Path) -> None:
    """Case 1."""
    adapter = tiny.adapter(gemma4)
    away = {"": "cpu", "model.vision_tower": "disk", "model.audio_tower": "disk"}
    with load(gemma4, {"a": adapter}, quant="nf4-dq", device_map=away, **SIZES) as found:
        modes = {unit.name: unit.mode for unit in found.plan.units}
        assert modes["model.vision_tower"] == modes["model.audio_tower"] == IDLE
        equal(found.model, tiny.reference(gemma4, "nf4-dq", adapter), tiny.inputs(gemma4))
        vision = found.model.get_base_model().get_submodule("model.vision_tower")
        assert all(one.stride() != (0,) or one.ndim < 2 for one in vision.parameters())
        assert sum(tier.measured for tier in found.report().tiers if tier.tier == "disk") > 0


@pytest.mark.parametrize("quant", ["nf4-dq", "none"])
def test_gemma4_layers_that_make_and_reuse_shared_keys_are_away(gemma4: Path, quant: str) -> None:
    """Case 2: a plain layer, the makers of shared keys and values, and layers that reuse them."""
    away = {"": "cpu"} | {f"{LAYER}{index}": "disk" for index in (0, 2, 3, 4, 7)}
    adapter = tiny.adapter(gemma4)
    with load(gemma4, {"a": adapter}, quant=quant, device_map=away, **SIZES) as found:
        assert len(found.plan.of_mode(STREAMED)) == 5
        equal(found.model, tiny.reference(gemma4, quant, adapter), tiny.inputs(gemma4))


def test_a_wrong_key_names_the_nearest_modules(gemma4: Path) -> None:
    """Case 3."""
    with pytest.raises(PlacementFault) as caught:
        load(gemma4, device_map={"": "cpu", "model.multi_modal_projector": "disk"}, **SIZES)
    assert caught.value.code == "TT201"
    assert "model.multi_modal_projector" in caught.value.what
    assert "model.embed_vision" in str(caught.value)


def test_a_buffer_goes_with_its_module(gemma4: Path) -> None:
    """Case 4: `layer_scalar` of a layer that is away is in no map, and is right."""
    away = {"": "cpu", f"{LAYER}7": "disk"}
    with load(gemma4, device_map=away, **SIZES) as found:
        equal(found.model, tiny.reference(gemma4), tiny.inputs(gemma4))


def test_prefixes_of_wrappers_are_understood_and_said(gemma4: Path) -> None:
    """Case 5."""
    away = {"": "cpu", f"base_model.model.{LAYER}1": "disk", "language_model.layers.2": "disk"}
    with load(gemma4, device_map=away, **SIZES) as found:
        streamed = [unit.name for unit in found.plan.of_mode(STREAMED)]
        assert streamed == [f"{LAYER}1", f"{LAYER}2"]
        assert any(f"base_model.model.{LAYER}1" in note for note in found.plan.notes)
        equal(found.model, tiny.reference(gemma4), tiny.inputs(gemma4))


def test_only_wrong_keys_are_an_error() -> None:
    """Case 6."""
    with pytest.raises(PlacementFault, match="transformer") as caught:
        load(tiny.checkpoint("llama"), device_map={"transformer": "cpu"}, **SIZES)
    assert caught.value.code == "TT201"


@pytest.mark.parametrize("away", ["lm_head", "model.embed_tokens"])
def test_tied_embeddings_in_two_tiers_are_one_copy(away: str) -> None:
    """Case 7."""
    folder = tiny.checkpoint("llama-tied")
    with load(folder, device_map={"": "cpu", away: "disk"}, **SIZES) as found:
        base = found.model
        assert base.lm_head.weight is base.model.embed_tokens.weight
        equal(base, tiny.reference(folder), tiny.inputs(folder))


@pytest.mark.parametrize("quant", ["none", "nf4"])
@pytest.mark.parametrize("name", ["gemma4", "gemma3-vlm"])
def test_a_vision_tower_on_disk_answers_an_image_prompt(name: str, quant: str) -> None:
    """Case 9: its `position_embedding_table` is used without a call."""
    folder = tiny.checkpoint(name)
    made = planned(folder, quant, ("towers", "half"), modalities=("text", "image"))
    given = tiny.inputs(folder, modalities=("text", "image"))
    with carried_out(made) as found:
        assert {unit.mode for unit in found.plan.units if unit.kind == "tower"} == {IDLE}
        equal(found.model, tiny.reference(folder, quant), given)


def test_an_image_on_a_text_plan_is_answered_if_the_tower_fits(gemma4: Path) -> None:
    """Case 10."""
    given = tiny.inputs(gemma4, modalities=("text", "image"))
    with placed(gemma4, "nf4", ("towers",)) as found:
        equal(found.model, tiny.reference(gemma4, "nf4"), given)


def test_an_image_on_a_text_plan_is_refused_if_the_tower_does_not_fit(gemma4: Path) -> None:
    """Case 10: with a code, and what runs afterwards is right."""
    made = planned(gemma4, "nf4", ("towers",))
    tight = dataclasses.replace(made.budget, cpu=made.totals["cpu"])
    with carried_out(dataclasses.replace(made, budget=tight)) as found:
        with pytest.raises(RunningFault) as caught:
            found.model(**tiny.inputs(gemma4, modalities=("text", "image")))
        assert caught.value.code == "TT603"
        assert caught.value.parts["unit"] == "model.vision_tower"
        equal(found.model, tiny.reference(gemma4, "nf4"), tiny.inputs(gemma4))


def test_sound_is_heard_by_an_idle_tower(gemma4: Path) -> None:
    given = tiny.inputs(gemma4, modalities=("text", "audio"))
    with placed(gemma4, "none", ("towers", "tables")) as found:
        equal(found.model, tiny.reference(gemma4), given)


def test_int8_layers_leave_the_device_and_take_an_adapter() -> None:
    """Case 11."""
    folder = tiny.checkpoint("llama")
    adapter = tiny.adapter(folder)
    with placed(folder, "int8", ("layers",)) as found:
        found.add_adapter("a", adapter)
        equal(found.model, tiny.reference(folder, "int8", adapter), tiny.inputs(folder))
        for layer in found.model.get_base_model().model.layers:
            state = layer.mlp.up_proj.base_layer.state
            assert state.CB.stride() == state.CB.stride()
            with torch._C.DisableTorchFunctionSubclass():
                assert state.CB.untyped_storage().nbytes() == 1
                assert layer.mlp.up_proj.base_layer.weight.untyped_storage().nbytes() == 1


def test_dora_on_streamed_layers_is_right_and_cannot_be_merged() -> None:
    """Case 13."""
    folder = tiny.checkpoint("llama")
    adapter = tiny.adapter(folder, "dora")
    wanted = tiny.reference(folder, "nf4", adapter)
    with placed(folder, "nf4", ("layers",), {"a": adapter}) as found:
        equal(found.model, wanted, tiny.inputs(folder))


def test_the_most_specific_key_wins_over_a_catch_all(gemma4: Path) -> None:
    """Case 28."""
    away = {"": "disk", "model": "cpu", f"{LAYER}1": "disk", "lm_head": "cpu"}
    with load(gemma4, device_map=away, **SIZES) as found:
        assert [unit.name for unit in found.plan.of_mode(STREAMED)] == [f"{LAYER}1"]
        equal(found.model, tiny.reference(gemma4), tiny.inputs(gemma4))


def test_a_budget_smaller_than_the_model_is_kept_and_equal(gemma4: Path) -> None:
    adapter = tiny.adapter(gemma4)
    roomy = plan(gemma4, {"a": adapter}, quant="nf4", **SIZES)
    sizes = SIZES | {"cpu": int(0.8 * roomy.totals["cpu"])}
    with load(gemma4, {"a": adapter}, quant="nf4", **sizes) as found:
        assert found.plan.of_mode(LOOKED_UP)
        for tier in found.report().tiers:
            assert tier.measured <= tier.planned
        equal(found.model, tiny.reference(gemma4, "nf4", adapter), tiny.inputs(gemma4))
