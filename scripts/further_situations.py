"""More situations in which the stock stack fails: other models, other routes, damaged files.

Like those of `failing_situations`, each runs in a fresh folder of its own, in a process of its own.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from accelerate import dispatch_model, load_checkpoint_and_dispatch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn

import tiny  # of tests/
from architectures import VOCABULARY
from failing_situations import base, edit_config, lora, offloaded, run, split


def answer(model: Any, name: str) -> None:
    with torch.no_grad():
        model(
            **tiny.inputs(tiny.checkpoint(name)),
            labels=tiny.inputs(tiny.checkpoint(name))["input_ids"],
        )


# -------------------------------------------------------------------------------- placed once more


def second(name: str, layer: str, kind: str = "lora", **how: Any) -> None:
    model = offloaded(name, layer)
    adapted = PeftModel.from_pretrained(model, lora(name, kind), **{"offload_folder": "x", **how})
    answer(adapted, name)


def moved(name: str, layer: str) -> None:
    offloaded(name, layer).to("cpu")


def by_transformers(name: str, layer: str, kind: str = "lora") -> None:
    model = offloaded(name, layer)
    model.load_adapter(lora(name, kind))
    answer(model, name)


def unloaded_again(name: str, layer: str) -> None:
    """The last adapter is deleted, and another one loaded: PEFT dispatches a third time."""
    model = PeftModel.from_pretrained(offloaded(name, layer), lora(name), offload_folder="x")
    model.delete_adapter("default")
    model.load_adapter("./lora", "again", offload_folder="y")
    answer(model, name)


def hotswapped(name: str, layer: str) -> None:
    from peft.utils.hotswap import hotswap_adapter

    model = PeftModel.from_pretrained(base(name), lora(name))
    places = {f"base_model.model.{key}": one for key, one in split(name, layer).items()}
    dispatch_model(model, places, main_device="cpu", offload_dir="x", force_hooks=True)
    hotswap_adapter(model, "./lora", adapter_name="default", torch_device="cpu")
    run(model, name)


# -------------------------------------------------------------------------------------- maps, loads


def map_without(name: str, part: str, *disk: str) -> None:
    places = {key: one for key, one in split(name, *disk).items() if not key.startswith(part)}
    base(name, device_map=places, offload_folder="offload")


def dispatched_without(name: str, part: str, *disk: str) -> None:
    places = {key: one for key, one in split(name, *disk).items() if not key.startswith(part)}
    dispatch_model(base(name), places, main_device="cpu", offload_dir="x", force_hooks=True)


def loaded_and_dispatched(name: str, layer: str) -> None:
    base(name)
    with torch.device("meta"):
        model = tiny.MODELS[name]()
    load_checkpoint_and_dispatch(model, "base/model.safetensors", split(name, layer))


def catch_all_linear(name: str, part: str) -> None:
    base(name, device_map={"": "cpu", part: "disk"}, offload_folder="offload")


def quantized_map(name: str, quant: str, *disk: str, **options: Any) -> None:
    base(name, quant, device_map=split(name, *disk), offload_folder="offload", **options)


def wrong_file(what: str, name: str = "llama") -> None:
    base(name)
    change = {
        "config is no JSON": lambda: Path("base/config.json").write_text("{'a': 1}"),
        "no config": lambda: Path("base/config.json").unlink(),
        "config of nothing": lambda: Path("base/config.json").write_text("{}"),
        "no shard": _shards,
        "pickle": _pickle,
        "empty": lambda: Path("base/model.safetensors").write_bytes(b""),
        "grown": _grow,
    }[what]
    change()
    if what == "no config":
        transformers.AutoModelForCausalLM.from_pretrained("./base")
    transformers.AutoModelForCausalLM.from_pretrained("./base", device_map={"": "cpu"})


def _shards() -> None:
    model = base("llama")
    shutil.rmtree("base")
    model.save_pretrained("base", max_shard_size="500KB")
    sorted(Path("base").glob("model-0*.safetensors"))[1].unlink()


def _grow() -> None:
    weights = Path("base/model.safetensors")
    weights.write_bytes(weights.read_bytes() + b"more")


def _pickle() -> None:
    Path("base/model.safetensors").unlink()
    Path("base/pytorch_model.bin").write_bytes(b"\x80\x02no pickle")


def nowhere(call: str) -> None:
    if call == "config":
        transformers.AutoConfig.from_pretrained("acme/no-such-model")
    elif call == "model":
        transformers.AutoModelForCausalLM.from_pretrained("acme/no-such-model")
    elif call == "folder":
        transformers.AutoModelForCausalLM.from_pretrained("./no-such-folder")
    else:
        PeftModel.from_pretrained(base("llama"), "acme/no-such-adapter")


def own_config() -> None:
    base("llama")
    edit_config("base", model_type="acme", auto_map={"AutoConfig": "c.C"})
    Path("base/c.py").write_text("")
    transformers.AutoConfig.from_pretrained("./base", trust_remote_code=False)


def own_code() -> None:
    base("llama")
    edit_config(
        "base", model_type="acme", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
    )
    Path("base/c.py").write_text("")
    transformers.AutoModelForCausalLM.from_pretrained("./base", trust_remote_code=False)


def without_package(package: str, **options: Any) -> None:
    """As where a package is not installed: what transformers asks says no."""
    base("llama")
    for module in [one for name, one in sys.modules.items() if name.startswith("transformers")]:
        if f"is_{package}_available" in vars(module):
            setattr(module, f"is_{package}_available", lambda *given: False)
    base("llama", **options)


def cut_pickle(of_adapter: bool = False) -> None:
    model, folder = base("mistral"), lora("mistral")
    weights = Path(folder if of_adapter else "base") / f"{'adapter_' * of_adapter}model.safetensors"
    pickled = weights.with_name("adapter_model.bin" if of_adapter else "pytorch_model.bin")
    torch.save(safetensors.torch.load_file(weights), pickled)
    pickled.write_bytes(pickled.read_bytes()[:-5000])
    weights.unlink()
    PeftModel.from_pretrained(model if of_adapter else base("mistral"), folder)


def gone_base() -> None:
    folder = lora("mistral")
    edit_config(folder, base_model_name_or_path="./gone")
    AutoPeftModelForCausalLM.from_pretrained(folder)


def adapter_as_base() -> None:
    folder = lora("mistral")
    edit_config(folder, base_model_name_or_path=None)
    transformers.AutoConfig.from_pretrained(folder)


def bad_index() -> None:
    model = base("llama")
    shutil.rmtree("base")
    model.save_pretrained("base", max_shard_size="500KB")
    index = Path("base/model.safetensors.index.json")
    index.write_text(index.read_text()[:-40])
    base("llama")


def bad_header(of_adapter: bool = False) -> None:
    model, folder = base("mistral"), lora("mistral")
    name = f"{folder}/adapter_model.safetensors" if of_adapter else "base/model.safetensors"
    weights = Path(name)
    weights.write_bytes(weights.read_bytes()[:8] + b"{" * 64 + weights.read_bytes()[72:])
    PeftModel.from_pretrained(model if of_adapter else base("mistral"), folder)


def too_old() -> None:
    from transformers.utils.versions import require_version

    require_version("peft>=99.0", "pip install -U peft")


def to_the_gpu(how: str) -> None:
    if how == "map":
        base("mistral", device_map="cuda")
    if how == "call":
        base("mistral").cuda()
    model = base("mistral")
    transformers.pipeline("text-generation", model=model, tokenizer=tiny.tokenizer(), device=0)


def no_library() -> None:
    """bitsandbytes, whose compiled library is not there."""
    import bitsandbytes.functional
    from bitsandbytes import cextension

    cextension.PACKAGE_DIR = Path("nowhere")
    try:
        library = cextension.get_native_library()
    except Exception as error:
        library = cextension.ErrorHandlerMockBNBNativeLibrary(str(error))
    bitsandbytes.functional.lib = library
    bitsandbytes.functional.get_paged(64, 64)


def rank_pattern(name: str) -> None:
    folder = lora(name)
    edit_config(folder, rank_pattern={"q_proj": 2})
    PeftModel.from_pretrained(base(name), folder)


# ---------------------------------------------------------------------------------------- adapters


def adapted(name: str, targets: Any, **fields: Any) -> None:
    get_peft_model(base(name), LoraConfig(target_modules=targets, **fields))


def of_another(name: str, other: str) -> None:
    folder = lora(other)
    PeftModel.from_pretrained(base(name), folder)


def resized(name: str, **options: Any) -> None:
    folder = lora(name, **options)
    model = base(name)
    model.resize_token_embeddings(VOCABULARY + 8)
    PeftModel.from_pretrained(model, folder)


def wrong_adapter(what: str, name: str = "mistral") -> None:
    folder = Path(lora(name))
    change = {
        "config is no JSON": lambda: (folder / "adapter_config.json").write_text("{'r': 1}"),
        "pickle": lambda: _adapter_pickle(folder),
        "empty": lambda: (folder / "adapter_model.safetensors").write_bytes(b""),
        "no kind": lambda: edit_config("lora", peft_type=None),
        "newer": lambda: edit_config("lora", peft_type="ULTRALORA", peft_version="9.0"),
    }[what]
    change()
    if what == "newer":
        AutoPeftModel.from_pretrained("./lora")
    PeftModel.from_pretrained(base(name), "./lora")


def _adapter_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02no pickle")


def missing_name(call: str, name: str = "qwen2") -> None:
    model = PeftModel.from_pretrained(base(name), lora(name))
    if call == "generate":
        model.generate(
            **tiny.inputs(tiny.checkpoint(name)), adapter_names=["a", "b"], max_new_tokens=1
        )
    elif call == "weighted":
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both")
    else:
        plain = base(name)
        plain.load_adapter("./lora", adapter_name="one")
        plain.set_adapter("other")


def taken_name(name: str = "phi3") -> None:
    model = base(name)
    model.load_adapter(lora(name), adapter_name="one")
    model.load_adapter("./lora", adapter_name="one")


def merged_quantized(kind: str, quant: str, name: str = "mistral") -> None:
    folder = lora(name, kind)
    model = PeftModel.from_pretrained(base(name, quant, device_map={"": "cpu"}), folder)
    model.merge_and_unload()


def kind_on_quantized(kind: str, quant: str, name: str = "mistral", **options: Any) -> None:
    folder = lora(name, kind, **options)
    model = PeftModel.from_pretrained(base(name, quant, device_map={"": "cpu"}), folder)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    run(model, name)


def replaced_weight(name: str, quant: str) -> None:
    model = base(name, quant, device_map={"": "cpu"})
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    linear.weight = nn.Parameter(linear.weight.data, requires_grad=False)
    run(model, name)


def shared_states(layer: str, call: str) -> None:
    """Gemma 4, adapted and placed by its modules' new names."""
    model = get_peft_model(
        base("gemma4"), LoraConfig(target_modules=tiny.targets_of(tiny.checkpoint("gemma4")))
    )
    places = {f"base_model.model.{key}": one for key, one in split("gemma4", layer).items()}
    dispatch_model(model, places, main_device="cpu", offload_dir="again", force_hooks=True)
    given = tiny.inputs(tiny.checkpoint("gemma4"))
    if call == "generate":
        model.generate(**given, max_new_tokens=2)
    else:
        model.get_base_model()(**given, output_hidden_states=True)
