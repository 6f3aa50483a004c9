"""What is read of a model, an adapter and a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from trimtab.errors import AdapterFault, EnvironmentFault, FormatFault
from trimtab.repro.cases import STORED, Case, Subject
from trimtab.repro.script import script
from trimtab.repro.subject import describe


def config_only(folder: Path, parent: Path, **changed: Any) -> str:
    """A folder with nothing but the config of a checkpoint."""
    made = parent / folder.name
    made.mkdir()
    config = json.loads((folder / "config.json").read_text()) | changed
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def built(subject: Subject) -> Any:
    """The tiny model that the scripts make, made in this process."""
    import transformers

    assert subject.tiny is not None
    model_class = getattr(transformers, subject.model_class)
    return model_class(model_class.config_class(**subject.tiny.config))


def test_a_users_model() -> None:
    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base)
    found = describe(str(base), str(adapter))
    assert found.shown == base.name
    assert (found.model, found.adapter) == (str(base), str(adapter))
    assert found.arguments == [str(base), str(adapter)]
    assert (found.model_class, found.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert (found.here, found.quants) == ("cpu", ("nf4-dq", "nf4"))
    assert 0 < found.nbytes < (base / "model.safetensors").stat().st_size
    assert found.device_map["model.layers.2"] == "cpu"
    assert found.device_map["model.layers.3"] == "disk"
    assert found.on_disk
    assert found.notes == ()


def test_on_a_gpu_what_is_away_is_in_memory() -> None:
    found = describe(str(tiny.checkpoint("llama")), gpu=True)
    assert found.here == 0
    assert set(found.device_map.values()) == {0, "cpu"}
    assert not found.on_disk


def test_formats() -> None:
    base = str(tiny.checkpoint("llama"))
    asked = ("none", "auto", "int8", "nf4", "nf4-dq", "fp4")
    assert [describe(base, quant=one).quants for one in asked] == [
        ("none",),
        ("none",),
        ("int8",),
        ("nf4-dq", "nf4"),
        ("nf4-dq", "nf4"),
        ("fp4-dq", "fp4"),
    ]


def test_a_checkpoint_that_is_quantized_already(tmp_path: Path) -> None:
    stored = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    assert describe(str(base)).quants == (STORED,)
    assert describe(str(base), tiny=True).quants == ("nf4-dq", "nf4")


def test_the_users_map_is_taken_as_it_is() -> None:
    base = str(tiny.checkpoint("llama"))
    wrong = {"": "cpu", "transformer.h.1": "disk"}
    assert describe(base, device_map=wrong).device_map == wrong
    found = describe(base, device_map={"": 0, "model.layers.1": "cpu"})
    assert found.device_map["model.layers.1"] == "disk"
    assert found.device_map["model.layers.2"] == found.device_map["lm_head"] == "cpu"
    assert "" not in found.device_map
    assert len(found.notes) == 1


def test_a_tiny_llama_from_a_config_alone(tmp_path: Path) -> None:
    base = config_only(tiny.checkpoint("llama"), tmp_path, num_hidden_layers=40)
    found = describe(base, device_map={"": 0, "model.layers.17": "cpu"}, gpu=True, tiny=True)
    assert found.tiny is not None
    assert found.tiny.config["num_hidden_layers"] == 4
    assert "vocab_size" in found.tiny.config
    assert "rms_norm_eps" not in found.tiny.config, "a default is not said"
    assert found.device_map == {"": 0, "model.layers.1": "cpu"}
    assert found.notes == (
        "the tiny model has 4 layers, mapped as the original's 0, 17, 26, 39 of 40",
    )
    assert (found.model, found.adapter, found.arguments) == ("", "", [])
    ends = "(down_proj|gate_proj|k_proj|o_proj|q_proj|up_proj|v_proj)"
    assert found.tiny.adapter == {
        "task_type": "CAUSAL_LM",
        "peft_type": "LORA",
        "target_modules": rf"model\.layers\.\d+\.(.*\.)?{ends}",
    }
    assert len(built(found).model.layers) == 4


def test_a_tiny_gemma4_from_a_config_alone(tmp_path: Path) -> None:
    import peft

    base = config_only(tiny.checkpoint("gemma4"), tmp_path)
    places = {"": 0, "model.vision_tower": "cpu", "model.language_model.layers.5": "cpu"}
    found = describe(base, device_map=places, gpu=True, tiny=True)
    assert found.device_map == places
    assert found.tiny is not None
    model = built(found)
    assert model.config.get_text_config().num_kv_shared_layers == 4
    assert model.model.vision_tower is not None
    adapted = peft.get_peft_model(model, peft.get_peft_config(dict(found.tiny.adapter)))
    names = adapted.targeted_module_names
    assert names
    assert all(one.startswith("model.language_model.layers.") for one in names)


def test_a_tiny_adapter_has_the_given_ones_kind_and_targets(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base, "dora", targets=["q_proj", "down_proj"], r=64, lora_alpha=32)
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    made = describe(str(base), str(folder), tiny=True).tiny
    assert made is not None
    assert made.adapter == {
        "task_type": "CAUSAL_LM",
        "peft_type": "LORA",
        "use_dora": True,
        "lora_alpha": 32,
        "r": 8,
        "target_modules": ["down_proj", "q_proj"],
    }


def edited(adapter: Path, parent: Path, **fields: Any) -> str:
    made = tiny.writable(adapter, parent)
    config = json.loads((made / "adapter_config.json").read_text()) | fields
    (made / "adapter_config.json").write_text(json.dumps(config))
    return str(made)


def test_targets_that_name_layers_are_renumbered(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    targets = [f"model.layers.{number}.self_attn.q_proj" for number in range(6)]
    adapter = edited(tiny.adapter(base), tmp_path, target_modules=targets)
    made = describe(str(base), adapter, tiny=True).tiny
    assert made is not None
    assert made.adapter["target_modules"] == [
        f"model.layers.{number}.self_attn.q_proj" for number in range(4)
    ]


def test_targets_that_match_nothing_are_said(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    adapter = edited(tiny.adapter(base), tmp_path, target_modules=["query_key_value"])
    found = describe(str(base), adapter, tiny=True)
    assert "match nothing in the tiny model" in found.notes[-1]
    assert found.tiny is not None
    assert "q_proj" in found.tiny.adapter["target_modules"]


def test_towers_that_peft_cannot_adapt_are_left_out(tmp_path: Path) -> None:
    import peft

    base = tiny.checkpoint("gemma4")
    adapter = edited(tiny.adapter(base), tmp_path, target_modules=["q_proj", "v_proj"])
    found = describe(str(base), adapter, tiny=True)
    assert found.notes[-1] == "only the language model is adapted: PEFT cannot adapt a tower"
    assert found.tiny is not None
    adapted = peft.get_peft_model(built(found), peft.get_peft_config(dict(found.tiny.adapter)))
    assert all("language_model" in one for one in adapted.targeted_module_names)


def test_kinds_without_targets_and_unknown_kinds(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    prompt = tiny.adapter(base, "PromptTuning", num_virtual_tokens=4)
    found = describe(str(base), str(prompt), tiny=True)
    assert found.tiny is not None
    assert "target_modules" not in found.tiny.adapter
    assert found.tiny.adapter["num_virtual_tokens"] == 4
    unknown = edited(tiny.adapter(base), tmp_path, peft_type="NEWLORA")
    found = describe(str(base), unknown, tiny=True)
    assert found.notes[-1] == "this PEFT has no NEWLORA: a LoRA takes its place"
    assert found.tiny is not None
    assert found.tiny.adapter["peft_type"] == "LORA"


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "qwen3-moe", "gemma3-vlm"])
def test_other_architectures(name: str) -> None:
    found = describe(str(tiny.checkpoint(name)), tiny=True)
    built(found)
    for case in Case:
        for quant in found.quants:
            compile(script(found, case, quant), case.value, "exec")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    base = str(tiny.checkpoint("llama"))
    with pytest.raises(EnvironmentFault, match="TT105"):
        describe("./nowhere")
    with pytest.raises(AdapterFault, match="TT301"):
        describe(base, "./nowhere", tiny=True)
    with pytest.raises(FormatFault, match="TT503"):
        describe(config_only(tiny.checkpoint("llama"), tmp_path))
    with pytest.raises(FormatFault, match="TT509"):
        describe(base, quant="int3")
