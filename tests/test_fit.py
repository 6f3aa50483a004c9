"""Strictness, decided from names and shapes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.adapters import AdapterHeader, AdapterTensor
from trimtab.errors import AdapterFault
from trimtab.fit import Fit, Shapes, fit

HIDDEN, RANK, VOCABULARY = 8, 2, 32
LLAMA = "model.layers"
VLM = "model.language_model.layers"
OLD_VLM = "language_model.model.layers"


def base(layers: str = LLAMA, *, towers: bool = False, wrapped: bool = False) -> Shapes:
    """A model of two layers, with a tower whose linears may lie in wrappers."""
    stem = layers.rpartition(".")[0]
    shapes: dict[str, tuple[int, ...]] = {f"{stem}.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(2):
        for name in ("q_proj", "v_proj"):
            shapes[f"{layers}.{number}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layers}.{number}.mlp.up_proj.weight"] = (4 * HIDDEN, HIDDEN)
        if towers:
            inside = ".linear" if wrapped else ""
            tower = f"model.vision_tower.encoder.layers.{number}.self_attn.q_proj{inside}.weight"
            shapes[tower] = (HIDDEN, HIDDEN)
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def adapter(
    layers: str = LLAMA,
    targets: Any = ("q_proj", "v_proj"),
    extra: dict[str, tuple[int, ...]] | None = None,
    names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"),
    **config: Any,
) -> AdapterHeader:
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(2):
        for name in names:
            module = f"base_model.model.{layers}.{number}.{name}"
            shapes[f"{module}.lora_A.weight"] = (RANK, HIDDEN)
            shapes[f"{module}.lora_B.weight"] = (HIDDEN, RANK)
    shapes |= extra or {}
    targets = list(targets) if isinstance(targets, tuple) else targets
    fields = {"peft_type": "LORA", "r": RANK, "target_modules": targets, **config}
    tensors = {key: AdapterTensor(key, "float32", shape) for key, shape in shapes.items()}
    return AdapterHeader("me/lora", Path(), Path("adapter_model.safetensors"), fields, tensors)


def refused(code: str, header: AdapterHeader, shapes: Shapes, **options: Any) -> AdapterFault:
    with pytest.raises(AdapterFault) as caught:
        fit(header, shapes, **options)
    assert caught.value.code == code
    return caught.value


def test_an_adapter_that_fits_is_left_as_it_is() -> None:
    header = adapter()
    decided = fit(header, base())
    assert decided == Fit(
        header,
        {key: key for key in header.tensors},
        header.config,
        tuple(sorted(f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in ("q", "v"))),
        {},
        (),
        (),
        (),
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (OLD_VLM, VLM),
        (VLM, OLD_VLM),
        (LLAMA, VLM),
        ("layers", LLAMA),
        ("model.model.layers", LLAMA),
        ("text_model.model.layers", VLM),
    ],
)
@pytest.mark.parametrize("towers", [False, True])
def test_other_prefixes_are_mapped_and_said(theirs: str, ours: str, towers: bool) -> None:
    decided = fit(adapter(theirs), base(ours, towers=towers))
    assert decided.modules == tuple(
        sorted(f"{ours}.{n}.self_attn.{p}_proj" for n in range(2) for p in ("q", "v"))
    )
    assert set(decided.keys.values()) == {
        key.replace(theirs, ours) for key in adapter(theirs).tensors
    }
    assert decided.config["target_modules"] == list(decided.modules)
    assert decided.notes[0].startswith("modules that the adapter calls ")


def test_a_pattern_for_old_names_is_mapped_with_its_rank_and_scale() -> None:
    header = adapter(
        OLD_VLM,
        targets=r"language_model\.model\.layers\.\d+\.self_attn\.(q|v)_proj",
        alpha_pattern={"language_model.model.layers.1.self_attn.q_proj": 64},
        rank_pattern={"v_proj": RANK},
    )
    decided = fit(header, base(VLM, towers=True))
    assert decided.config["alpha_pattern"] == {
        r"^model\.language_model\.layers\.1\.self_attn\.q_proj": 64
    }
    assert decided.config["rank_pattern"] == {
        rf"^model\.language_model\.layers\.{n}\.self_attn\.v_proj": RANK for n in range(2)
    }


def test_keys_that_match_nothing_are_counted_and_three_are_shown() -> None:
    fault = refused("TT303", adapter("transformer.h", names=("attn.qkv",)), base())
    assert "4 of the 4 tensors of me/lora match nothing" in fault.what
    assert fault.what.count("attn.qkv.lora_") == 3
    assert "and 1 more" in fault.what


def test_some_keys_that_match_nothing() -> None:
    extra = {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": (RANK, HIDDEN)}
    header = adapter(extra=extra)
    fault = refused("TT303", header, base())
    assert fault.parts["unused"] == tuple(extra)
    decided = fit(header, base(), allow_unused=True)
    assert decided.unused == tuple(extra)
    assert len(decided.keys) == 8
    assert "left out" in decided.notes[0]


def test_allowing_unused_tensors_does_not_allow_an_adapter_of_nothing() -> None:
    refused("TT303", adapter("transformer.h", names=("attn.qkv",)), base(), allow_unused=True)


def test_a_stray_tensor_of_no_kind() -> None:
    refused("TT303", adapter(extra={"something.weight": (1,)}), base())
    assert fit(adapter(extra={"something.weight": (1,)}), base(), allow_unused=True).unused == (
        "something.weight",
    )


def test_targets_that_match_no_module() -> None:
    fault = refused("TT304", adapter(targets=("query_key_value",)), base())
    assert "query_key_value" in fault.what


def test_targets_that_leave_out_some_of_the_file() -> None:
    assert "v_proj" in refused("TT303", adapter(targets=("q_proj",)), base()).what


def test_targets_that_the_file_has_nothing_for() -> None:
    fault = refused("TT312", adapter(targets=("q_proj", "v_proj", "up_proj")), base())
    assert "targets 2 modules that its file has no tensors for" in fault.what


def test_a_target_that_no_module_has_is_no_matter_if_the_file_has_none_either() -> None:
    assert fit(adapter(targets=("q_proj", "v_proj", "query")), base()).skipped == ()


@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_of_a_tower_are_skipped_and_named(wrapped: bool) -> None:
    decided = fit(adapter(VLM), base(VLM, towers=True, wrapped=wrapped))
    tower = tuple(f"model.vision_tower.encoder.layers.{n}.self_attn.q_proj" for n in range(2))
    assert decided.skipped == tower
    assert tower[0] in decided.notes[0]
    assert decided.config["target_modules"] == list(decided.modules)


def test_an_adapter_for_a_wrapper_is_refused_with_the_layer_inside() -> None:
    tower = "model.vision_tower.encoder.layers"
    header = adapter(tower, targets=("q_proj",), names=("self_attn.q_proj",))
    fault = refused("TT313", header, base(VLM, towers=True, wrapped=True))
    assert f"{tower}.0.self_attn.q_proj.linear" in fault.fix


def test_one_layer_only() -> None:
    header = adapter(layers_to_transform=[0, 1], layers_pattern="layers", exclude_modules=["up"])
    assert fit(header, base()).config == header.config
    fault = refused("TT303", adapter(layers_to_transform=0), base())
    assert "4 of the 8" in fault.what


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("self_attn.q_proj.lora_A.weight", (RANK, HIDDEN + 1)),
        ("self_attn.q_proj.lora_A.weight", (RANK + 1, HIDDEN)),
        ("self_attn.q_proj.lora_B.weight", (HIDDEN, RANK, 1)),
        ("self_attn.q_proj.lora_magnitude_vector", (HIDDEN - 1,)),
    ],
)
def test_a_wrong_size_has_both_sizes(key: str, shape: tuple[int, ...]) -> None:
    fault = refused(
        "TT306", adapter(extra={f"base_model.model.model.layers.0.{key}": shape}), base()
    )
    assert str(list(shape)) in fault.what
    assert fault.parts["found"] == shape


def test_a_resized_vocabulary() -> None:
    extra = {"base_model.model.lm_head.weight": (VOCABULARY + 3, HIDDEN)}
    fault = refused("TT306", adapter(extra=extra, modules_to_save=["lm_head"]), base())
    assert f"[{VOCABULARY + 3}, {HIDDEN}], the model needs [{VOCABULARY}, {HIDDEN}]" in fault.what
    assert f"resize_token_embeddings({VOCABULARY + 3})" in fault.fix
    refused("TT306", adapter(extra=extra), base())  # repeated from the base, by PEFT itself


def test_transposed_weights() -> None:
    shapes = {**base(), "model.layers.0.mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN)}
    module = "base_model.model.model.layers.0.mlp.c_fc"
    extra = {
        f"{module}.lora_A.weight": (RANK, HIDDEN),
        f"{module}.lora_B.weight": (4 * HIDDEN, RANK),
    }
    assert len(fit(adapter(targets=("q_proj", "v_proj", "c_fc"), extra=extra), shapes).modules) == 5


def test_tensors_of_the_base_are_recognised() -> None:
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    decided = fit(adapter(extra={key: (VOCABULARY, HIDDEN)}), base())
    assert decided.base_tensors == {key: "model.embed_tokens.weight"}
    assert key not in decided.keys


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("google/gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("google/Gemma-3-4b-it", "mirror/gemma-3-4b-IT"),
        ("google/gemma-3-4b-it", "/models/gemma-3-4b-it/"),
        ("/home/a/gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("C:\\models\\gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("/home/a/.cache/hub/models--google--gemma-3-4b-it/snapshots/0f3a", "google/gemma-3-4b-it"),
        ("unsloth/gemma-3-4b-it-unsloth-bnb-4bit", "google/gemma-3-4b-it"),
        (None, "google/gemma-3-4b-it"),
        ("google/gemma-3-4b-it", None),
    ],
)
def test_the_same_base(theirs: str | None, ours: str | None) -> None:
    assert fit(adapter(base_model_name_or_path=theirs), base(), ours).notes == ()


def test_another_base() -> None:
    header = adapter(base_model_name_or_path="google/gemma-3-4b-it")
    fault = refused("TT305", header, base(), base_name="google/gemma-3-12b-it")
    assert "google/gemma-3-4b-it" in fault.what
    assert "google/gemma-3-12b-it" in fault.what
    decided = fit(header, base(), "google/gemma-3-12b-it", allow_other_base=True)
    assert decided.notes == (fault.what,)
    assert fit(header, base(), "./checkpoints/step-100").notes  # a path proves nothing: said only


def test_unknown_fields() -> None:
    known = ("peft_type", "r", "target_modules")
    decided = fit(adapter(velora_config=None, corda_config={"a": 1}), base(), known_fields=known)
    assert set(decided.config) == set(known)
    assert decided.notes == (
        "config fields that the installed PEFT does not know: corda_config, velora_config",
    )
    fault = refused("TT307", adapter(use_magic=True), base(), known_fields=known)
    assert "use_magic=True" in fault.what


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "LoftQ"])
def test_initialisations_that_rewrite_the_base(init: str) -> None:
    assert init.lower() in refused("TT308", adapter(init_lora_weights=init), base()).what


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_initialisations_that_do_not(init: bool | str) -> None:
    assert len(fit(adapter(init_lora_weights=init), base()).modules) == 4


def test_kinds_that_are_not_supported() -> None:
    refused("TT314", adapter(layer_replication=[[0, 1], [0, 1]]), base())


def test_prompts_touch_no_module() -> None:
    tensors = {"prompt_embeddings": AdapterTensor("prompt_embeddings", "float32", (4, HIDDEN))}
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}
    header = AdapterHeader("me/prompt", Path(), Path("adapter_model.safetensors"), config, tensors)
    decided = fit(header, base())
    assert decided.modules == ()
    assert decided.keys == {"prompt_embeddings": "prompt_embeddings"}


TIES = (("lm_head.weight", "model.embed_tokens.weight"),)


def rows(**config: Any) -> AdapterHeader:
    """Trained token rows, as PEFT saves them of a base whose head is tied to its table."""
    shapes = dict.fromkeys(
        (
            f"base_model.model.{one}.trainable_tokens_delta"
            for one in ("lm_head", "model.embed_tokens")
        ),
        (3, HIDDEN),
    )
    fields = {"peft_type": "TRAINABLE_TOKENS", "target_modules": ["embed_tokens"], **config}
    tensors = {key: AdapterTensor(key, "float32", shape) for key, shape in shapes.items()}
    return AdapterHeader("me/rows", Path(), Path("adapter_model.safetensors"), fields, tensors)


def test_rows_that_are_repeated_for_a_tied_head() -> None:
    decided = fit(rows(), base(), ties=TIES)
    assert decided.modules == ("model.embed_tokens",)
    assert decided.config["target_modules"] == ["embed_tokens"]
    assert set(decided.keys) == set(rows().tensors)
    assert "lm_head" in refused("TT303", rows(), base()).what  # of a head that is not tied


def test_layers_that_are_repeated_for_a_tied_head() -> None:
    table = {
        "base_model.model.model.embed_tokens.lora_embedding_A": (RANK, VOCABULARY),
        "base_model.model.model.embed_tokens.lora_embedding_B": (HIDDEN, RANK),
        "base_model.model.lm_head.lora_A.weight": (RANK, HIDDEN),
        "base_model.model.lm_head.lora_B.weight": (VOCABULARY, RANK),
    }
    options: dict[str, Any] = {"extra": table, "targets": ("q_proj", "v_proj", "embed_tokens")}
    decided = fit(adapter(**options, ensure_weight_tying=True), base(), ties=TIES)
    assert "lm_head" not in decided.modules
    assert set(table) < set(decided.keys)
    refused("TT303", adapter(**options), base(), ties=TIES)


def test_a_whole_table_that_is_repeated_for_a_tied_head() -> None:
    whole = dict.fromkeys(
        (f"base_model.model.{one}.weight" for one in ("lm_head", "model.embed_tokens")),
        (VOCABULARY, HIDDEN),
    )
    options: dict[str, Any] = {"extra": whole, "modules_to_save": ["embed_tokens"]}
    decided = fit(adapter(**options, ensure_weight_tying=True), base(), ties=TIES)
    assert decided.base_tensors == {}
    assert set(whole) < set(decided.keys)
    assert fit(adapter(**options), base(), ties=TIES).base_tensors == {
        "base_model.model.lm_head.weight": "lm_head.weight"
    }


def test_a_name_at_the_end_of_others_is_saved_with_them() -> None:
    extra = {"base_model.model.model.layers.0.input_layernorm.weight": (HIDDEN,)}
    shapes = {**base(), "model.layers.0.input_layernorm.weight": (HIDDEN,)}
    decided = fit(adapter(extra=extra, modules_to_save=["norm"]), shapes)
    assert "model.layers.0.input_layernorm" in decided.modules
    assert decided.base_tensors == {}


def test_a_config_that_asks_for_more_than_the_file_holds() -> None:
    fault = refused("TT312", adapter(rank_pattern={"q_proj": 10**9}), base())
    assert "q_proj=1000000000" in fault.what
    refused("TT312", adapter(r=10**9), base())


def test_fields_that_would_run_code_or_read_files_are_closed() -> None:
    header = adapter(megatron_config={"a": 1}, megatron_core="os", runtime_config={"b": 2})
    decided = fit(header, base())
    assert decided.config["megatron_config"] is None
    assert "runtime_config" not in decided.config
    assert decided.notes == ("megatron_config of me/lora is not followed: {'a': 1}",)


def test_what_all_layers_share_has_no_module() -> None:
    extra = {"base_model.vera_A": (RANK, HIDDEN), "base_model.pvera_B": (HIDDEN, RANK)}
    decided = fit(adapter(extra=extra), base())
    assert {key: decided.keys[key] for key in extra} == {key: key for key in extra}


def test_a_kind_that_holds_only_what_is_shared() -> None:
    key = "base_model.unilora_theta_d"
    config = {"peft_type": "UNILORA", "target_modules": ["q_proj"]}
    tensors = {key: AdapterTensor(key, "float32", (4,))}
    header = AdapterHeader("me/uni", Path(), Path("adapter_model.safetensors"), config, tensors)
    decided = fit(header, base())
    assert decided.modules == tuple(f"{LLAMA}.{n}.self_attn.q_proj" for n in range(2))
    assert decided.config == config
