from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import architectures
import tiny
from trimtab.checkpoint import Checkpoint, open_checkpoint
from trimtab.errors import EnvironmentFault, FormatFault
from trimtab.outline import CacheLayer, Outline, build_outline

NAMES = tuple(architectures.MODELS)


def outline(name: str, quant: str = "auto", dtype: str = "auto") -> Outline:
    return build_outline(open_checkpoint(tiny.checkpoint(name)), quant, dtype)


def kinds(found: Outline) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for unit in found.units:
        names.setdefault(unit.kind, []).append(unit.name)
    return names


@pytest.mark.parametrize("quant", ["none", "nf4", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_units_are_the_loaded_model(name: str, quant: str) -> None:
    """Each parameter is in one unit, with the dtype and the format that `from_pretrained` gives."""
    found = outline(name, quant)
    model = tiny.reference(tiny.checkpoint(name), quant)
    wanted = {}
    for module_name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            storage = {"Params4bit": quant, "Int8Params": quant}.get(
                type(parameter).__name__, "plain"
            )
            shape = parameter.quant_state.shape if storage == "nf4" else parameter.shape
            dtype = torch.bfloat16 if storage != "plain" else parameter.dtype
            wanted[f"{module_name}.{key}"] = (tuple(shape), str(dtype)[6:], storage)
    aliases = {alias for alias, _ in found.ties}
    weights = list(found.weights)
    assert len({one.name for one in weights}) == len(weights)
    assert {one.name: (one.shape, one.dtype, one.storage) for one in weights} == {
        name: facts for name, facts in wanted.items() if name not in aliases
    }
    assert sum(unit.buffer_bytes for unit in found.units) == sum(
        one.numel() * one.element_size() for one in model.buffers()
    )


@pytest.mark.parametrize("name", NAMES)
def test_units_have_places_in_the_model(name: str) -> None:
    found = outline(name)
    assert found.units[-1].name == ""
    assert len({unit.name for unit in found.units}) == len(found.units)
    for unit in found.units[:-1]:
        assert unit.name in found.modules
        assert all(one.name.startswith(unit.name + ".") for one in unit.weights)
    assert all(
        one.name not in {owner for _, owner in found.ties} for one in found.units[-1].weights
    )


def test_llama() -> None:
    found = outline("llama", "nf4")
    assert found.architecture == "LlamaForCausalLM"
    assert (found.vocab, found.hidden, found.dtype, found.quant) == (256, 128, "bfloat16", "nf4")
    assert kinds(found) == {
        "table": ["model.embed_tokens"],
        "layer": [f"model.layers.{index}" for index in range(6)],
        "head": ["lm_head"],
        "rest": [""],
    }
    assert found.cache == (CacheLayer(2, 64, None, False),) * 6
    assert {one.storage for one in found.units[-2].weights} == {"plain"}


def test_tied_head_owns_nothing() -> None:
    found = outline("llama-tied")
    head = found.units[-2]
    assert (head.kind, head.weights, head.tied_to) == ("head", (), "model.embed_tokens")
    assert found.ties == (("lm_head.weight", "model.embed_tokens.weight"),)


def test_gemma3_with_a_tower() -> None:
    found = outline("gemma3-vlm")
    assert {unit.name: unit.needs for unit in found.units if unit.kind == "tower"} == {
        "model.vision_tower": ("image", "video"),
        "model.multi_modal_projector": ("image", "video"),
    }
    windows = [layer.window for layer in found.cache]
    assert set(windows) == {windows[0], None}
    assert kinds(found)["table"] == ["model.language_model.embed_tokens"]


def test_gemma4() -> None:
    found = outline("gemma4", "nf4")
    layers = [unit for unit in found.units if unit.kind == "layer"]
    prefix = "model.language_model.layers"
    assert {unit.name: unit.needs for unit in found.units if unit.kind == "tower"} == {
        "model.vision_tower": ("image", "video"),
        "model.embed_vision": ("image", "video"),
        "model.audio_tower": ("audio",),
        "model.embed_audio": ("audio",),
    }
    assert kinds(found)["table"] == [
        "model.language_model.embed_tokens",
        "model.language_model.embed_tokens_per_layer",
    ]
    assert kinds(found)["projection"] == ["model.language_model.per_layer_model_projection"]
    assert [unit.kv_from for unit in layers] == [
        *[None] * 4,
        *[f"{prefix}.2"] * 3,
        f"{prefix}.3",
    ]
    assert [layer.shared for layer in found.cache] == [False] * 4 + [True] * 4
    assert [layer.head_dim for layer in found.cache[:4]] == [64, 64, 64, 128]
    assert [layer.window is None for layer in found.cache[:4]] == [False, False, False, True]


def test_experts_stay_in_16_bits() -> None:
    layer = next(unit for unit in outline("qwen3-moe", "nf4").units if unit.kind == "layer")
    experts = [one for one in layer.weights if len(one.shape) == 3]
    assert experts
    assert {one.storage for one in experts} == {"plain"}
    assert {one.storage for one in layer.weights if "proj.weight" in one.name} == {"nf4"}


def test_gpt2() -> None:
    found = outline("gpt2", "nf4")
    assert kinds(found)["table"] == ["transformer.wte", "transformer.wpe"]
    layer = next(unit for unit in found.units if unit.kind == "layer")
    shapes = {one.name.rpartition("h.0.")[2]: one.shape for one in layer.weights}
    # bitsandbytes turns Conv1D's weight: rows are outputs then.
    assert shapes["attn.c_attn.weight"] == (3 * found.hidden, found.hidden)
    assert found.cache[0].kv_heads * found.cache[0].head_dim == found.hidden


@pytest.mark.parametrize(
    ("class_name", "needs"),
    [
        ("Qwen2AudioForConditionalGeneration", {("audio",)}),
        ("VoxtralForConditionalGeneration", {("audio",)}),
        ("Mistral3ForConditionalGeneration", {("image", "video")}),
        ("Qwen2VLForConditionalGeneration", {("image", "video")}),
    ],
)
def test_what_stands_between_serves_the_towers(
    class_name: str, needs: set[tuple[str, ...]]
) -> None:
    found = build_outline(default(class_name))
    towers = [unit for unit in found.units if unit.kind == "tower"]
    assert {unit.needs for unit in towers} == needs
    assert not any(unit.kind == "projection" for unit in found.units)


def default(class_name: str) -> Checkpoint:
    """A checkpoint of the class's own default config, without weights."""
    config = getattr(transformers, class_name).config_class().to_dict()
    return Checkpoint(class_name, None, {**config, "architectures": [class_name]}, {}, "")


def test_latent_attention_caches_keys_and_values_of_its_own_sizes() -> None:
    cache = build_outline(default("DeepseekV3ForCausalLM")).cache[0]
    assert (cache.kv_heads, 2 * cache.head_dim) == (128, 192 + 128)


def test_a_model_without_attention_keeps_no_cache() -> None:
    assert {layer.kv_heads for layer in build_outline(default("MambaForCausalLM")).cache} == {0}


def test_an_encoder_and_a_decoder() -> None:
    found = build_outline(default("T5ForConditionalGeneration"))
    names = [one.name for one in found.weights]
    assert len(set(names)) == len(names)
    assert kinds(found)["layer"][0] == "decoder.block.0"


def test_a_package_that_the_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise ImportError("This needs timm. You can install it with pip: `pip install timm`.")

    monkeypatch.setattr("trimtab.foreign.skeleton", fail)
    with pytest.raises(EnvironmentFault) as caught:
        outline("llama")
    assert (caught.value.code, caught.value.fix) == ("TT101", "pip install timm")


def test_dtypes() -> None:
    assert outline("llama", dtype="float32").dtype == "float32"
    assert {one.dtype for one in outline("llama", dtype="float16").weights} == {"float16"}
    with pytest.raises(FormatFault) as caught:
        outline("llama", dtype="floot16")
    assert caught.value.code == "TT509"


def configured(tmp_path: Path, change: dict[str, Any]) -> Checkpoint:
    config = json.loads((tiny.checkpoint("llama") / "config.json").read_text())
    config.update(change)
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (tmp_path / "config.json").write_text(text)
    return open_checkpoint(tmp_path, need_weights=False)


def test_without_a_dtype_anywhere_it_is_bfloat16(tmp_path: Path) -> None:
    assert (
        build_outline(configured(tmp_path, {"dtype": None, "torch_dtype": None})).dtype
        == "bfloat16"
    )


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "int8"])
def test_a_checkpoint_that_is_quantized_already(tmp_path: Path, quant: str) -> None:
    asked = tiny.quantization_config(quant).to_dict()
    stored = configured(tmp_path, {"quantization_config": asked})
    weights = [
        dataclasses.replace(one, quantized_from=None) for one in outline("llama", quant).weights
    ]
    assert list(build_outline(stored).weights) == weights
    saved = configured(tmp_path, {"quantization_config": {**asked, "quantized_from": "bfloat16"}})
    assert build_outline(saved).units == outline("llama", quant).units
    assert build_outline(stored).quant == quant
    with pytest.raises(FormatFault) as caught:
        build_outline(stored, "fp4")
    assert caught.value.code == "TT509"


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"architectures": None}, FormatFault, "TT510"),
        ({"architectures": ["NothingForCausalLM"]}, EnvironmentFault, "TT104"),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}},
            EnvironmentFault,
            "TT104",
        ),
        ({"num_attention_heads": "four"}, FormatFault, "TT510"),
    ],
)
def test_a_config_that_is_not_understood(
    tmp_path: Path, change: dict[str, Any], kind: type[FormatFault | EnvironmentFault], code: str
) -> None:
    with pytest.raises(kind) as caught:
        build_outline(configured(tmp_path, change))
    assert caught.value.code == code


def test_a_model_of_70_billion_needs_no_weights(tmp_path: Path) -> None:
    big = configured(
        tmp_path,
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
        },
    )
    found = build_outline(big, "nf4")
    assert sum(one.numel for one in found.weights) == 70_553_706_496
