"""Adapters on bases that accelerate has placed: equal, and the placement untouched."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from peft import LoraConfig
from safetensors.torch import load_file

import trimtab
from tiny import (
    adapter,
    checkpoint,
    inputs,
    logits,
    quantization_config,
    reference,
    tokens,
    writable,
)
from trimtab.errors import AdapterFault, PlacementFault, RunningFault

pytestmark = pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")

LAYERS = {"gemma4": "model.language_model.layers", "gemma3-vlm": "model.language_model.layers"}


def mixed_map(model: torch.nn.Module, name: str, runs: Any = "cpu", rests: str = "disk") -> Any:
    """Every other layer, and the towers, rest elsewhere; what is around them runs on `runs`."""
    layers = LAYERS.get(name, "model.layers")
    chosen = {
        f"{layers}.{number}": rests
        for number in range(len(model.get_submodule(layers)))
        if number % 2
    }
    chosen |= {
        full: rests
        for full in ("model.vision_tower", "model.audio_tower")
        if any(one == full for one, _ in model.named_modules())
    }

    def fill(prefix: str, module: torch.nn.Module) -> None:
        for last, child in module.named_children():
            full = f"{prefix}{last}"
            if any(one.startswith(f"{full}.") for one in chosen):
                fill(f"{full}.", child)
            elif full not in chosen:
                chosen[full] = runs

    fill("", model)
    return chosen


def placed(folder: Path, device_map: Any, offload: Path, quant: str = "none") -> Any:
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, kind).from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map=device_map,
        offload_folder=str(offload),
        quantization_config=quantization_config(quant),
    )


def half_on_disk(name: str, tmp_path: Path) -> tuple[Path, Any]:
    folder = writable(checkpoint(name), tmp_path)
    return folder, placed(folder, mixed_map(reference(folder), name), tmp_path / "offload")


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def placement(base: torch.nn.Module) -> list[Any]:
    """Hooks, map, and where each of the base's parameters is, whatever PEFT has put around them."""

    def plain(name: str) -> str:
        return name.replace(".base_layer", "")

    hooks = sorted(
        (plain(name), id(one._hf_hook))
        for name, one in base.named_modules()
        if "_hf_hook" in vars(one)
    )
    homes = sorted(
        (plain(name), str(one.device))
        for name, one in base.named_parameters()
        if ".lora_" not in name
    )
    return [hooks, dict(base.hf_device_map), homes]


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # 5.1: a tower on disk comes first
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3-vlm", "gemma4", "qwen3-moe"])
def test_half_on_disk_equals_all_resident(name: str, kind: str, tmp_path: Path) -> None:
    folder, base = half_on_disk(name, tmp_path)
    path, given = adapter(checkpoint(name), kind), inputs(folder)
    bare, before, written = logits(base, given), placement(base), files(tmp_path)
    assert any(one.is_meta for one in base.parameters())
    resident = reference(folder, adapters=path)
    expected = logits(resident, given)

    model = trimtab.attach(base, path)
    assert not any(one.is_meta for n, one in model.named_parameters() if ".lora_" in n)
    assert placement(base) == before
    for _ in range(2):
        assert torch.equal(logits(model, given), expected)
    assert torch.equal(tokens(model, given, 4), tokens(resident, given, 4))
    assert placement(base) == before

    model.load_adapter(path, "second")
    model.set_adapter("second")
    assert torch.equal(logits(model, given), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model, given), bare)
    model.delete_adapter("default")
    assert torch.equal(logits(model, given), expected)
    model.delete_adapter("second")
    model.load_adapter(path, "third")  # stock dispatches again here
    assert torch.equal(logits(model, given), expected)
    assert placement(base) == before
    assert files(tmp_path) == written
    unloaded = model.unload()
    assert torch.equal(logits(unloaded, given), bare)
    assert placement(unloaded) == before


def test_images_through_a_tower_on_disk(tmp_path: Path) -> None:
    folder = writable(checkpoint("gemma4"), tmp_path)
    vision = mixed_map(reference(folder), "gemma4")
    base = placed(folder, {**vision, "model.vision_tower": "cpu"}, tmp_path / "offload")
    path = adapter(checkpoint("gemma4"))
    given = inputs(folder, modalities=("text", "image"))
    model = trimtab.attach(base, path)
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))


@pytest.mark.parametrize("kind", ["LoHa", "LoKr", "OFT", "HRA", "FourierFT", "Road"])
def test_other_kinds(kind: str, tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path, given = adapter(checkpoint("llama"), kind), inputs(folder)
    model = trimtab.attach(base, path)
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))


def test_a_base_named_by_a_relative_path_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 26: the stock stack rewrites the user's model.safetensors here."""
    folder = writable(checkpoint("llama"), tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = Path(folder.name)
    device_map = mixed_map(reference(folder), "llama")
    base = placed(relative, device_map, tmp_path / "offload")
    before = files(tmp_path)
    model = trimtab.attach(base, adapter(checkpoint("llama")))
    model.load_adapter(adapter(checkpoint("llama"), seed=2), "second")
    logits(model, inputs(folder))
    assert files(tmp_path) == before


def test_a_base_that_was_dispatched_by_hand(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    base = reference(folder)
    dispatch_model(base, mixed_map(base, "llama"), offload_dir=str(tmp_path / "offload"))
    path, given = adapter(folder, "dora"), inputs(folder)
    written = files(tmp_path)
    model = trimtab.attach(base, path)
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))
    assert files(tmp_path) == written


def test_a_resident_base() -> None:
    folder = checkpoint("llama")
    path, given = adapter(folder), inputs(folder)
    model = trimtab.attach(reference(folder), path)
    model = trimtab.attach(model, path, "second")
    assert tuple(model.peft_config) == ("default", "second")
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))


def test_saving_writes_the_same_adapter(tmp_path: Path) -> None:
    _, base = half_on_disk("llama", tmp_path)
    path = adapter(checkpoint("llama"), "dora")
    trimtab.attach(base, path).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    original = load_file(path / "adapter_model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(one, original[key]) for key, one in saved.items())


def test_a_forward_that_fails_leaves_the_layer_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path, given = adapter(checkpoint("llama"), "dora"), inputs(folder)
    model = trimtab.attach(base, path)
    before, expected = placement(base), logits(model, given)
    layer = base.get_submodule("model.layers.1.mlp.up_proj")
    with monkeypatch.context() as patch:
        patch.setattr(
            layer.lora_A["default"], "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        with pytest.raises(KeyboardInterrupt):
            logits(model, given)
    assert placement(base) == before
    assert torch.equal(logits(model, given), expected)


def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path = Path(shutil.copytree(adapter(checkpoint("llama")), tmp_path / "broken"))
    weights = load_file(path / "adapter_model.safetensors")
    del weights["base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"]
    from safetensors.torch import save_file

    save_file(weights, path / "adapter_model.safetensors")
    given = inputs(folder)
    before = [placement(base), logits(base, given), [id(one) for one in base.modules()]]
    with pytest.raises(AdapterFault, match="TT312"):
        trimtab.attach(base, path)
    assert placement(base) == before[0]
    assert torch.equal(logits(base, given), before[1])
    assert [id(one) for one in base.modules()] == before[2]


@pytest.mark.filterwarnings("ignore:Model has:UserWarning")
@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [
        ("lora", {"modules_to_save": ["up_proj"], "targets": ["q_proj"]}, "TT308"),
        ("Shira", {}, "TT308"),
        ("lora", {"init_lora_weights": "olora"}, "TT308"),
    ],
)
def test_what_reads_offloaded_weights_is_refused_before_anything_changes(
    kind: str, options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    _, base = half_on_disk("llama", tmp_path)
    before = [placement(base), [id(one) for one in base.modules()]]
    with pytest.raises(AdapterFault, match=code):
        trimtab.attach(base, adapter(checkpoint("llama"), kind, **options))
    assert [placement(base), [id(one) for one in base.modules()]] == before


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # peft 0.18
def test_experts_that_are_offloaded_are_refused(tmp_path: Path) -> None:
    _, base = half_on_disk("qwen3-moe", tmp_path)
    path = adapter(
        checkpoint("qwen3-moe"), targets=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    )
    before = placement(base)
    with pytest.raises(AdapterFault, match="TT313"):
        trimtab.attach(base, path)
    assert placement(base) == before


def test_a_quantized_layer_on_meta_is_refused(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    base = reference(folder, "nf4")
    dispatched = base.get_submodule("model.layers.1.mlp.up_proj")
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    weights = {"weight": dispatched.weight.data.clone()}
    hook = AlignDevicesHook(execution_device="cpu", offload=False)
    add_hook_to_module(dispatched, hook)
    hook.offload, hook.weights_map = True, weights
    dispatched.weight = torch.nn.Parameter(dispatched.weight.data.to("meta"), requires_grad=False)
    with pytest.raises(PlacementFault, match="TT204"):
        trimtab.attach(base, adapter(folder))


def test_a_base_on_meta_is_refused() -> None:
    folder = checkpoint("llama")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(PlacementFault, match="TT207"):
        trimtab.attach(base, adapter(folder))


def test_merging_and_training_are_refused(tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path, given = adapter(checkpoint("llama")), inputs(folder)
    model = trimtab.attach(base, path)
    expected = logits(model, given)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(AdapterFault, match="TT309"):
            merge()
    with pytest.raises(AdapterFault, match="TT309"):
        base.get_submodule("model.layers.1.mlp.up_proj").merge()
    with pytest.raises(RunningFault, match="TT607"):
        model.load_adapter(path, "trained", is_trainable=True)
    assert torch.equal(logits(model, given), expected)


def test_a_new_adapter_lands_where_its_layer_runs(tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    given = inputs(folder)
    bare = logits(base, given)
    model = trimtab.attach(base, adapter(checkpoint("llama")))
    model.add_adapter("new", LoraConfig(r=4, target_modules=["q_proj"]))
    model.set_adapter("new")
    assert torch.equal(logits(model, given), bare)  # untrained: B is zero
    with pytest.raises(AdapterFault, match="TT308"):
        model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    assert "other" not in model.peft_config


@pytest.mark.gpu
@pytest.mark.parametrize("rests", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_partly_on_the_gpu(name: str, kind: str, rests: str, tmp_path: Path) -> None:
    folder = writable(checkpoint(name), tmp_path)
    base = placed(folder, mixed_map(reference(folder), name, 0, rests), tmp_path / "offload")
    path, given = adapter(checkpoint(name), kind), inputs(folder)
    before, written = placement(base), files(tmp_path)
    model = trimtab.attach(base, path)
    model.load_adapter(path, "second")
    expected = reference(folder, adapters=path, device="cuda")
    on_gpu = {key: one.to("cuda") for key, one in given.items()}
    for adapter_name in ("default", "second"):
        model.set_adapter(adapter_name)
        assert torch.equal(logits(model, on_gpu), logits(expected, on_gpu))
    assert {str(p.device) for n, p in model.named_parameters() if ".lora_" in n} == {"cuda:0"}
    assert placement(base) == before
    assert files(tmp_path) == written


@pytest.mark.gpus
@pytest.mark.parametrize("quant", ["none", "nf4"])
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_over_two_gpus(name: str, quant: str, tmp_path: Path) -> None:
    """Every other layer is on the second GPU: each adapter weight goes where its layer runs."""
    folder = checkpoint(name)
    whole = mixed_map(reference(folder), name, 0, 1)
    base = placed(folder, whole, tmp_path / "offload", quant)
    path, before = adapter(folder), placement(base)
    model = trimtab.attach(base, path)
    model.load_adapter(path, "second")
    given = inputs(folder, device="cuda:0")
    expected = reference(folder, quant, path, device="cuda:0")
    for adapter_name in ("default", "second"):
        model.set_adapter(adapter_name)
        assert torch.equal(logits(model, given), logits(expected, given))
    homes = {str(p.device) for n, p in model.named_parameters() if ".lora_" in n}
    assert homes == {"cuda:0", "cuda:1"}
    assert placement(base) == before
