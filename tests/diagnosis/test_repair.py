"""A faulty map is corrected: `check` finds nothing in what comes out, and it loads."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from trimtab import load
from trimtab.checkpoint import open_checkpoint
from trimtab.devicemap import known_names, match_device_map, most_specific
from trimtab.diagnosis import Repair, check, repair
from trimtab.diagnosis.repair import corrected
from trimtab.hardware import Gpu, Hardware
from trimtab.memory import GiB
from trimtab.outline import Outline, build_outline

ROOM: dict[str, Any] = {"ram_total": 32 * GiB, "ram_available": 16 * GiB, "disk_free": 99 * GiB}
CARD = Hardware(gpus=(Gpu("a card", 8 * GiB, 8 * GiB),), **ROOM)
NO_GPU = Hardware(gpus=(), **ROOM)

FAULTY: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("llama", {}),
    "misspelt": ("llama", {"": 0, "model.layer.3": "cpu"}),
    "no such projector": ("gemma4", {"": 0, "model.multi_modal_projector": "cpu"}),
    "only wrong keys": ("llama", {"transformer": 0}),
    "of another class": ("llama", {"": 0} | {f"transformer.h.{n}": "cpu" for n in range(20)}),
    "for gpt2, of a llama": ("gpt2", {"model.layers.1": "cpu", "model.embed_tokens": 0}),
    "of the text model": ("gemma4", {"": 0, "model.layers.1": "cpu", "language_model": 0}),
    "wrapped by PEFT": ("llama", {"": 0, "base_model.model.model.layers.0.mlp": "cpu"}),
    "wrapped twice": ("llama", {"": 0, "module.base_model.model.model.layers.0": "cpu"}),
    "an adapted layer": ("llama", {"": 0, "model.layers.0.mlp.up_proj.base_layer": "cpu"}),
    "a pattern": ("llama", {"": 0, "model.layers.*": "cpu"}),
    "values": ("llama", {"": None, "lm_head": "meta", "model.layers.1": "cuda:1"}),
    "lacks a norm": ("gpt2", {"transformer.h": 0, "transformer.wte": 0, "transformer.wpe": 0}),
    "lacks layers": ("llama", {"model.embed_tokens": 0, "model.layers.0": "cpu", "lm_head": 0}),
    "each of them": (
        "llama",
        {"model.embed_tokens": 0, "model.layers.0": "gpu:1", "transformer.h.2": 0, "lm_head": "x"},
    ),
}
"""The faulty maps of this folder's tests and of the device map's."""


@functools.cache
def outline(name: str) -> Outline:
    return build_outline(open_checkpoint(tiny.checkpoint(name)))


def repaired(name: str, device_map: Any, **asked: Any) -> Repair:
    found = repair(tiny.checkpoint(name), device_map, **{"hardware": CARD, **asked})
    assert found is not None
    return found


@pytest.mark.parametrize("machine", [CARD, NO_GPU], ids=["GPU", "no GPU"])
@pytest.mark.parametrize("which", FAULTY)
def test_nothing_is_found_in_a_corrected_map(which: str, machine: Hardware) -> None:
    name, faulty = FAULTY[which]
    folder = tiny.checkpoint(name)
    found = repaired(name, faulty, hardware=machine)
    assert found.changes
    assert found.left == ()
    again = check(folder, found.device_map, hardware=machine)
    assert {one.severity for one in again} <= {"note"}
    assert not {"TT223"} & {one.code for one in again}
    # What is corrected needs no correction.
    assert repaired(name, found.device_map, hardware=machine) == Repair(found.device_map, (), ())


@pytest.mark.parametrize("which", FAULTY)
def test_a_corrected_map_loads(which: str) -> None:
    name, faulty = FAULTY[which]
    folder = tiny.checkpoint(name)
    # A second tier of a machine without a GPU: what would be in RAM lies on the disk.
    faulty = {key: "disk" if value == "cpu" else value for key, value in faulty.items()}
    found = repaired(name, faulty, hardware=NO_GPU, disk="1GiB")
    with load(folder, device_map=found.device_map, cpu="2GiB", disk="1GiB", context=64) as placed:
        inputs = tiny.inputs(folder)
        assert torch.equal(
            tiny.logits(placed.model, inputs), tiny.logits(tiny.reference(folder), inputs)
        )


@pytest.mark.parametrize(
    ("which", "key", "tier"),
    [
        ("misspelt", "model.layers.3", "cpu"),
        ("no such projector", "model.embed_vision", "cpu"),
        ("no such projector", "model.embed_audio", "cpu"),
        ("of another class", "model.layers", "cpu"),
        ("for gpt2, of a llama", "transformer.h.1", "cpu"),
        ("of the text model", "model.language_model.layers.1", "cpu"),
        ("wrapped by PEFT", "model.layers.0.mlp", "cpu"),
        ("wrapped twice", "model.layers.0", "cpu"),
        ("an adapted layer", "model.layers.0.mlp.up_proj", "cpu"),
        ("a pattern", "model.layers", "cpu"),
        ("only wrong keys", "", 0),
        ("nothing", "", 0),
        ("values", "", "cpu"),
        ("lacks a norm", "", 0),
        ("lacks layers", "model.layers.3", 0),
    ],
)
def test_keys_become_the_names_that_they_mean(which: str, key: str, tier: int | str) -> None:
    assert repaired(*FAULTY[which]).device_map[key] == tier


def test_what_was_changed_is_said() -> None:
    name, faulty = FAULTY["each of them"]
    assert repaired(name, faulty).changes == (
        "'transformer.h.2': read as 'model.layers.2'",
        "'model.layers.0': mapped to cpu, since 'gpu:1' is a second GPU",
        "'lm_head': mapped to cpu, since 'x' names no tier",
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 36 more: mapped to 0, since no key covers it",
    )
    assert repaired("llama", FAULTY["of another class"][1]).changes[-1] == (
        "'transformer.h.10', 'transformer.h.11', 'transformer.h.12' and 11 more: left out, since "
        "nothing is like it"
    )


def test_a_right_map_stays() -> None:
    given_map = {"": "cuda:0", "model.layers.1": "cpu"}
    assert repaired("llama", given_map) == Repair({"": 0, "model.layers.1": "cpu"}, (), ())


def test_a_buffer_goes_with_its_module() -> None:
    """Case 4: stock, `layer_scalar` has no device in such a map."""
    leaves = {one.name for one in outline("gemma4").weights}
    faulty = dict.fromkeys(leaves, 0) | dict.fromkeys(
        (one for one in leaves if ".layers.7." in one and "language" in one), "cpu"
    )
    found = repaired("gemma4", faulty)
    assert found.device_map["model.language_model.layers.7"] == "cpu"
    assert any("layer_scalar" in one for one in found.changes)


def test_a_plan_s_own_map_where_the_budget_does_not_hold_the_given_one() -> None:
    sizes = {"cpu": "2MiB", "disk": "1GiB", "context": 64, "quant": "none"}
    found = repaired("llama", {"": "cpu"}, hardware=NO_GPU, **sizes)
    assert found.changes[-1].startswith("the budget does not hold what the map asks for")
    assert found.left == ()
    assert "disk" in found.device_map.values()
    folder = tiny.checkpoint("llama")
    again = check(folder, found.device_map, hardware=NO_GPU, **sizes)
    assert {one.severity for one in again} == {"note"}


def test_what_no_map_mends_is_left(tmp_path: Path) -> None:
    found = repaired("llama", {"transformer": 0}, adapters=tmp_path / "none", gpu="1KiB")
    assert found.device_map == {"": 0}
    assert [one.code for one in found.left] == ["TT301", "TT401"]
    assert repair(tmp_path / "nowhere", {"": 0}, hardware=CARD) is None
    assert [one.code for one in repaired("llama", {"x": 0}, gpu="much").left] == ["TT402"]


# ------------------------------------------------------------------------------------- any map

NAMES = sorted(known_names(outline("llama")))
MUTATIONS = {
    "real": str,
    "wrapped": lambda name: f"base_model.model.{name}",
    "misspelt": lambda name: name.replace("e", "a", 1),
    "short": lambda name: name.removeprefix("model."),
    "another class": lambda name: name.replace("model.layers", "transformer.h"),
    "cut": lambda name: name[:-1],
}
KEYS = st.builds(
    lambda name, how: MUTATIONS[how](name),
    st.sampled_from(NAMES),
    st.sampled_from(sorted(MUTATIONS)),
)
VALUES = st.sampled_from([0, "cuda", "cpu", "disk", "meta", 1, None, "auto"])


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.dictionaries(st.one_of(KEYS, st.just(""), st.text(max_size=8)), VALUES, max_size=12))
def test_any_map_becomes_an_exact_one(faulty: dict[str, Any]) -> None:
    llama = outline("llama")
    for runs in ("gpu:0", "cpu"):
        fixed, changes = corrected(faulty, llama, runs)
        assert json.loads(json.dumps(fixed)) == fixed
        tiers = match_device_map(fixed, llama).tiers
        assert runs == "gpu:0" or "gpu:0" not in tiers.values()
        if not changes:
            continue
        # Exact: each key covers something, and no key covers another.
        assert all(key in known_names(llama) or key == "" for key in fixed)
        assert not any(a != b and (not a or b.startswith(f"{a}.")) for a in fixed for b in fixed)
        assert corrected(fixed, llama, runs) == (fixed, [])
        # What the right keys say stays as it was said.
        words = {0: "gpu:0", "cuda": "gpu:0", "cpu": "cpu", "disk": "disk"}
        right = {key: words[one] for key, one in faulty.items() if one in words and key in NAMES}
        if runs == "gpu:0" and not set(faulty) - set(right):
            for name, tier in tiers.items():
                assert most_specific(name, right) in (tier, None)


# --------------------------------------------------------------- what the stock loader makes of it


def many_layers(tmp_path: Path) -> Path:
    """A config of twelve layers; names need no weights."""
    config = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    config = {key: one for key, one in config.items() if key != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 12}))
    return tmp_path


@pytest.mark.parametrize(
    ("given_map", "beside"),
    [
        ({"": 0, "model.layers.1": "cpu"}, "model.layers.10, model.layers.11"),
        (
            {"model": 0, "model.layers.1.mlp": "cpu", "lm_head": 0},
            "",
        ),
        ({"": 0, "model.layers.1": "cpu", "model.layers.10": 0}, "model.layers.11"),
        ({"": "cpu", "model.layers.1": "cpu"}, ""),
    ],
)
def test_keys_that_match_too_much(tmp_path: Path, given_map: dict[str, Any], beside: str) -> None:
    """What is said of the stock loader is what it does, and the corrected map means one thing."""
    from transformers.integrations.accelerate import expand_device_map

    folder = many_layers(tmp_path)
    told = [one for one in check(folder, given_map, hardware=CARD) if one.code == "TT223"]
    said = f"transformers takes the key 'model.layers.1' for {beside} too, trimtab does not"
    assert [(one.what, one.severity) for one in told] == ([(said, "note")] if beside else [])
    fixed = repair(folder, given_map, hardware=CARD)
    assert fixed is not None
    assert bool(fixed.changes) == bool(beside)
    twelve = build_outline(open_checkpoint(folder, need_weights=False))
    names = [one.name for one in twelve.weights]
    words = {0: "gpu:0", "cpu": "cpu"}
    ours = match_device_map(given_map, twelve).tiers
    stock = {name: words[one] for name, one in expand_device_map(given_map, names).items()}
    assert bool(beside) == (stock != ours)
    mended = expand_device_map(fixed.device_map, names)
    assert {name: words[one] for name, one in mended.items()} == ours
