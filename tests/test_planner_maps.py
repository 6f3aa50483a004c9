"""Device maps are obeyed, and what a map cannot have is said."""

from __future__ import annotations

import pytest

from planning import books_balance, modes, outline, planned, unit
from trimtab.drafts import move
from trimtab.errors import DoesNotFit, EnvironmentFault
from trimtab.memory import Budget, GiB
from trimtab.plan import IDLE, LOOKED_UP, RESIDENT, STREAMED


def test_a_map_is_obeyed() -> None:
    layer = "model.language_model.layers"
    made = planned(
        "gemma4",
        device_map={
            "": 0,
            "model.vision_tower": "cpu",
            "model.embed_vision": "disk",
            f"{layer}.1": "cpu",
            f"{layer}.3": "disk",
            f"{layer}.5.mlp": "cpu",
            "model.language_model.embed_tokens_per_layer": "cpu",
        },
    )
    away = {one.name: (one.mode, one.rests) for one in made.units if one.mode != RESIDENT}
    assert away == {
        "model.vision_tower": (IDLE, "cpu"),
        "model.embed_vision": (IDLE, "disk"),
        "model.language_model.embed_tokens_per_layer": (LOOKED_UP, "cpu"),
        f"{layer}.1": (STREAMED, "cpu"),
        f"{layer}.3": (STREAMED, "disk"),
        f"{layer}.5": (STREAMED, "cpu"),
    }
    assert all(".mlp." in name for name in unit(made, f"{layer}.5").moving)
    assert made.notes[-1].endswith("parameters of one dimension (norms, biases) stay on gpu:0")
    books_balance(made)


@pytest.mark.parametrize("away", ["lm_head", "model.embed_tokens"])
def test_tied_tables_have_one_copy(away: str) -> None:
    made = planned("llama-tied", device_map={"": 0, away: "cpu"})
    assert set(modes(made).values()) == {RESIDENT}
    said = [note for note in made.notes if "there is one copy" in note]
    assert bool(said) == (away == "model.embed_tokens")


def test_a_table_on_the_disk_of_a_gpu_rests_in_ram() -> None:
    made = planned("llama", device_map={"": 0, "model.embed_tokens": "disk"})
    assert (modes(made)["model.embed_tokens"], made.totals["disk"]) == (LOOKED_UP, 0)
    assert unit(made, "model.embed_tokens").rests == "cpu"
    assert "a GPU reads rows of RAM" in made.notes[0]


def test_parts_of_a_unit_in_two_tiers() -> None:
    layer = "model.layers.2"
    made = planned("llama", device_map={"": 0, f"{layer}.mlp": "cpu", f"{layer}.self_attn": "disk"})
    assert unit(made, layer).rests == "disk"
    assert made.notes[0] == f"parts of {layer} are mapped to cpu and to disk: all rest on the disk"


def test_everything_away() -> None:
    """A catch-all to the disk: what cannot move stays, and is said."""
    made = planned("gemma4", Budget("cpu", 0, GiB, GiB), device_map={"": "disk"})
    assert {one.mode for one in made.units if one.kind == "layer"} == {STREAMED}
    assert unit(made, "model.language_model.embed_tokens").mode == RESIDENT
    assert unit(made, "").mode == RESIDENT
    books_balance(made)


def test_a_map_that_names_a_gpu_without_one() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        planned("llama", Budget("cpu", 0, GiB, 0), device_map={"": 0})
    assert caught.value.code == "TT103"


def test_a_map_is_counted_against_the_budget() -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned("llama", Budget("gpu:0", GiB, 10, 0), device_map={"": 0, "model.layers.1": "cpu"})
    assert caught.value.what.startswith("as the device map places it, the model does not fit")
    assert caught.value.parts["tier"] == "cpu and disk"


@pytest.mark.parametrize("modalities", [("text",), ("text", "image")])
def test_what_is_said_of_an_idle_tower_is_what_it_does(modalities: tuple[str, ...]) -> None:
    """`rooms.BringIn` lets in what the spare bytes, and those for towers that are needed, hold."""
    towers = {one.name: move(one, IDLE).room for one in outline("gemma4").units if one.needs}
    mapped = {"device_map": {"": 0, **dict.fromkeys(towers, "cpu")}, "modalities": modalities}
    least = planned("gemma4", **mapped).totals["gpu:0"]
    said = set()
    for more in {one + extra for one in (0, *towers.values()) for extra in (-1, 0, 4096)} - {-1}:
        made = planned("gemma4", Budget("gpu:0", least + more, GiB, 0), **mapped)
        for one in made.of_mode(IDLE):
            if "can be brought in" not in one.reason and "cannot be" not in one.reason:
                continue
            lets = towers[one.name] <= made.spare + made.costs["bring_in"]
            assert ("can be brought in" in one.reason) == lets
            said.add(lets)
    assert said == {True, False}
