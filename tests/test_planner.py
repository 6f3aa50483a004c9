from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning import ROOMY, books_balance, many_layers, modes, needed, outline, planned, unit
from trimtab import costs
from trimtab.errors import DoesNotFit, RunningFault
from trimtab.formats import moving_bytes
from trimtab.hardware import ALLOCATOR, CAPTURE, CUDA_CONTEXT
from trimtab.memory import Budget, GiB, KiB, MiB, parse_size
from trimtab.outline import CacheLayer, Outline
from trimtab.plan import (
    IDLE,
    LOOKED_UP,
    RESIDENT,
    STREAMED,
    Plan,
    PlannedAdapter,
    Unit,
    WeightSpec,
)

# ------------------------------------------------------------------------- the order of choices


def test_everything_is_resident_if_it_fits() -> None:
    made = planned("gemma4")
    assert set(modes(made).values()) == {RESIDENT}
    assert {one.rests for one in made.units} == {"gpu:0"}
    assert (made.slots, made.slot_bytes, made.costs["slots"]) == (0, 0, 0)
    assert made.totals["cpu"] == made.totals["disk"] == 0
    assert unit(made, "model.vision_tower").reason.startswith("everything fits; ")
    books_balance(made)


def test_first_what_the_modalities_do_not_need_is_idle() -> None:
    found = outline("gemma4")
    made = planned(found, _tighter(planned(found)))
    towers = [one.name for one in found.units if one.kind == "tower"]
    assert {name for name, mode in modes(made).items() if mode == IDLE} == set(towers)
    assert set(modes(made).values()) == {IDLE, RESIDENT}
    assert {unit(made, name).rests for name in towers} == {"cpu"}
    assert made.costs["bring_in"] == 0
    assert "only prompts with audio use its" in unit(made, "model.audio_tower").reason
    books_balance(made)


def test_then_an_untied_table_is_looked_up() -> None:
    found = outline("gemma4")
    made = planned(found, _tighter(planned(found, _tighter(planned(found)))))
    table = unit(made, "model.language_model.embed_tokens_per_layer")
    assert (table.mode, table.rests, table.moving_bytes) == (LOOKED_UP, "cpu", 256 * 512 * 2)
    assert table.reason.startswith("1.00 KiB of its 256.00 KiB are read for a token")
    assert unit(made, "model.language_model.embed_tokens").mode == RESIDENT
    assert STREAMED not in modes(made).values()
    books_balance(made)


def test_then_the_fewest_layers_are_streamed_evenly() -> None:
    found = many_layers(16)
    slab = moving_bytes("nf4", (256, 256), "bfloat16")
    code = 256  # 64 bytes of code book, aligned
    made = planned(found, dataclasses.replace(ROOMY, gpu=needed(found) - 6 * (slab + code)))
    streamed = [one.name for one in made.units if one.mode == STREAMED]
    # Two slots are held: eight leave the GPU for six to be saved.
    assert streamed == [f"layers.{index}" for index in range(1, 16, 2)]
    assert (made.slots, made.slot_bytes) == (2, slab)
    assert made.forecast.bytes_per_token == 8 * slab
    assert made.totals["cpu"] == 8 * slab
    books_balance(made)


def test_what_ram_cannot_hold_rests_on_the_disk() -> None:
    found = many_layers(16)
    slab = moving_bytes("nf4", (256, 256), "bfloat16")
    gpu = needed(found) - 6 * (slab + 256)
    made = planned(found, Budget("gpu:0", gpu, 6 * slab, 8 * slab))
    rests = [one.rests for one in made.units if one.mode == STREAMED]
    # Two staging buffers are in RAM as well.
    assert rests == ["cpu"] * 4 + ["disk"] * 4
    assert made.totals == {"gpu:0": made.totals["gpu:0"], "cpu": 6 * slab, "disk": 4 * slab}
    books_balance(made)


def test_a_cpu_that_runs_uses_the_disk_and_two_slots() -> None:
    found = many_layers(8)
    slab = moving_bytes("nf4", (256, 256), "bfloat16")
    whole = needed(found, "cpu")
    made = planned(found, Budget("cpu", 0, whole - 2 * slab, GiB))
    assert [one.rests for one in made.of_mode(STREAMED)] == ["disk"] * 4
    assert (made.slots, made.totals["disk"]) == (2, 4 * slab)
    assert made.costs["context"] == 0
    assert set(made.totals) == {"cpu", "disk"}
    books_balance(made)


def test_towers_that_are_needed_are_brought_in_before_layers_are_streamed() -> None:
    found = outline("gemma4")
    both = ("text", "image", "audio")
    made = planned(found, modalities=both)
    made = planned(found, _tighter(made), modalities=both)
    assert {one.mode for one in made.units if one.kind == "tower"} == {RESIDENT}
    assert len(made.of_mode(LOOKED_UP)) == 1
    made = planned(found, _tighter(made), modalities=both)
    sizes = [one.moving_bytes for one in made.units if one.kind == "tower"]
    assert {one.mode for one in made.units if one.kind == "tower"} == {IDLE}
    assert made.costs["bring_in"] == max(sizes)
    assert STREAMED not in modes(made).values()
    assert "the room is counted" in unit(made, "model.vision_tower").reason
    books_balance(made)


def _tighter(made: Plan) -> Budget:
    """A byte less than what this plan takes."""
    return dataclasses.replace(ROOMY, gpu=made.totals["gpu:0"] - 1)


def test_an_untied_head_is_streamed_last() -> None:
    found = outline("llama")
    made = planned(found, Budget("cpu", 0, 8 * GiB, GiB))
    smallest = _smallest(found, Budget("cpu", 0, 1, GiB))
    made = planned(found, Budget("cpu", 0, smallest, GiB))
    assert modes(made)["lm_head"] == STREAMED
    assert modes(made)["model.layers.0"] == STREAMED
    assert modes(made)["model.embed_tokens"] == LOOKED_UP
    assert unit(made, "model.embed_tokens").rests == "disk"
    books_balance(made)


def _smallest(found: Outline, budget: Budget) -> int:
    with pytest.raises(DoesNotFit) as caught:
        planned(found, budget)
    smallest = caught.value.parts["smallest"]
    assert isinstance(smallest, int)
    return smallest


# ------------------------------------------------------------------------------------ what counts


def test_a_longer_context_and_a_larger_batch_cost_more() -> None:
    short, long, wide = (planned("llama", **one) for one in ({}, {"context": 64}, {"batch": 2}))
    assert long.costs["kv_cache"] == wide.costs["kv_cache"] == 2 * short.costs["kv_cache"]
    assert wide.costs["logits"] == 2 * short.costs["logits"]
    assert short.costs["context"] == CUDA_CONTEXT


def test_adapters_are_resident() -> None:
    adapter = PlannedAdapter("sql", "./sql", 5 * MiB, 12)
    with_it = planned("llama", adapters=[adapter])
    assert with_it.costs["adapters"] == 5 * MiB
    assert with_it.adapters == (adapter,)


def test_loading_is_counted_where_it_is_more_than_running() -> None:
    found = outline("llama", "nf4")
    made = planned(found, context=1)
    later = made.costs["kv_cache"] + made.costs["logits"]
    running = costs.activations(found, 1, 1) + costs.decoding(found.weights, "gpu:0")
    loading = 256 * 128 * 2 * 7 // 5
    assert made.costs["transient"] == max(loading - later, running)


def test_a_plan_is_saved_whole(tmp_path: Any) -> None:
    made = planned("gemma4", device_map={"": 0, "model.vision_tower": "cpu"}, model="m")
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


# ------------------------------------------------------------------------------------- refusals


def test_it_does_not_fit_the_device_that_runs() -> None:
    found = many_layers(8)
    budget = Budget("gpu:0", 100 * MiB, GiB, GiB)
    with pytest.raises(DoesNotFit) as caught:
        planned(found, budget, context=1024, batch=2)
    problem = caught.value
    assert (problem.code, problem.exit_code, problem.parts["tier"]) == ("TT401", 3, "gpu:0")
    smallest = problem.parts["smallest"]
    assert isinstance(smallest, int)
    assert problem.parts["shortfall"] == smallest - budget.gpu
    for said in ("give --gpu at least", "a context of 512 saves", "a batch of 1 saves", "nf4-dq"):
        assert said in problem.fix
    assert problem.why.startswith("beside the weights that stay it holds: context 784.00 MiB")
    least = dataclasses.replace(budget, gpu=smallest)
    assert planned(found, least, context=1024, batch=2).totals["gpu:0"] == smallest
    with pytest.raises(DoesNotFit):
        planned(found, dataclasses.replace(least, gpu=smallest - 1), context=1024, batch=2)


def test_it_does_not_fit_ram_and_disk() -> None:
    found = many_layers(16)
    slab = moving_bytes("nf4", (256, 256), "bfloat16")
    gpu = needed(found) - 6 * (slab + 256)
    with pytest.raises(DoesNotFit) as caught:
        planned(found, Budget("gpu:0", gpu, 7 * slab, 0))
    assert caught.value.parts["tier"] == "cpu and disk"
    assert caught.value.fix.startswith("give --cpu or --disk ")
    with pytest.raises(DoesNotFit) as caught:
        planned(found, Budget("cpu", 0, needed(found, "cpu") - 1, 0))
    assert caught.value.fix.startswith("give --disk ")


@pytest.mark.parametrize(("name", "asked"), [("llama", "image"), ("gemma3-vlm", "audio")])
def test_a_modality_that_the_model_does_not_take(name: str, asked: str) -> None:
    with pytest.raises(RunningFault) as caught:
        planned(name, modalities=("text", asked))
    assert caught.value.code == "TT607"


# ----------------------------------------------------------------------------------- properties


@st.composite
def outlines(draw: st.DrawFn) -> Outline:
    """Models with units of unequal sizes: tables, towers, layers, a head tied or not."""
    size = st.integers(1, 6).map(lambda times: 64 * times)

    def weights(name: str, count: int) -> tuple[WeightSpec, ...]:
        storage = draw(st.sampled_from(["plain", "nf4", "nf4-dq", "int8"]))
        return tuple(
            WeightSpec(f"{name}.{at}", (draw(size), 64), "bfloat16", storage) for at in range(count)
        )

    def units(kind: str, most: int, needs: tuple[str, ...] = ()) -> list[Unit]:
        return [
            Unit(f"{kind}.{at}", kind, weights(f"{kind}.{at}", 1 + at % 2), needs=needs)
            for at in range(draw(st.integers(0, most)))
        ]

    towers = [*units("tower", 2, ("image",))]
    tables, layers = units("table", 2), units("layer", 9)
    tied = bool(tables) and draw(st.booleans())
    ties = (("head.0", tables[0].weights[0].name),) if tied else ()
    head = Unit(
        "head", "head", () if tied else weights("head", 1), tied_to="table.0" if tied else None
    )
    rest = Unit("", "rest", (WeightSpec("norm", (64,), "bfloat16"),), buffer_bytes=100)
    cache = (CacheLayer(1, 16, draw(st.sampled_from([None, 8])), False),) * len(layers)
    nothing: frozenset[str] = frozenset()
    return Outline(
        "A", (*towers, *tables, *layers, head, rest), ties, cache, 64, 64, "bfloat16", "nf4",
        nothing, nothing,
    )  # fmt: skip


def attempt(found: Outline, budget: Budget, modalities: tuple[str, ...]) -> Plan | int:
    """The plan, or the shortfall in bytes."""
    try:
        return planned(found, budget, context=4, modalities=modalities)
    except DoesNotFit as problem:
        return int(str(problem.parts["shortfall"]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(found=outlines(), data=st.data())
def test_a_plan_keeps_its_budget_and_more_of_it_never_streams_more(
    found: Outline, data: st.DataObject
) -> None:
    on_gpu = data.draw(st.booleans())
    amount = st.integers(0, 1200 * KiB)
    base = CUDA_CONTEXT + ALLOCATOR + CAPTURE if on_gpu else 0
    budget = Budget(
        "gpu:0" if on_gpu else "cpu",
        base + data.draw(amount) if on_gpu else 0,
        data.draw(amount),
        data.draw(amount),
    )
    seen = any(one.kind == "tower" for one in found.units) and data.draw(st.booleans())
    modalities = ("text", "image") if seen else ("text",)
    made = attempt(found, budget, modalities)
    more = dataclasses.replace(
        budget,
        gpu=budget.gpu + (data.draw(amount) if on_gpu else 0),
        cpu=budget.cpu + data.draw(amount),
        disk=budget.disk + data.draw(amount),
    )
    larger = attempt(found, more, modalities)
    if isinstance(made, int):
        assert made > 0
        return
    books_balance(made)
    limits = {"gpu:0": budget.gpu, "cpu": budget.cpu, "disk": budget.disk}
    assert all(total <= limits[tier] for tier, total in made.totals.items())
    assert [one.name for one in made.units] == [one.name for one in found.units]
    assert all(one.rests in limits and one.reason for one in made.units)
    assert isinstance(larger, Plan)
    assert larger.forecast.bytes_per_token <= made.forecast.bytes_per_token


@settings(max_examples=30, deadline=None, derandomize=True)
@given(found=outlines(), amount=st.integers(0, 600 * KiB))
def test_the_smallest_budget_that_an_error_names_is_enough(found: Outline, amount: int) -> None:
    budget = Budget("cpu", 0, amount, GiB)
    try:
        planned(found, budget, context=4)
    except DoesNotFit as problem:
        smallest = int(str(problem.parts["smallest"]))
    else:
        return
    planned(found, dataclasses.replace(budget, cpu=smallest), context=4)
    with pytest.raises(DoesNotFit):
        planned(found, dataclasses.replace(budget, cpu=smallest - 1), context=4)


@pytest.mark.parametrize("asked", [{"context": 0}, {"context": -4000}, {"batch": 0}])
def test_a_call_of_nothing_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(RunningFault, match="no call has") as caught:
        planned("llama", **asked)
    assert caught.value.code == "TT607"


@pytest.mark.parametrize("name", ["llama", "gemma4"])
@pytest.mark.parametrize("given", [Budget("cpu", 0, 1, 0), Budget("cpu", 0, 1, GiB)])
def test_the_fix_works_when_it_is_followed(name: str, given: Budget) -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned(name, given)
    first = caught.value.fix.split(";")[0]
    sizes = {
        flag: parse_size(size)
        for flag, size in re.findall(r"--(cpu|disk) at least ([\d.]+ \w+)", first)
    }
    assert ("disk" in sizes) == (given.disk == 0)
    made = planned(name, dataclasses.replace(given, **sizes))
    assert made.of_mode(STREAMED)
