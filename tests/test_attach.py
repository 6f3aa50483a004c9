"""Adapters on bases that accelerate has placed: equal, and the placement untouched."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig
from safetensors.torch import load_file

import kinds
import trimtab
from dispatched import half_on_disk, mixed_map, placed, placement
from tiny import adapter, checkpoint, inputs, logits, reference, tokens, writable
from trimtab import foreign
from trimtab.adapted import base_parameters
from trimtab.adapters import read_adapter
from trimtab.apply import load_onto
from trimtab.errors import AdapterFault

pytestmark = pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def hooks_and_homes(base: torch.nn.Module) -> list[Any]:
    """As `placement`, of the base's own modules and parameters, inside whatever PEFT has made."""
    hooks = sorted(
        (name.rpartition(".")[0], id(module._hf_hook))
        for name, module, _, _ in base_parameters(base)
        if "_hf_hook" in vars(module)
    )
    return [hooks, sorted((name, str(one.device)) for name, _, _, one in base_parameters(base))]


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


def all_but_one_layer(model: Any) -> dict[str, str]:
    """Table, norm, head and every layer but the first are on the disk."""
    count = len(model.get_submodule("model.layers"))
    away = {f"model.layers.{number}": "disk" for number in range(1, count)}
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "disk")
    return {"model.layers.0": "cpu", "model.rotary_emb": "cpu", **away, **ends}


NEED_A_GPU = ("Cartridge", "Prefix tuning")
"""Kinds for which PEFT looks for a GPU in the map of more than one device."""


def what_a_resident_model_says(
    row: kinds.Row, folder: Path, path: Path, given: dict[str, Any]
) -> tuple[str, torch.Tensor]:
    """The code that refuses the adapter, or its logits."""
    if row.name in NEED_A_GPU:
        return "TT314", torch.empty(0)
    try:
        resident, _ = load_onto(reference(folder), read_adapter(path))
    except AdapterFault as fault:
        return fault.code, torch.empty(0)
    return "", logits(resident, given)


@pytest.mark.filterwarnings("ignore")  # PEFT's own, of odd kinds
@pytest.mark.parametrize("row", kinds.rows(), ids=lambda row: row.name)
def test_every_kind_of_adapter(row: kinds.Row, tmp_path: Path) -> None:
    folder = checkpoint(row.model)
    base = placed(folder, all_but_one_layer(reference(folder)), tmp_path / "offload")
    path, given = kinds.source(row, "streamed"), {**inputs(folder, length=6), **row.inputs}
    before, written = hooks_and_homes(base), files(tmp_path)
    modules = [id(one) for one in base.modules()]
    code, expected = what_a_resident_model_says(row, folder, path, given)
    if code:
        with pytest.raises(AdapterFault) as caught:
            trimtab.attach(base, path)
        assert caught.value.code == code
        assert [hooks_and_homes(base), [id(one) for one in base.modules()]] == [before, modules]
        return
    bare = logits(base, inputs(folder, length=6))
    model = trimtab.attach(base, path)
    for _ in range(2):
        assert torch.equal(logits(model, given), expected)
    assert not torch.equal(expected, bare)
    assert files(tmp_path) == written
    resident, _ = load_onto(reference(folder), read_adapter(path))
    try:
        resident, _ = load_onto(resident, read_adapter(path), "second")
    except AdapterFault as fault:  # PEFT has one of this kind at a time
        with pytest.raises(AdapterFault, match=fault.code):
            model.load_adapter(path, "second")
    else:
        model.load_adapter(path, "second")
        for one in (model, resident):
            one.set_adapter("second")
    assert torch.equal(logits(model, given), logits(resident, given))
    assert hooks_and_homes(base) == before
    assert files(tmp_path) == written


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


@pytest.mark.parametrize(
    "extra", [{}, {"use_dora": True}, {"modules_to_save": ["input_layernorm"]}]
)
def test_a_new_adapter_is_the_one_of_a_resident_model(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path, given = adapter(checkpoint("llama")), inputs(folder)
    before = hooks_and_homes(base)
    model, resident = trimtab.attach(base, path), reference(folder, adapters=path)
    for one in (model, resident):
        torch.manual_seed(0)
        one.add_adapter("new", LoraConfig(r=4, target_modules=["q_proj"], **extra))
        foreign.cast_adapter(one, "new")
        one.set_adapter("new")
        fill_new(one)
    assert not any(one.is_meta for n, one in model.named_parameters() if ".new." in n)
    assert torch.equal(logits(model, given), logits(resident, given))
    assert hooks_and_homes(base) == before


def fill_new(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, one in model.named_parameters():
        if ".lora_B.new." in name:
            one.data.copy_(torch.randn(one.shape, generator=generator) * 0.1)


def test_many_beside_each_other(tmp_path: Path) -> None:
    """Switching, rows of one batch, a combination and a swap, with half the layers on the disk."""
    folder, base = half_on_disk("llama", tmp_path)
    paths = {name: adapter(checkpoint("llama"), seed=n + 1) for n, name in enumerate("abc")}
    given, before, written = inputs(folder), placement(base), files(tmp_path)
    model = trimtab.attach(base, paths["a"], "a")
    for name in "bc":
        model.load_adapter(paths[name], name)
    resident: Any = reference(folder)
    for name, path in paths.items():
        resident, _ = load_onto(resident, read_adapter(path), name)

    def equal() -> None:
        for name in tuple(model.peft_config):
            model.set_adapter(name)
            resident.set_adapter(name)
            assert torch.equal(logits(model, given), logits(resident, given))

    equal()
    assert not any(one.requires_grad for one in model.parameters())
    for rows in (["a", "b"], ["c", "__base__"]):
        with torch.no_grad():
            found = [one(**given, adapter_names=rows).logits for one in (model, resident)]
        assert torch.equal(*found)
    for kind in ("linear", "cat", "svd"):
        for one in (model, resident):
            one.add_weighted_adapter(["a", "b"], [0.4, 0.6], kind, combination_type=kind)
    equal()
    model.delete_adapter("b")
    resident.delete_adapter("b")
    equal()
    swapped = adapter(checkpoint("llama"), seed=9, r=4)
    model.swap_adapter("c", swapped)
    resident.delete_adapter("c")
    resident, _ = load_onto(resident, read_adapter(swapped), "c")
    equal()
    with pytest.raises(AdapterFault, match="TT321"):
        model.swap_adapter("c", adapter(checkpoint("llama"), "dora"))
    with pytest.raises(AdapterFault, match="TT311"):
        model.swap_adapter("b", swapped)
    equal()
    assert placement(base) == before
    assert files(tmp_path) == written


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
