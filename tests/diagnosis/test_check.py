"""`check` names all that is wrong, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tiny import adapter, checkpoint, targets_of, writable
from trimtab.diagnosis import Finding, check
from trimtab.hardware import Gpu, Hardware
from trimtab.memory import GiB

CARD = Hardware(
    gpus=(Gpu("a card", 8 * GiB, 8 * GiB),),
    ram_total=32 * GiB,
    ram_available=16 * GiB,
    disk_free=100 * GiB,
    link_gbps=12.0,
    device_gbps=300.0,
)
NO_GPU = Hardware(gpus=(), ram_total=32 * GiB, ram_available=16 * GiB, disk_free=100 * GiB)


def codes(findings: list[Finding], severity: str = "error") -> list[str]:
    return [one.code for one in findings if one.severity == severity]


def edited(
    folder: Path, parent: Path, config: dict[str, Any] | None = None, rename: str = ""
) -> Path:
    """A copy of an adapter with other config values, and its first tensor under another name."""
    copy = writable(folder, parent)
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    if rename:
        weights = copy / "adapter_model.safetensors"
        tensors = safetensors.torch.load_file(weights)
        tensors[rename] = tensors.pop(min(tensors))
        safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3-vlm", "gemma4", "qwen3-moe"])
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    folder = checkpoint(name)
    lora, dora = adapter(folder), adapter(folder, "dora")
    assert check(folder, hardware=CARD) == []
    assert check(folder, {"": 0}, {"a": lora, "b": dora}, quant="nf4", hardware=CARD) == []
    assert check(folder, adapters=lora, quant="int8", hardware=NO_GPU) == []


def test_a_wrong_key_is_found_with_the_nearest_names() -> None:
    given = {"": 0, "model.layer.3": "cpu"}
    (one,) = check(checkpoint("llama"), given, hardware=CARD)
    assert one.code == "TT201"
    assert one.title == "a device-map key matches no module"
    assert one.what == "the device map's key 'model.layer.3' matches no module of the model"
    assert "model.layers.3" in one.fix
    assert (one.severity, one.confidence) == ("error", "certain")


def test_case_3_a_projector_that_gemma4_does_not_have() -> None:
    given = {"": 0, "model.multi_modal_projector": "cpu"}
    found = check(checkpoint("gemma4"), given, hardware=CARD)
    assert codes(found) == ["TT201"]
    assert "model.embed_audio, model.embed_vision" in found[0].fix


def test_case_6_only_wrong_keys_with_one_device() -> None:
    (one,) = check(checkpoint("llama"), {"transformer": 0}, hardware=CARD)
    assert one.code == "TT201"
    assert one.fix == "the nearest real names are model"


def test_each_fault_of_a_map_is_found() -> None:
    given = {
        "model.embed_tokens": 0,
        "model.layers.0": "gpu:1",
        "model.layers.1": "somewhere",
        "transformer.h.2": 0,
        "lm_head": 0,
    }
    found = check(checkpoint("llama"), given, hardware=CARD)
    assert codes(found) == ["TT204", "TT203", "TT201", "TT202"]
    assert "'model.layers.0'" in found[0].what
    assert "'somewhere'" in found[1].what
    assert "'transformer.h.2'" in found[2].what
    # Layers 0 and 1 have a key; what is wrong with them is their value.
    assert found[3].what.startswith("the device map gives model.layers.2.")


def test_many_wrong_keys_share_a_finding() -> None:
    given = {"": 0} | {f"transformer.h.{number}": "cpu" for number in range(20)}
    found = check(checkpoint("llama"), given, hardware=CARD)
    assert codes(found) == ["TT201"] * 6
    assert found[-1].what.endswith("matches no module of the model, and 14 more such keys")


@pytest.mark.parametrize("given", ["auto", {}])
def test_what_is_no_map_is_found(given: Any) -> None:
    found = check(checkpoint("llama"), given, hardware=CARD)
    assert codes(found) == ["TT203" if given == "auto" else "TT202"]


def test_keys_that_are_understood_give_notes() -> None:
    given = {"": 0, "base_model.model.model.layers.0": "cpu"}
    found = check(checkpoint("llama"), given, hardware=CARD)
    assert {one.severity for one in found} == {"note"}
    assert found[0].code == "TT210"
    assert found[0].what == (
        "the device map's 'base_model.model.model.layers.0' is understood as 'model.layers.0'"
    )


def test_a_missing_device_is_found_once_and_the_rest_is_checked() -> None:
    found = check(checkpoint("llama"), {"": 0}, cpu="1GiB", hardware=NO_GPU)
    assert codes(found) == ["TT103"]
    assert codes(check(checkpoint("llama"), {"": 0}, cpu="1KiB", hardware=NO_GPU)) == [
        "TT103",
        "TT401",
    ]


def test_a_budget_that_is_too_small_is_found_with_its_shortfall() -> None:
    (one,) = check(checkpoint("llama"), cpu="1KiB", hardware=NO_GPU)
    assert one.code == "TT401"
    assert "more than the 1.00 KiB given" in one.what
    assert one.fix.startswith("give --cpu at least ")


def test_each_wrong_size_is_found() -> None:
    found = check(checkpoint("llama"), gpu="6 potatoes", cpu="-1", disk="1GiB", hardware=CARD)
    assert codes(check(checkpoint("llama"), adapter_memory="all", hardware=CARD)) == ["TT402"]
    assert codes(found) == ["TT402", "TT402"]
    assert [one.what for one in found] == ["'6 potatoes' is not a size", "'-1' is not a size"]


def test_a_modality_that_the_model_lacks_is_found() -> None:
    found = check(checkpoint("llama"), modalities=("text", "audio"), cpu="1KiB", hardware=NO_GPU)
    assert codes(found) == ["TT607", "TT401"]


def test_adapters_that_cannot_be_read_are_found(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    bare = writable(adapter(folder), tmp_path)
    (bare / "adapter_model.safetensors").unlink()
    found = check(folder, adapters=[tmp_path / "nowhere", bare], hardware=CARD)
    assert codes(found) == ["TT301", "TT301"]


def test_an_adapter_of_a_model_of_another_shape_is_found() -> None:
    found = check(checkpoint("llama"), adapters=adapter(checkpoint("gpt2")), hardware=CARD)
    assert codes(found) == ["TT303"]


def test_targets_that_match_nothing_are_found(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    lost = edited(adapter(folder), tmp_path, {"target_modules": ["query_key_value"]})
    (one,) = check(folder, adapters=lost, hardware=CARD)
    assert one.code == "TT304"
    assert "target_modules=[query_key_value]" in one.what


def test_a_renamed_prefix_is_a_note() -> None:
    """An adapter of the bare text model, on the one with a tower."""
    lora = adapter(checkpoint("gemma3"), targets=targets_of(checkpoint("llama")))
    found = check(checkpoint("gemma3-vlm"), adapters=lora, hardware=CARD)
    assert codes(found) == []
    assert any(one.code == "TT316" and "model.language_model.* here" in one.what for one in found)


def test_a_base_under_another_path_is_a_note_that_names_the_adapter_once(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    lora = adapter(folder)
    moved = writable(folder, tmp_path)
    base = moved.rename(tmp_path / "elsewhere")
    (one,) = check(base, adapters=lora, hardware=CARD)
    assert (one.code, one.severity) == ("TT316", "note")
    assert one.what == f"{lora} was made for {folder}, the base is {base}"


def test_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map, adapters, modalities and a budget, all wrong; the model has a name of the hub."""
    folder = checkpoint("llama")
    (tmp_path / "acme").mkdir()
    writable(folder, tmp_path / "acme").rename(tmp_path / "acme" / "llama")
    monkeypatch.chdir(tmp_path)
    stray = edited(
        adapter(folder),
        tmp_path,
        {"base_model_name_or_path": "acme/bert", "strange_field": 3},
        rename="base_model.model.model.layers.77.self_attn.q_proj.lora_A.weight",
    )
    lost = edited(adapter(folder, "dora"), tmp_path, {"target_modules": ["query_key_value"]})
    found = check(
        "acme/llama",
        {"model.embed_tokens": 0, "model.multi_modal_projector": 0, "lm_head": "gpu:3"},
        {"stray": stray, "lost": lost, "gone": "./gone"},
        quant="nf4",
        gpu="1MiB",
        modalities=("text", "image"),
        hardware=CARD,
    )
    assert codes(found) == [
        *("TT305", "TT307", "TT303"),
        "TT304",
        "TT301",
        *("TT201", "TT204", "TT202"),
        *("TT607", "TT401"),
    ]
    assert found[0].what == f"{stray} was made for acme/bert, the base is acme/llama"
    assert "strange_field=3" in found[1].what
    assert "layers.77.self_attn.q_proj.lora_A.weight" in found[2].what
    assert codes(found, "note") == []


def test_a_config_without_weights_is_found_and_checked(tmp_path: Path) -> None:
    folder = writable(checkpoint("llama"), tmp_path)
    (folder / "model.safetensors").unlink()
    assert codes(check(folder, {"transformer": 0}, hardware=CARD)) == ["TT503", "TT201"]


def test_damaged_weights_are_found_and_the_rest_is_checked(tmp_path: Path) -> None:
    folder = writable(checkpoint("llama"), tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = check(folder, {"transformer": 0}, tmp_path / "nowhere", hardware=CARD)
    assert codes(found) == ["TT502", "TT301", "TT201"]


def test_case_26_a_rewritten_checkpoint_is_found(tmp_path: Path) -> None:
    folder = writable(checkpoint("llama"), tmp_path)
    weights = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    renamed = {f"base_model.model.{name}": one for name, one in tensors.items()}
    safetensors.torch.save_file(renamed, weights, metadata={"format": "pt"})
    assert codes(check(folder, hardware=CARD)) == ["TT507"]


def test_a_wrong_format_is_found_and_the_names_are_checked() -> None:
    found = check(checkpoint("llama"), {"transformer": 0}, quant="nf5", hardware=CARD)
    assert codes(found) == ["TT509", "TT201"]


def test_a_model_that_is_not_there_is_found_beside_the_rest(tmp_path: Path) -> None:
    found = check(tmp_path / "nowhere", {"": 0}, tmp_path / "none", gpu="much", hardware=CARD)
    assert codes(found) == ["TT105", "TT301", "TT402"]


def test_an_old_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        return "0.17.9" if name == "peft" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = check(checkpoint("llama"), hardware=CARD)
    assert codes(found) == ["TT102"]
    assert found[0].what == "peft 0.17.9 is installed, and trimtab needs at least 0.18.1"
    assert found[0].fix == 'pip install -U "peft>=0.18.1"'
