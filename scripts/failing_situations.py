"""Situations in which the stock stack fails, without a GPU: `cpu` runs, `disk` holds.

Each function runs in a fresh folder of its own, which is also the current one, since an offloaded
`PeftModel.from_pretrained` writes to the base that it is given.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import accelerate.utils.modeling
import peft
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn

import tiny  # of tests/


def base(name: str, quant: str = "none", **options: Any) -> Any:
    """The model from a copy of its checkpoint, under the relative path `base`."""
    if not Path("base").exists():
        shutil.copytree(tiny.checkpoint(name), "base")
    if config := tiny.quantization_config(quant):
        options.setdefault("quantization_config", config)
    options.setdefault("dtype", torch.bfloat16)
    (kind,) = json.loads(Path("base/config.json").read_text())["architectures"]
    return getattr(transformers, kind).from_pretrained("./base", **options)


def lora(name: str, kind: str = "lora", **options: Any) -> str:
    """A copy of an adapter for the model, under the relative path `lora`."""
    shutil.copytree(tiny.adapter(tiny.checkpoint(name), kind, **options), "lora")
    return "./lora"


def edit_config(folder: str, **fields: Any) -> None:
    names = ("adapter_config.json", "config.json")
    file = next(file for name in names if (file := Path(folder) / name).exists())
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def split(name: str, *disk: str) -> dict[str, str]:
    """A map with these modules on the disk and every other one on the CPU."""
    model = tiny.MODELS[name]()
    places: dict[str, str] = {}

    def put(prefix: str, module: nn.Module) -> None:
        inside = [one for one in disk if one.startswith(f"{prefix}." if prefix else "")]
        if prefix in disk or not inside:
            places[prefix] = "disk" if prefix in disk else "cpu"
            return
        for child, one in module.named_children():
            put(f"{prefix}.{child}" if prefix else child, one)
        for own, _ in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            places[f"{prefix}.{own}"] = "cpu"

    put("", model)
    return places


def offloaded(name: str, *disk: str, **options: Any) -> Any:
    return base(name, device_map=split(name, *disk), offload_folder="offload", **options)


def run(model: Any, name: str) -> None:
    """One forward; a situation that the stack computes without an error is not one that fails."""
    with torch.no_grad():
        model(**tiny.inputs(tiny.checkpoint(name)))


# ------------------------------------------------------------------------------- second placement


def second_without_folder(name: str, layer: str) -> None:
    model = offloaded(name, layer)
    PeftModel.from_pretrained(model, lora(name), max_memory={"cpu": 400_000})


def second_plan_is_smaller(name: str, layer: str) -> None:
    model = offloaded(name, layer)
    adapted = PeftModel.from_pretrained(
        model, lora(name), max_memory={"cpu": 400_000}, offload_folder="again"
    )
    run(adapted, name)


def second_with_same_map(name: str, layer: str) -> None:
    model = offloaded(name, layer)
    adapted = PeftModel.from_pretrained(
        model, lora(name), device_map=split(name, layer), offload_folder="again"
    )
    run(adapted, name)


def second_with_prefixed_map(name: str, layer: str) -> None:
    model = offloaded(name, layer)
    places = {f"base_model.model.{key}": one for key, one in split(name, layer).items()}
    adapted = PeftModel.from_pretrained(
        model, lora(name), device_map=places, offload_folder="again"
    )
    run(adapted, name)


def second_by_default(name: str, layer: str, kind: str = "lora") -> None:
    model = offloaded(name, layer)
    run(PeftModel.from_pretrained(model, lora(name, kind), offload_folder="again"), name)


def second_dispatch(quant: str) -> None:
    """What an offloaded quantized model is left with when it is placed again."""
    model = base("llama", quant, device_map={"": "cpu"})
    cpu_offload(model, execution_device="cpu", offload_buffers=True)
    dispatch_model(
        model,
        split("llama", "model.layers.2"),
        main_device="cpu",
        offload_dir="again",
        force_hooks=True,
    )
    run(model, "llama")


def state_of_offloaded(quant: str) -> None:
    model = base("llama", quant, device_map={"": "cpu"})
    cpu_offload(model, execution_device="cpu")
    PeftModel.from_pretrained(model, lora("llama"))
    model.save_pretrained("saved")


def added_to_offloaded(name: str, layer: str, kind: str = "lora") -> None:
    model = offloaded(name, layer)
    run(
        get_peft_model(
            model,
            LoraConfig(
                target_modules=tiny.targets_of(tiny.checkpoint(name)), use_dora=kind == "dora"
            ),
        ),
        name,
    )


def merged_offloaded(name: str, layer: str, kind: str = "lora") -> None:
    model = offloaded(name, layer)
    PeftModel.from_pretrained(model, lora(name, kind), offload_folder="again").merge_and_unload()


def load_again(name: str, layer: str) -> None:
    """The base of an offloaded adapter, loaded once more."""
    PeftModel.from_pretrained(offloaded(name, layer), lora(name), offload_folder="again")
    run(offloaded(name, layer), name)


# ------------------------------------------------------------------------------------- base alone


def split_base(name: str, layer: str, quant: str = "none", **inputs: Any) -> None:
    model = offloaded(name, layer, **({"quant": quant} if quant != "none" else {}))
    with torch.no_grad():
        model(**tiny.inputs(tiny.checkpoint(name), **inputs))


def without_folder(name: str, layer: str) -> None:
    base(name, device_map=split(name, layer))


def catch_all(name: str, layer: str) -> None:
    run(base(name, device_map={"": "cpu", layer: "disk"}, offload_folder="offload"), name)


def map_lacks(name: str, key: str) -> None:
    places = split(name, "lm_head" if name != "gpt2" else "transformer.h.1")
    places = {one: where for one, where in places.items() if not one.startswith(key)}
    run(base(name, device_map=places, offload_folder="offload"), name)


def gpu_that_is_not_here(name: str) -> None:
    run(base(name, device_map={"": 0}), name)


def attention(name: str, kind: str) -> None:
    base(name, attn_implementation=kind)


def packed(rows: int, quant: str) -> None:
    sizes = {**base("llama").config.to_dict(), "intermediate_size": rows}
    shutil.rmtree("base")
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    made.to(torch.bfloat16).save_pretrained("base")
    run(base("llama", quant, device_map={"": "cpu"}), "llama")


def offloaded_quantized(quant: str) -> None:
    model = base("llama", quant, device_map={"": "cpu"})
    cpu_offload(model, execution_device="cpu")
    run(model, "llama")


def dispatched_quantized(quant: str) -> None:
    model = base("llama", quant, device_map={"": "cpu"})
    dispatch_model(
        model,
        split("llama", "model.layers.2"),
        main_device="cpu",
        offload_dir="again",
        force_hooks=True,
    )
    run(model, "llama")


def new_architecture() -> None:
    base("llama")
    edit_config("base", model_type="gemma9", architectures=["Gemma9ForCausalLM"])
    transformers.AutoModelForCausalLM.from_pretrained("./base")


def new_architecture_config() -> None:
    base("llama")
    edit_config("base", model_type="llama_next_next")
    transformers.AutoConfig.from_pretrained("./base")


def truncated() -> None:
    base("llama")
    weights = Path("base/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9000])
    base("llama")


def pointer_file() -> None:
    base("llama")
    Path("base/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    base("llama")


def no_weights() -> None:
    base("llama")
    Path("base/model.safetensors").unlink()
    base("llama")


def wrong_shapes() -> None:
    base("llama")
    edit_config("base", intermediate_size=320)
    base("llama")


# --------------------------------------------------------------------------------------- adapters


def adapter_targets(name: str, targets: Any) -> None:
    get_peft_model(base(name), LoraConfig(target_modules=targets))


def adapter_of_another_size(name: str, route: str, **fields: Any) -> None:
    folder = lora(name, **({"targets": ["q_proj", "lm_head"]} if route == "head" else {}))
    edit_config(folder, **fields)
    model = base(name)
    if route == "head":
        model.resize_token_embeddings(tiny.VOCABULARY + 64)
    if route == "transformers":
        model.load_adapter(folder)
    else:
        PeftModel.from_pretrained(model, folder)


def saved_vocabulary(name: str) -> None:
    folder = lora(name, modules_to_save=["lm_head"])
    model = base(name)
    model.resize_token_embeddings(tiny.VOCABULARY + 64)
    PeftModel.from_pretrained(model, folder)


def adapter_config(**fields: Any) -> None:
    folder = lora("llama")
    edit_config(folder, **fields)
    PeftModel.from_pretrained(base("llama"), folder)


def adapter_missing(what: str) -> None:
    folder = lora("llama")
    (Path(folder) / what).unlink()
    PeftModel.from_pretrained(base("llama"), folder)


def adapter_truncated() -> None:
    weights = Path(lora("llama")) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-900])
    PeftModel.from_pretrained(base("llama"), "./lora")


def kind_on_quantized(kind: str, quant: str) -> None:
    folder = lora("llama", kind)
    run(PeftModel.from_pretrained(base("llama", quant, device_map={"": "cpu"}), folder), "llama")


def unknown_adapter(name: str, call: str = "set_adapter") -> None:
    getattr(PeftModel.from_pretrained(base(name), lora(name)), call)("other")


def adapter_pointer_file(by_transformers: bool = False) -> None:
    weights = Path(lora("llama")) / "adapter_model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    if by_transformers:
        base("llama").load_adapter("./lora")
    else:
        PeftModel.from_pretrained(base("llama"), "./lora")


# ------------------------------------------------------------------------------------ as on a GPU


def balanced(name: str, layer: str) -> None:
    """PEFT's plan for two devices; accelerate is told that there is a GPU, and gets no further."""
    model = base(name)
    model.hf_device_map = split(name, layer)
    accelerate.utils.modeling.is_mps_available = lambda: True
    room = {"mps": 300_000, "cpu": 10**9}
    PeftModel.from_pretrained(model, lora(name), max_memory=room, offload_folder="again")


def shared_keys_and_values(layer: str, **how: Any) -> None:
    """A PEFT model placed as PEFT places it: without the base's list of arguments to skip."""
    model = get_peft_model(
        base("gemma4"), LoraConfig(target_modules=tiny.targets_of(tiny.checkpoint("gemma4")))
    )
    places = {f"base_model.model.{key}": one for key, one in split("gemma4", layer).items()}
    dispatch_model(model, places, main_device="cpu", offload_dir="again", force_hooks=True)
    with torch.no_grad():
        model(**tiny.inputs(tiny.checkpoint("gemma4")), **how)


def nowhere_to_put(name: str, layer: str) -> None:
    dispatch_model(base(name), split(name, layer), main_device="cpu", force_hooks=True)


def auto_map_without_room(name: str, quant: str, room: int) -> None:
    base(name, quant, device_map="auto", max_memory={"cpu": room}, offload_folder="offload")


def generated(name: str, layer: str, kind: str = "lora") -> None:
    model = PeftModel.from_pretrained(offloaded(name, layer), lora(name, kind))
    model.generate(**tiny.inputs(tiny.checkpoint(name)), max_new_tokens=2)


def automatic(name: str, layer: str) -> None:
    base(name)
    folder = lora(name)
    edit_config(folder, base_model_name_or_path="./base")
    AutoPeftModelForCausalLM.from_pretrained(
        folder, device_map=split(name, layer), offload_folder="offload"
    )


def loaded_by_transformers(name: str, **fields: Any) -> None:
    folder = lora(name)
    edit_config(folder, **fields)
    base(name).load_adapter(folder)


def config_of_newer_peft(kind: str = "LoraConfig", **fields: Any) -> None:
    getattr(peft, kind)(**fields)


def without_a_gpu(how: str) -> None:
    model = base("llama")
    if how == "dispatch":
        dispatch_model(model, {"": 0})
    elif how == "adapter":
        PeftModel.from_pretrained(model, lora("llama"), torch_device="cuda")
    else:
        transformers.pipeline(
            "text-generation", model=model, tokenizer=tiny.tokenizer(), device="cuda:0"
        )
