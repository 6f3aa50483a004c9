"""No adapter is loaded unnoticed that does nothing, or something else than its file says.

Valid adapters are corrupted at random: keys, shapes, values, ranks, targets, configs. Each ends in
an error that names the adapter, with the model as it was, or in outputs equal to those of `dense`.
"""

from __future__ import annotations

import functools
import json
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dense
import tiny
from placing import AWAY, placed
from trimtab.adapted import shapes_of
from trimtab.adapters import read_adapter
from trimtab.compat import known_fields
from trimtab.errors import AdapterFault
from trimtab.fit import fit
from trimtab.placement import Placement

FORMATS = ("none", "nf4")
COUNT = 64
"""Corruptions of each kind on each format; all in all more than a thousand."""

LAYERS = r".*layers\.[12]\.(self_attn\.(q_proj|v_proj)|mlp\.down_proj)"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {}),
    "patterns": (
        "lora",
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
    ),
    "dora": ("dora", {}),
    "saved": ("lora", {"modules_to_save": ["lm_head"]}),
    "table": ("lora", {"targets": ["embed_tokens", "q_proj"]}),
    "rows": ("lora", {"trainable_token_indices": {"embed_tokens": [20, 30]}}),
    "ia3": ("IA3", {"feedforward_modules": r".*down_proj"}),
    "loha": ("LoHa", {}),
    "vera": ("Vera", {"r": 16, "targets": r".*layers\.[12]\.self_attn\.v_proj"}),
}

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Corruption = Callable[[random.Random, Tensors, Config], str]


def drop_a_tensor(pick: random.Random, tensors: Tensors, config: Config) -> str:
    key = pick.choice(sorted(tensors))
    del tensors[key]
    return key


def drop_many(pick: random.Random, tensors: Tensors, config: Config) -> str:
    for key in pick.sample(sorted(tensors), pick.randint(2, len(tensors) - 1)):
        del tensors[key]
    return str(len(tensors))


def rename_a_part(pick: random.Random, tensors: Tensors, config: Config) -> str:
    key = pick.choice(sorted(tensors))
    parts = key.split(".")
    at = pick.randrange(len(parts))
    parts[at] = pick.choice(
        ["3", "9", "x", parts[at] + "_", parts[at][:-1], "k_proj", "q_proj", "v_proj", "weight"]
    )
    tensors[".".join(parts)] = tensors.pop(key)
    return f"{key} -> {'.'.join(parts)}"


def rename_all(pick: random.Random, tensors: Tensors, config: Config) -> str:
    old, new = pick.choice(
        [
            ("base_model.model.", ""),
            ("base_model.model.", "base_model."),
            ("base_model.model.", "base_model.model.model."),
            (".model.layers", ".language_model.model.layers"),
            (".model.layers", ".layers"),
            (".layers.", ".h."),
            (".layers.1.", ".layers.3."),
            (".layers.2.", ".layers.7."),
            ("self_attn", "attention"),
            ("q_proj", "query"),
            ("lora_A", "lora_B_"),
            (".weight", ".default.weight"),
        ]
    )
    for key in list(tensors):
        tensors[key.replace(old, new)] = tensors.pop(key)
    return f"{old} -> {new}"


def swap_two(pick: random.Random, tensors: Tensors, config: Config) -> str:
    one, other = pick.sample(sorted(tensors), 2)
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return f"{one} <-> {other}"


def copy_to_another(pick: random.Random, tensors: Tensors, config: Config) -> str:
    key = pick.choice(sorted(tensors))
    new = key.replace(".1.", ".2.") if ".1." in key else key.replace(".2.", ".0.")
    new = new if new != key else key + "_copy"
    tensors[new] = tensors[key].clone()
    return f"{key} -> {new}"


def change_a_shape(pick: random.Random, tensors: Tensors, config: Config) -> str:
    key = pick.choice(sorted(tensors))
    one = tensors[key]
    change = pick.choice(["rows", "more", "transpose", "extra", "flat", "empty"])
    if change == "rows":
        one = one[: max(1, len(one) // 2)]
    elif change == "more":
        one = torch.cat([one, one[:1]])
    elif change == "transpose":
        one = one.T if one.ndim == 2 else one[:, None]
    elif change == "extra":
        one = one[None]
    elif change == "flat":
        one = one.flatten()
    else:
        one = one[:0]
    tensors[key] = one.contiguous()
    return f"{key} {change}"


def change_the_dtype(pick: random.Random, tensors: Tensors, config: Config) -> str:
    dtype = pick.choice([torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64])
    keys = sorted(tensors) if pick.random() < 0.5 else [pick.choice(sorted(tensors))]
    for key in keys:
        one = tensors[key] * (10 if not dtype.is_floating_point else 1)
        tensors[key] = one.to(dtype)
    return f"{len(keys)} {dtype}"


def change_values(pick: random.Random, tensors: Tensors, config: Config) -> str:
    key = pick.choice(sorted(tensors))
    value = pick.choice([0.0, float("nan"), float("inf"), 0.3])
    tensors[key] = torch.full_like(tensors[key], value)
    return f"{key} = {value}"


def change_a_rank(pick: random.Random, tensors: Tensors, config: Config) -> str:
    name, value = pick.choice(
        [
            ("r", 4), ("r", 16), ("r", 0), ("r", -1), ("r", "8"), ("r", None), ("r", 8.0),
            ("rank_pattern", {"q_proj": 2}), ("rank_pattern", {"nothing": 2}),
            ("rank_pattern", {".*": 8}), ("rank_pattern", None), ("rank_pattern", {"(": 4}),
            ("rank_pattern", {"layers.1.self_attn.q_proj": 3}),
        ]
    )  # fmt: skip
    config[name] = value
    return f"{name}={value!r}"


def change_a_scale(pick: random.Random, tensors: Tensors, config: Config) -> str:
    alpha = "alpha" if "alpha" in config else "lora_alpha"
    name, value = pick.choice(
        [
            (alpha, 1), (alpha, 0), (alpha, 64), (alpha, None), (alpha, "x"),
            ("use_rslora", not config.get("use_rslora")), ("alpha_pattern", {"q_proj": 1}),
            ("alpha_pattern", {"layers.2": 99}), ("alpha_pattern", {"v_proj": 5, "q_proj": 7}),
        ]
    )  # fmt: skip
    config[name] = value
    return f"{name}={value!r}"


def change_the_targets(pick: random.Random, tensors: Tensors, config: Config) -> str:
    name, value = pick.choice(
        [
            ("target_modules", ["q_proj"]), ("target_modules", ["q_proj", "v_proj"]),
            ("target_modules", ["q_proj", "v_proj", "down_proj"]), ("target_modules", []),
            ("target_modules", None), ("target_modules", "all-linear"), ("target_modules", "("),
            ("target_modules", ["q_proj", "v_proj", "down_proj", "embed_tokens", "nothing"]),
            ("target_modules", ".*"), ("target_modules", 3), ("target_modules", ["nothing"]),
            ("target_modules", [config.get("target_modules")]), ("exclude_modules", ["q_proj"]),
            ("exclude_modules", ".*"), ("layers_to_transform", [1]), ("layers_to_transform", 2),
            ("layers_to_transform", [1, 2]), ("layers_pattern", "h"),
            ("target_parameters", ["q_proj.weight"]), ("target_parameters", ["nothing"]),
            ("modules_to_save", ["lm_head"]), ("modules_to_save", ["norm"]),
            ("modules_to_save", ["q_proj"]), ("modules_to_save", None),
            ("trainable_token_indices", [3, 4]), ("trainable_token_indices", None),
            ("trainable_token_indices", {"embed_tokens": [21, 31]}),
            ("trainable_token_indices", {"embed_tokens": [20]}),
            ("feedforward_modules", []), ("feedforward_modules", ["q_proj"]),
        ]
    )  # fmt: skip
    config[name] = value
    return f"{name}={value!r}"


def change_the_config(pick: random.Random, tensors: Tensors, config: Config) -> str:
    name, value = pick.choice(
        [
            ("peft_type", "LOHA"), ("peft_type", "IA3"), ("peft_type", "LORA"),
            ("peft_type", "NOTHING"), ("peft_type", "PROMPT_TUNING"), ("peft_type", "XLORA"),
            ("peft_type", 3), ("peft_type", None), ("use_dora", not config.get("use_dora")),
            ("task_type", "SEQ_CLS"), ("task_type", None), ("task_type", "NOTHING"),
            ("bias", "all"), ("bias", "lora_only"), ("bias", "nothing"), ("lora_bias", True),
            ("fan_in_fan_out", True), ("init_lora_weights", "pissa"), ("init_weights", False),
            ("init_lora_weights", "gaussian"), ("init_lora_weights", "nothing"),
            ("init_lora_weights", "eva"), ("use_qalora", True), ("from_the_future", 7),
            ("layer_replication", [[0, 2]]), ("base_model_name_or_path", "me/another-model"),
            ("base_model_name_or_path", None), ("lora_dropout", 0.5), ("lora_dropout", 7),
            ("use_effective_conv2d", True), ("projection_prng_key", 1), ("save_projection", False),
            ("d_initial", 3.0), ("inference_mode", False), ("auto_mapping", {"a": "b"}),
            ("revision", "x"), ("peft_version", "99"), ("megatron_config", {"a": 1}),
            ("ensure_weight_tying", True), ("loftq_config", {"loftq_bits": 4}),
        ]
    )  # fmt: skip
    config[name] = value
    return f"{name}={value!r}"


CORRUPTIONS: tuple[Corruption, ...] = (
    drop_a_tensor, drop_many, rename_a_part, rename_a_part, rename_all, swap_two, copy_to_another,
    change_a_shape, change_a_shape, change_the_dtype, change_values, change_a_rank, change_a_scale,
    change_the_targets, change_the_targets, change_the_config, change_the_config,
)  # fmt: skip


@dataclass
class Bench:
    """A placement with half of its layers parked, and the dense model with the same weights."""

    placement: Placement
    dense: Any
    given: dict[str, torch.Tensor]
    bare: torch.Tensor
    shapes: dict[str, tuple[int, ...]]

    def logits(self) -> torch.Tensor:
        return tiny.logits(self.placement.model, self.given)


@functools.cache
def folder() -> Path:
    return tiny.checkpoint("llama-biased", dtype=torch.float32)


@functools.cache
def bench(quant: str) -> Bench:
    stock = tiny.reference(folder(), quant, dtype=torch.float32)
    given = tiny.inputs(folder(), length=6)
    given["input_ids"][:, :2] = torch.tensor([20, 30])
    placement = placed(folder(), quant, AWAY["half"], dtype="float32")
    bare = tiny.logits(placement.model, given)
    return Bench(placement, dense.dense(stock), given, bare, shapes_of(stock))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # PEFT's, of odd configs
        warnings.simplefilter("ignore")
        yield


def valid(kind: str) -> tuple[Tensors, Config]:
    name, options = KINDS[kind]
    options = {"targets": LAYERS, **options}
    made = tiny.adapter(folder(), name, **options)
    tensors = load_file(made / "adapter_model.safetensors")
    return tensors, json.loads((made / "adapter_config.json").read_text())


def outcome(quant: str, tensors: Tensors, config: Config, path: Path) -> AdapterFault | None:
    """The error, or None if the outputs are those of the dense model; anything else fails."""
    it = bench(quant)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    try:
        header = read_adapter(path)
        fit(header, it.shapes, str(folder()), known_fields=known_fields(header))
    except AdapterFault as fault:
        return fault
    try:
        it.placement.add_adapter("it", header)
    except AdapterFault as fault:
        assert torch.equal(it.logits(), it.bare)
        return fault
    found = it.logits()
    it.placement.remove_adapter("it")
    assert torch.equal(it.logits(), it.bare)
    expected = tiny.logits(dense.apply(it.dense, tensors, config), it.given)
    near = 5e-4 * float(expected.std())
    assert (found - expected).abs().max() < near
    return None


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_right(kind: str, quant: str, tmp_path: Path) -> None:
    tensors, config = valid(kind)
    fault = outcome(quant, tensors, config, tmp_path)
    if quant == "nf4" and kind == "loha":
        assert fault is not None
        assert fault.code == "TT317"
        return
    assert fault is None
    changed = tiny.logits(dense.apply(bench(quant).dense, tensors, config), bench(quant).given)
    assert (changed - bench(quant).bare).abs().max() > 0.05 * bench(quant).bare.std()


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_corrupted_adapters(kind: str, quant: str, tmp_path: Path) -> None:
    pick = random.Random(f"{kind} {quant}")
    refused = 0
    for _ in range(COUNT):
        tensors, config = valid(kind)
        corrupt = pick.choice(CORRUPTIONS)
        done = f"{corrupt.__name__}: {corrupt(pick, tensors, config)}"
        try:
            fault = outcome(quant, tensors, config, tmp_path)
        except BaseException as problem:
            problem.add_note(done)
            raise
        if fault is not None:
            refused += 1
            assert fault.code.startswith("TT3"), done
            assert str(tmp_path) in fault.what, done
    assert refused > COUNT // 3
