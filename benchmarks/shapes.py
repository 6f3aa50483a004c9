"""Random checkpoints in the shapes of real models, written shard by shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4_E4B: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
    "num_kv_shared_layers": 18, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256, "sliding_window": 512,
}  # fmt: skip


def llama_config(**shape: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(max_position_embeddings=8192, pad_token_id=0, **shape)


def gemma4_config(**shape: Any) -> Any:
    from transformers import Gemma4Config, Gemma4TextConfig

    return Gemma4Config(text_config=Gemma4TextConfig(pad_token_id=0, **shape).to_dict())


def write_checkpoint(config: Any, folder: Path, *, device: str = "cpu") -> Path:
    """A folder with random bf16 weights of unit gain, one shard a gigabyte.

    `device` is where the random numbers are drawn.
    """
    import transformers

    kind = {"llama": "LlamaForCausalLM", "gemma4": "Gemma4ForConditionalGeneration"}
    architecture = kind[config.model_type]
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    tied = set(model.all_tied_weights_keys)
    for name, weight in model.state_dict().items():
        if name in tied:
            continue
        if weight.ndim > 1:
            made = torch.randn(weight.shape, generator=generator, device=device)
            made = made * weight.shape[-1] ** -0.5
        else:
            made = torch.ones(weight.shape, device=device)
        shard[name] = made.to(torch.bfloat16).cpu()
        if sum(one.nbytes for one in shard.values()) > 2**30:
            _write(folder, shard, index)
    _write(folder, shard, index)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def _write(folder: Path, shard: dict[str, torch.Tensor], index: dict[str, str]) -> None:
    if shard:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()


def write_adapter(config: Any, folder: Path, *, rank: int = 16) -> Path:
    """A LoRA on all linears of the language model's layers, B not zero."""
    import transformers
    from peft import LoraConfig

    kind = {"llama": "LlamaForCausalLM", "gemma4": "Gemma4ForConditionalGeneration"}
    with torch.device("meta"):
        model = getattr(transformers, kind[config.model_type])(config)
    layers = "language_model.layers." if config.model_type == "gemma4" else "model.layers."
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and layers in name
    }
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, module in targets.items():
        for part, shape in (
            ("lora_A", (rank, module.in_features)),
            ("lora_B", (module.out_features, rank)),
        ):
            made = torch.randn(shape, generator=generator) * 0.02
            state[f"base_model.model.{name}.{part}.weight"] = made
    folder.mkdir(parents=True, exist_ok=True)
    LoraConfig(
        r=rank, lora_alpha=rank, target_modules=sorted(targets), task_type="CAUSAL_LM"
    ).save_pretrained(folder)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
