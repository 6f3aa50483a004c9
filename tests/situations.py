"""For each code of trimtab a situation that shows it, and its near twin that does not.

Each is one function of a folder of its own and of whether things are wrong there: the twins differ
in that alone. It raises a fault, or returns findings. `from situations import SITUATIONS`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import failing_situations as failing  # of scripts/
import tiny
from placing import carried_out, placed, planned
from trimtab import disk, quantize, rooms
from trimtab.adapters import read_adapter
from trimtab.api import load, plan
from trimtab.attach import attach
from trimtab.checkpoint import open_checkpoint
from trimtab.compat import check_base
from trimtab.diagnosis import Finding, check
from trimtab.diagnosis.doctor import examine
from trimtab.diagnosis.versions import check_versions
from trimtab.hardware import Gpu, Hardware
from trimtab.memory import GiB
from trimtab.merge import merge
from trimtab.park import Wrapped
from trimtab.plan import WeightSpec
from trimtab.store import MemorySlab, SlabLayout

Run = Callable[[Path, bool], Sequence[Finding] | None]

ROOM: dict[str, Any] = {"ram_total": 32 * GiB, "ram_available": 16 * GiB, "disk_free": 99 * GiB}
CARD = Hardware(gpus=(Gpu("a card", 8 * GiB, 8 * GiB),), **ROOM)
NO_GPU = Hardware(gpus=(), **ROOM)
SMALL: dict[str, Any] = {"cpu": "2GiB", "disk": "2GiB", "context": 64}


@dataclass(frozen=True)
class Situation:
    """`says`: in the fault's words, with DIR for the folder, BASE for the Llama, SIZE for sizes."""

    code: str
    says: str
    run: Run


SITUATIONS: list[Situation] = []


def shows(code: str, says: str) -> Callable[[Run], Run]:
    def keep(run: Run) -> Run:
        SITUATIONS.append(Situation(code, says, run))
        return run

    return keep


# ------------------------------------------------------------------------------------ what is used


def base(at: Path, name: str = "llama") -> Path:
    """A copy of a checkpoint, to be changed."""
    return tiny.writable(tiny.checkpoint(name), at).rename(at / "base")


def lora(at: Path, name: str = "llama", kind: str = "lora", **options: Any) -> Path:
    """A copy of an adapter, to be changed."""
    made = tiny.adapter(tiny.checkpoint(name), kind, **options)
    return tiny.writable(made, at).rename(at / "lora")


def edit(folder: Path, **fields: Any) -> Path:
    """Changes a config: sets fields, or removes those that are None."""
    names = ("adapter_config.json", "config.json")
    file = next(one for name in names if (one := folder / name).exists())
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Changes the tensors of a folder's file."""
    (file,) = folder.glob("*model.safetensors")
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return folder


def llama() -> Path:
    return tiny.checkpoint("llama")


def looked_at(device_map: dict[str, Any], hardware: Hardware = CARD) -> list[Finding]:
    return check(llama(), device_map, hardware=hardware)


# ------------------------------------------------------------------------------------- environment


@shows("TT101", "the format nf4 needs the package bitsandbytes, which is not installed")
def _quantizer(at: Path, wrong: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(importlib.util, "find_spec", lambda name: None)
        quantize.require_bitsandbytes("nf4")


@shows("TT101", "the package peft is not installed")
def _package(at: Path, wrong: bool) -> list[Finding]:
    there = {"transformers": "5.1.0", "accelerate": "1.12.0", "peft": "0.18.1"}
    return check_versions("llama", {**there, **({"peft": None} if wrong else {})}.get)


@shows("TT102", "peft 0.17.9 is installed, and trimtab needs at least 0.18.1")
def _old_package(at: Path, wrong: bool) -> list[Finding]:
    peft = "0.17.9" if wrong else "0.18.1"
    there = {"transformers": "5.1.0", "accelerate": "1.12.0", "peft": peft}
    return check_versions("llama", there.get)


@shows("TT103", "the device map names GPU 0, and this plan runs on the CPU")
def _gpu(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"": 0}, NO_GPU if wrong else CARD)


@shows("TT103", "the plan runs on gpu:7, and torch sees 0 CUDA devices")
def _gpu_of_a_plan(at: Path, wrong: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0 if wrong else 8)
        rooms.device_of("gpu:7")


@shows(
    "TT104",
    f"DIR/base is a Gemma9ForCausalLM, which transformers {transformers.__version__} does not have",
)
def _class(at: Path, wrong: bool) -> list[Finding]:
    named = "Gemma9ForCausalLM" if wrong else "LlamaForCausalLM"
    return check(edit(base(at), architectures=[named]), hardware=CARD)


@shows("TT105", "there is no folder DIR/bose")
def _model(at: Path, wrong: bool) -> list[Finding]:
    base(at)
    return check(at / ("bose" if wrong else "base"), hardware=CARD)


@shows("TT105", "DIR/base/config.json is a file, not a model")
def _model_file(at: Path, wrong: bool) -> None:
    open_checkpoint(base(at) / ("config.json" if wrong else ""))


@shows("TT106", "torch does not work: OSError: libcudart.so.13: cannot open shared object file")
def _torch(at: Path, wrong: bool) -> Sequence[Finding]:
    said = "failed: OSError: libcudart.so.13: cannot open shared object file"
    return examine(True, ask=lambda words: said if wrong else '{"RAM": "9.9 GB/s"}').findings


# ----------------------------------------------------------------------------- maps and placements


@shows("TT201", "the device map's key 'model.layer.3' matches no module of the model")
def _key(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"": 0, "model.layer.3" if wrong else "model.layers.3": "cpu"})


@shows("TT202", "the device map gives lm_head.weight no device")
def _lacking(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"model": 0} | ({} if wrong else {"lm_head": 0}))


@shows("TT203", "the device map gives 'lm_head' the value 'meta', which names no tier")
def _value(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"": 0, "lm_head": "meta" if wrong else "cpu"})


@shows("TT203", "'auto' is not a device map")
def _word(at: Path, wrong: bool) -> list[Finding]:
    return looked_at("auto" if wrong else {"": 0})  # type: ignore[arg-type]


@shows("TT204", "the device map puts 'lm_head' on 1, a GPU that is not the first")
def _second_gpu(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"": 0, "lm_head": 1 if wrong else 0})


@shows("TT204", "a plan is carried out as it is, and context was given beside it")
def _beside_a_plan(at: Path, wrong: bool) -> None:
    load(plan(llama(), **SMALL), **({"context": 65} if wrong else {})).close()


@shows("TT204", "the disk folder DIR/lock/x cannot be used: Not a directory")
def _no_folder(at: Path, wrong: bool) -> None:
    (at / "lock").write_text("")
    disk.DiskFolder(at / "lock" / "x" if wrong else at / "x").close()


@shows("TT205", "the plan was made for DIR/base as FINGERPRINT, which is now FINGERPRINT")
def _other_checkpoint(at: Path, wrong: bool) -> None:
    made = plan(base(at), **SMALL)
    edit(at / "base", rms_norm_eps=1e-4 if wrong else 1e-6)
    load(made).close()


@shows("TT206", "the disk folder DIR/one is in use by another placement")
def _folder_in_use(at: Path, wrong: bool) -> None:
    first = disk.DiskFolder(at / "one")
    try:
        disk.DiskFolder(at / ("one" if wrong else "two")).close()
    finally:
        first.close()


@shows(
    "TT207",
    "model.layers.0.self_attn.q_proj.weight has no data, and no hook of accelerate on its module "
    "brings it in",
)
def _unplaced(at: Path, wrong: bool) -> None:
    config = transformers.AutoConfig.from_pretrained(llama())
    with torch.device("meta" if wrong else "cpu"):
        model = transformers.LlamaForCausalLM(config)
    attach(model, tiny.adapter(llama()))


@shows("TT208", "the placement of BASE is closed")
def _closed(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("layers",)) as found:
        if wrong:
            found.close()
        found.report()


@shows("TT209", "the forward of Linear is replaced already")
def _replaced_forward(at: Path, wrong: bool) -> None:
    module = nn.Linear(2, 2)
    if wrong:
        module.forward = nn.Linear(2, 2).forward  # type: ignore[method-assign]
    Wrapped(module, lambda: None).remove()


@shows(
    "TT210",
    "the device map's 'base_model.model.model.layers.0' is understood as 'model.layers.0'",
)
def _prefix(at: Path, wrong: bool) -> list[Finding]:
    return looked_at({"": 0, f"{'base_model.model.' if wrong else ''}model.layers.0": 0})


@shows(
    "TT223", "transformers takes the key 'model.layers.1' for model.layers.10 too, trimtab does not"
)
def _beginning(at: Path, wrong: bool) -> list[Finding]:
    folder = edit(base(at), num_hidden_layers=11, layer_types=None)
    (folder / "model.safetensors").unlink()
    others = {} if wrong else {"model.layers.10": 0}
    return check(folder, {"": 0, "model.layers.1": "cpu", **others}, hardware=CARD)


# ---------------------------------------------------------------------------------------- adapters


def of_llama(folder: Path) -> list[Finding]:
    return check(llama(), adapters=folder, hardware=CARD)


@shows("TT301", "there is no folder DIR/lara")
def _adapter(at: Path, wrong: bool) -> list[Finding]:
    lora(at)
    return of_llama(at / ("lara" if wrong else "lora"))


@shows("TT301", "DIR/lora has no adapter_config.json")
def _adapter_config(at: Path, wrong: bool) -> list[Finding]:
    folder = lora(at)
    if wrong:
        (folder / "adapter_config.json").unlink()
    return of_llama(folder)


@shows(
    "TT301",
    "DIR/lora has adapter_config.json but no weights: neither adapter_model.safetensors nor "
    "adapter_model.bin",
)
def _adapter_weights(at: Path, wrong: bool) -> list[Finding]:
    folder = lora(at)
    if wrong:
        (folder / "adapter_model.safetensors").unlink()
    return of_llama(folder)


@shows("TT302", "DIR/lora/adapter_model.safetensors is damaged")
def _adapter_damaged(at: Path, wrong: bool) -> list[Finding]:
    file = lora(at) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: -1 if wrong else None])
    return of_llama(at / "lora")


@shows(
    "TT302",
    "DIR/lora/adapter_model.bin is a pickle that holds more than weights; it was not loaded",
)
def _adapter_pickle(at: Path, wrong: bool) -> list[Finding]:
    file = lora(at) / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    file.unlink()
    torch.save({**tensors, **({"x": Path("x")} if wrong else {})}, at / "lora/adapter_model.bin")
    return of_llama(at / "lora")


STRAY = "base_model.model.model.layers.77.mlp.up_proj.lora_A.weight"


@shows("TT303", f"1 of the 85 tensors of DIR/lora match nothing in the model: {STRAY}")
def _stray(at: Path, wrong: bool) -> list[Finding]:
    def add(tensors: dict[str, Any]) -> None:
        tensors[STRAY] = torch.zeros(8, 128)

    return of_llama(rewrite(lora(at), add if wrong else lambda tensors: None))


@shows(
    "TT304",
    "target_modules=[query_key_value] of DIR/lora matches no module that its file has tensors for: "
    "model.layers.0.mlp.down_proj, model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj and 39 "
    "more",
)
def _targets(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), **({"target_modules": ["query_key_value"]} if wrong else {})))


@shows("TT305", "DIR/lora was made for acme/bert, the base is acme/llama")
def _other_base(at: Path, wrong: bool) -> None:
    folder = edit(lora(at), base_model_name_or_path=f"acme/{'bert' if wrong else 'llama-bnb-4bit'}")
    check_base(read_adapter(folder), "acme/llama", False, [])


@shows(
    "TT306",
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight of DIR/lora is [8, 256], the "
    "model needs [4, 256]",
)
def _rank(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), r=4 if wrong else 8))


@shows("TT307", "DIR/lora sets strange_field=3, which the installed PEFT does not know")
def _field(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), **({"strange_field": 3} if wrong else {})))


@shows("TT307", "DIR/lora is of the kind NEWLORA, which the installed PEFT does not know")
def _kind(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), peft_type="NEWLORA" if wrong else "LORA"))


@shows("TT308", "DIR/lora was saved with init_lora_weights='pissa'")
def _init(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), init_lora_weights="pissa" if wrong else True))


@shows("TT309", "an adapter cannot be merged into a placed model")
def _merge_placed(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("half",), {"a": lora(at)}) as found:
        getattr(found.model, "merge_adapter" if wrong else "disable_adapter")()


@shows("TT309", "DIR/base is quantized (bitsandbytes): nothing is merged into it")
def _merge_quantized(at: Path, wrong: bool) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    merge(edit(base(at), quantization_config=stored if wrong else None), lora(at), at / "out")


@shows(
    "TT310",
    "DIR/lora holds its own values of model.embed_tokens.weight, a tensor of the base",
)
def _base_tensor(at: Path, wrong: bool) -> None:
    name = "model.embed_tokens.weight"
    table = safetensors.torch.load_file(llama() / "model.safetensors")[name]

    def add(tensors: dict[str, Any]) -> None:
        tensors[f"base_model.model.{name}"] = table + wrong

    placed(llama(), adapters={"a": rewrite(lora(at), add)}).close()


@shows("TT311", "an adapter named 'a' is loaded already")
def _name(at: Path, wrong: bool) -> None:
    with placed(llama(), adapters={"a": lora(at)}) as found:
        found.add_adapter("a" if wrong else "b", at / "lora")


@shows(
    "TT312",
    "DIR/lora targets 1 modules that its file has no tensors for: model.layers.3.mlp.up_proj",
)
def _tensors(at: Path, wrong: bool) -> list[Finding]:
    def cut(tensors: dict[str, Any]) -> None:
        for key in [one for one in tensors if "layers.3.mlp.up_proj" in one] if wrong else ():
            del tensors[key]

    return of_llama(rewrite(lora(at), cut))


@shows(
    "TT313",
    "DIR/lora adapts 1 modules that PEFT cannot adapt: model.layers.3.mlp",
)
def _wrapper(at: Path, wrong: bool) -> list[Finding]:
    def rename(tensors: dict[str, Any]) -> None:
        for key in [one for one in tensors if "layers.3.mlp.up_proj" in one] if wrong else ():
            tensors[key.replace("mlp.up_proj", "mlp")] = tensors.pop(key)

    targets = ["mlp", *tiny.targets_of(llama())]
    return of_llama(edit(rewrite(lora(at), rename), target_modules=targets))


@shows("TT314", "DIR/lora uses the kind XLORA, which trimtab does not support")
def _unsupported_kind(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), peft_type="XLORA" if wrong else "LORA"))


@shows("TT315", "PEFT refused DIR/lora")
def _refused(at: Path, wrong: bool) -> None:
    kind = "LoHa" if wrong else "lora"
    with placed(llama(), adapters={"a": tiny.adapter(llama())}) as found:
        found.add_adapter("b", lora(at, kind=kind))


@shows("TT316", "DIR/lora was made for DIR/other, the base is BASE")
def _moved_base(at: Path, wrong: bool) -> list[Finding]:
    made_for = at / "other" if wrong else llama()
    return of_llama(edit(lora(at), base_model_name_or_path=str(made_for)))


@shows(
    "TT317",
    "DIR/lora (IA3) does not compute on quantized layers: model.layers.0.self_attn.q_proj",
)
def _on_quantized(at: Path, wrong: bool) -> None:
    placed(llama(), "nf4" if wrong else "none", adapters={"a": lora(at, kind="IA3")}).close()


@shows("TT318", "DIR/out is there already and not empty")
def _taken(at: Path, wrong: bool) -> None:
    if wrong:
        (at / "out").mkdir()
        (at / "out" / "config.json").write_text("{}")
    merge(llama(), lora(at), at / "out")


@shows("TT321", "DIR/lora cannot take the place of the adapter 'a'")
def _swap(at: Path, wrong: bool) -> None:
    new = lora(at, kind="LoHa" if wrong else "lora", seed=2)
    with placed(llama(), adapters={"a": tiny.adapter(llama())}) as found:
        found.swap_adapter("a", new)


# ------------------------------------------------------------------------------------------ memory


@shows(
    "TT401",
    "the model does not fit: the leanest plan needs SIZE on cpu, SIZE more than the SIZE given",
)
def _budget(at: Path, wrong: bool) -> list[Finding]:
    return check(llama(), cpu="1KiB" if wrong else "1GiB", context=64, hardware=NO_GPU)


@shows("TT402", "'6 potatoes' is not a size")
def _size(at: Path, wrong: bool) -> list[Finding]:
    return check(llama(), gpu="6 potatoes" if wrong else "6GiB", hardware=CARD)


@shows("TT403", "the disk of DIR/slabs is full: SIZE more were needed")
def _full_disk(at: Path, wrong: bool) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(disk, "reserve_blocks", full)
        folder = disk.DiskFolder(at / "slabs")
        try:
            folder.reserve(10 << 20)
        finally:
            folder.close()


@shows("TT403", "writing DIR/out.partial needs SIZE more, and SIZE are free")
def _full_disk_of_a_merge(at: Path, wrong: bool) -> None:
    usage = shutil.disk_usage(at)
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
        merge(llama(), lora(at), at / "out")


@shows("TT404", "cpu ran out of memory while BASE was running")
def _gpu_memory(at: Path, wrong: bool) -> None:
    """As torch raises it, from within an answer."""
    with placed(llama()) as found, found.running():
        if wrong:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


@shows("TT404", "SIZE of memory for model.layers.0 could not be had")
def _host_memory(at: Path, wrong: bool) -> None:
    def none(*given: Any, **options: Any) -> None:
        raise MemoryError("cannot allocate")

    made = planned(llama(), "none", ("layers",), device="cpu", tier="disk")
    units = tuple(
        dataclasses.replace(one, rests="cpu") if one.mode == "streamed" else one
        for one in made.units
    )
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr(rooms, "MemorySlab", none)
        carried_out(dataclasses.replace(made, units=units)).close()


@shows(
    "TT406",
    "2 adapters are needed at once, a, b: together SIZE, and the adapter memory is SIZE",
)
def _adapter_memory(at: Path, wrong: bool) -> None:
    """On a CPU nothing needs to move: the cap is set past the plan."""
    with placed(llama()) as found, torch.no_grad():
        found.shelf.cap = 400_000 if wrong else 1_000_000
        for name in ("a", "b"):
            found.add_adapter(name, tiny.adapter(llama(), seed=ord(name)))
        found.model.base_model.set_adapter(["a", "b"])
        found.model(**tiny.inputs(llama()))


# ----------------------------------------------------------------------- formats and checkpoints


@shows("TT501", "DIR/base has no config.json")
def _config(at: Path, wrong: bool) -> list[Finding]:
    folder = base(at)
    if wrong:
        (folder / "config.json").unlink()
    return check(folder, hardware=CARD)


@shows(
    "TT502",
    "DIR/base/model.safetensors is truncated or damaged: its header promises 2493696 bytes of "
    "tensors, it holds 2493695",
)
def _truncated(at: Path, wrong: bool) -> list[Finding]:
    file = base(at) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: -1 if wrong else None])
    return check(at / "base", hardware=CARD)


@shows("TT502", "DIR/base/config.json holds no JSON object")
def _no_object(at: Path, wrong: bool) -> list[Finding]:
    folder = base(at)
    if wrong:
        (folder / "config.json").write_text("[]")
    return check(folder, hardware=CARD)


@shows(
    "TT503",
    "DIR/base holds no weights: neither model.safetensors nor pytorch_model.bin, whole or in "
    "shards",
)
def _no_weights(at: Path, wrong: bool) -> list[Finding]:
    folder = base(at)
    if wrong:
        (folder / "model.safetensors").unlink()
    return check(folder, hardware=CARD)


def index(folder: Path, **named: str) -> Path:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    found = {"weight_map": {**dict.fromkeys(tensors, "model-1.safetensors"), **named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(found))
    return folder


@shows("TT503", "the shard model-2.safetensors of DIR/base is missing: 1 of 58 tensors are in it")
def _shard(at: Path, wrong: bool) -> list[Finding]:
    lost = {"lost.weight": "model-2.safetensors"} if wrong else {}
    return check(index(base(at), **lost), hardware=CARD)


@shows(
    "TT504",
    "DIR/base/model.safetensors.index.json names 1 tensors that its files do not hold: lost.weight",
)
def _index(at: Path, wrong: bool) -> list[Finding]:
    lost = {"lost.weight": "model-1.safetensors"} if wrong else {}
    return check(index(base(at), **lost), hardware=CARD)


@shows("TT505", "DIR/base lacks 1 tensors that LlamaForCausalLM needs: model.norm.weight")
def _missing(at: Path, wrong: bool) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        if wrong:
            del tensors["model.norm.weight"]

    load(rewrite(base(at), cut), **SMALL).close()


@shows(
    "TT506",
    "model.norm.weight has the shape [64] in DIR/base, the config asks for [128]",
)
def _shape(at: Path, wrong: bool) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        if wrong:
            tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)

    load(rewrite(base(at), cut), **SMALL).close()


@shows(
    "TT507",
    "1 of the 57 tensors of DIR/base have names that begin with 'base_model.model.', such as "
    "base_model.model.lm_head.weight",
)
def _rewritten(at: Path, wrong: bool) -> list[Finding]:
    def rename(tensors: dict[str, Any]) -> None:
        if wrong:
            tensors["base_model.model.lm_head.weight"] = tensors.pop("lm_head.weight")

    return check(rewrite(base(at), rename), hardware=CARD)


@shows("TT508", "a (data) was loaded as [2, 2] torch.float32; the plan has [2, 2] torch.bfloat16")
def _layout(at: Path, wrong: bool) -> None:
    slab = MemorySlab(SlabLayout.of([WeightSpec("a", (2, 2), "bfloat16")]), pin=False)
    slab.put("a", "data", torch.ones(2, 2, dtype=torch.float32 if wrong else torch.bfloat16))
    slab.close()


@shows("TT509", "the storage format 'nf5' is not supported")
def _format(at: Path, wrong: bool) -> list[Finding]:
    return check(llama(), quant="nf5" if wrong else "nf4", hardware=CARD)


@shows("TT509", "'float17' is not a dtype")
def _dtype(at: Path, wrong: bool) -> list[Finding]:
    return check(llama(), dtype="float17" if wrong else "float16", hardware=CARD)


@shows("TT510", "the config of DIR/base does not say which class the model is of")
def _no_class(at: Path, wrong: bool) -> list[Finding]:
    named = None if wrong else ["LlamaForCausalLM"]
    return check(edit(base(at), architectures=named), hardware=CARD)


@shows("TT516", "BASE is placed in bfloat16: there is nothing quantized to save")
def _nothing_quantized(at: Path, wrong: bool) -> None:
    with placed(llama(), "none" if wrong else "nf4") as found:
        found.save_quantized(at / "out")


@shows("TT516", "DIR/out is there already, and a file")
def _taken_by_a_file(at: Path, wrong: bool) -> None:
    if wrong:
        (at / "out").write_text("")
    with placed(llama(), "nf4") as found:
        found.save_quantized(at / "out")


@shows(
    "TT514",
    "several tensors of DIR/base are model.layers.0.self_attn.q_proj.weight",
)
def _two_of_a_name(at: Path, wrong: bool) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"

    def add(tensors: dict[str, Any]) -> None:
        if wrong:
            tensors[key.removeprefix("model.")] = tensors[key].clone()

    merge(rewrite(base(at), add), lora(at), at / "out")


# ----------------------------------------------------------------------------------------- running


@shows("TT601", "fill_ would write to model.layers.0.mlp.up_proj.weight, which is parked")
def _write(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("layers",)) as found:
        weight = found.model.model.layers[0].mlp.up_proj.weight
        weight.fill_(0) if wrong else weight.float().fill_(0)


@shows(
    "TT602",
    "model.layers.0.mlp.up_proj.weight is parked, and another parameter was put in its place",
)
def _replace(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("layers",)) as found:
        if wrong:
            module = found.model.model.layers[0].mlp.up_proj
            module.weight = nn.Parameter(module.weight.float())
        tiny.logits(found.model, tiny.inputs(llama()))


@shows(
    "TT603",
    "model.vision_tower is needed, and the plan left it out: it takes SIZE and SIZE are spare",
)
def _tower(at: Path, wrong: bool) -> None:
    folder = tiny.checkpoint("gemma3-vlm")
    made = planned(folder, "none", ("towers",))
    room = made.totals["cpu"] if wrong else 2 * made.totals["cpu"]
    tight = dataclasses.replace(made, budget=dataclasses.replace(made.budget, cpu=room))
    with carried_out(tight) as found:
        tiny.logits(found.model, tiny.inputs(folder, modalities=("text", "image")))


@shows("TT604", "gradients reached the output of a streamed LlamaDecoderLayer")
def _gradients(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("layers",) if wrong else ()) as found:
        found.model.requires_grad_(True)
        found.model(**tiny.inputs(llama())).logits.float().sum().backward()


@shows("TT605", "a placed model cannot be copied")
def _copy(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("layers",)) as found:
        copy.deepcopy(found.model if wrong else found.model.config)


@shows("TT605", "a placed model cannot be pickled")
def _pickle(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("layers",)) as found:
        pickle.dumps(found.model if wrong else found.model.config)


@shows(
    "TT606",
    "64 tokens of prompt and 1 of answer are 1 more than the planned context of 64",
)
def _context(at: Path, wrong: bool) -> None:
    with placed(llama()) as found:
        found.check_length(torch.ones(1, 64 if wrong else 63), 1)


@shows("TT607", "a LlamaForCausalLM does not take the modality 'audio'")
def _modality(at: Path, wrong: bool) -> list[Finding]:
    asked = ("text", "audio") if wrong else ("text",)
    return check(llama(), modalities=asked, hardware=CARD)


# -------------------------------------------------------------- faults of others that nobody tells

Silent = Callable[[Path, bool], bool]

SILENT: dict[str, Silent] = {}
"""Whether the stock stack, run in a folder of its own, does something else than it was asked."""


def silent(code: str) -> Callable[[Silent], Silent]:
    def keep(run: Silent) -> Silent:
        SILENT[code] = run
        return run

    return keep


def differs(model: Any, wanted: Any) -> bool:
    given = tiny.inputs(llama())
    return not torch.equal(tiny.logits(model, given), tiny.logits(wanted, given))


def with_a_layer_on_disk(model: Any, folder: Path) -> Any:
    from accelerate import dispatch_model

    prefix = "base_model.model." if hasattr(model, "peft_config") else ""
    places = {prefix + name: one for name, one in failing.split("llama", "model.layers.2").items()}
    how = {"main_device": "cpu", "offload_dir": str(folder), "force_hooks": True}
    return dispatch_model(model, places, **how)


@silent("TT221")
def _planned_again(at: Path, wrong: bool) -> bool:
    """PEFT's own plan, made for a card that is told of and not there; it is not carried out."""
    import accelerate.utils.modeling
    import peft

    model = failing.base("llama")
    if wrong:
        model.hf_device_map = failing.split("llama", "model.layers.2")
    carried_out: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate.utils.modeling, "is_mps_available", lambda: True)
        patch.setattr(
            "peft.peft_model.dispatch_model",
            lambda model, device_map, **how: carried_out.append(device_map),
        )
        room = {"mps": 10**9, "cpu": 10**9}
        peft.PeftModel.from_pretrained(
            model, failing.lora("llama"), device_map="sequential", max_memory=room
        )
    return any("mps" in one.values() for one in carried_out)


@silent("TT222")
def _folder_twice(at: Path, wrong: bool) -> bool:
    one, other = llama(), tiny.checkpoint("llama", seed=1)
    with_a_layer_on_disk(tiny.reference(one), at / "one")
    model = with_a_layer_on_disk(tiny.reference(other), at / ("one" if wrong else "other"))
    return differs(model, tiny.reference(other))


@silent("TT319")
def _swapped(at: Path, wrong: bool) -> bool:
    from peft.utils.hotswap import hotswap_adapter

    one, other = tiny.adapter(llama()), tiny.adapter(llama(), seed=2)
    model = tiny.reference(llama(), adapters=one)
    if wrong:
        with_a_layer_on_disk(model, at / "offload")
    hotswap_adapter(model, str(other), adapter_name="default", torch_device="cpu")
    try:
        return differs(model, tiny.reference(llama(), adapters=other))
    except TypeError:  # not silent, before PEFT 0.21
        return True


@silent("TT515")
def _quantizes_nothing(at: Path, wrong: bool) -> bool:
    config = tiny.quantization_config("nf4")
    config.llm_int8_enable_fp32_cpu_offload = wrong
    model = transformers.LlamaForCausalLM.from_pretrained(
        llama(), quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    kinds = {type(one).__name__ for one in model.modules()}
    return "Linear4bit" not in kinds
