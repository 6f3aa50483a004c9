"""Tiny random-weight checkpoints, adapters and all-resident references. `from tiny import ...`.

`checkpoint("llama")` -> folder, made once a session; names: `MODELS` (`llama`, `llama-tied`,
`llama-biased`, `qwen3`, `gemma3`, `gemma3-vlm`, `gemma4`, `qwen3-moe`, `gpt2`).
`adapter(folder, "dora")` -> its.
`reference(folder, quant, adapters)` -> the stock stack's model, all on one device of `DEVICES`.
`inputs(folder, modalities=("text", "image"))` -> what the model is called with; `logits`, `tokens`.
Everything is a function of its arguments: two calls with equal arguments give equal bytes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from architectures import (
    AUDIO,
    BEGIN_AUDIO,
    BEGIN_IMAGE,
    BOS,
    END_AUDIO,
    END_IMAGE,
    EOS,
    FIRST_WORD,
    HIDDEN,
    IMAGE,
    MODELS,
    PAD,
    VOCABULARY,
)

DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""For `pytest.mark.parametrize("device", DEVICES)`."""

HAS_GEMMA4 = hasattr(transformers, "Gemma4Config")
QUANTS = ("none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
"""Names that `reference` takes; `none` is 16 bits."""

# ---------------------------------------------------------------------------------- checkpoints


def checkpoint(
    name: str, *, dtype: torch.dtype = torch.bfloat16, shards: int = 1, seed: int = 0
) -> Path:
    """The folder of a tiny checkpoint of that name (see `MODELS`), with a tokenizer.

    Tests must not change it: take `writable(checkpoint(...), tmp_path)` for that. `gemma4` skips
    the test where transformers has no Gemma 4: its absence is a fact of the stack under test.
    """
    if name == "gemma4" and not HAS_GEMMA4:
        pytest.skip("this transformers has no Gemma 4")
    return _checkpoint(name, dtype, shards, seed)


@functools.cache
def _checkpoint(name: str, dtype: torch.dtype, shards: int, seed: int) -> Path:
    folder = _root() / f"{name}-{str(dtype).removeprefix('torch.')}-{shards}-{seed}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
    randomize(model, seed)
    model = model.to(dtype).eval()
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, do_sample=False
    )
    nbytes = sum(one.numel() * one.element_size() for one in model.parameters())
    limit = {} if shards == 1 else {"max_shard_size": nbytes // shards + 1}
    model.save_pretrained(folder, **limit)
    tokenizer().save_pretrained(folder)
    return folder


def writable(folder: Path, parent: Path) -> Path:
    """A copy of a checkpoint or adapter folder, below `parent`."""
    return Path(shutil.copytree(folder, parent / folder.name))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Changes the tensors of a folder's file, of a checkpoint or an adapter, in place."""
    (file,) = folder.glob("*model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file({key: one.clone() for key, one in tensors.items()}, file, {"format": "pt"})
    return folder


@functools.cache
def _root() -> Path:
    root = tempfile.TemporaryDirectory(prefix="trimtab-tests-")
    atexit.register(root.cleanup)
    return Path(root.name).resolve()


def randomize(model: nn.Module, seed: int) -> None:
    """Weights as if trained: each linear keeps the scale, norms and biases differ from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    # A table that is also the head must be small, or each token predicts itself; the last norm
    # makes up for it.
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    tables = {id(one.weight): 0.3 for one in model.modules() if isinstance(one, nn.Embedding)}
    if tied:
        tables[id(model.get_input_embeddings().weight)] = 0.3 * HIDDEN**-0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim <= 1:
                weight.add_(noise(weight) * 0.1)
                if tied and name.endswith(("model.norm.weight", "ln_f.weight")):
                    weight.add_(6)
            elif id(weight) in tables:
                weight.copy_(noise(weight) * tables[id(weight)])
            else:
                gain = 3.0 if name.endswith("lm_head.weight") else 1.2
                weight.copy_(noise(weight) * gain * _fan_in(model, name, weight) ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * noise(buffer))


def _fan_in(model: nn.Module, name: str, weight: torch.Tensor) -> int:
    owner = model.get_submodule(name.rpartition(".")[0])
    if type(owner).__name__ == "Conv1D":
        return weight.shape[0]
    return weight[0].numel() if isinstance(owner, nn.Conv2d | nn.Conv1d) else weight.shape[-1]


@functools.cache
def tokenizer() -> Any:
    """One token a character (ids from `FIRST_WORD`), with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<image>", "<boi>", "<eoi>", "<audio>", "<boa>", "<eoa>"]
    special += ["<video>"]
    vocabulary = {word: number for number, word in enumerate(special)}
    for number in range(FIRST_WORD, VOCABULARY):
        vocabulary[chr(32 + number - FIRST_WORD)] = number
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        padding_side="left",
    )
    made.chat_template = (
        "<bos>{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return made


# ------------------------------------------------------------------------------------- adapters

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_ALL = "|".join(_ATTENTION + _MLP)
TARGETS: Mapping[str, str | list[str]] = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "qwen3_moe": _ATTENTION,
    "gemma3": rf".*language_model.*\.({_ALL})",
    "gemma4": rf".*language_model.*\.({_ALL}|per_layer_input_gate|per_layer_projection)",
}
"""By model type: the language model's linears, without towers and experts."""


def targets_of(folder: Path) -> str | list[str]:
    """The linears of the language model, as PEFT's `target_modules`."""
    return TARGETS.get(_model_type(folder), _ATTENTION + _MLP)


def adapter(
    folder: Path,
    kind: str = "lora",
    *,
    targets: str | list[str] | None = None,
    seed: int = 1,
    **options: Any,
) -> Path:
    """The folder of an adapter whose weights are random and never zero.

    `kind` is `lora`, `dora`, or the name of any of PEFT's config classes without `Config`
    (`"LoHa"`, `"IA3"`); `options` go to that class. Default targets: `targets_of(folder)`.
    """
    return _adapter(folder, kind, json.dumps([targets, seed, options], sort_keys=True))


@functools.cache
def _adapter(folder: Path, kind: str, asked: str) -> Path:
    import peft

    targets, seed, options = json.loads(asked)
    made = _root() / f"{kind}-{hashlib.sha256(f'{folder}{asked}'.encode()).hexdigest()[:12]}"
    name = {"lora": "Lora", "dora": "Lora"}.get(kind, kind)
    fields: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if name == "Lora":
        fields |= {"r": 8, "lora_alpha": 16, "use_dora": kind == "dora"}
        fields["fan_in_fan_out"] = _model_type(folder) == "gpt2"
    config_class = getattr(peft, f"{name}Config")
    if "target_modules" in inspect.signature(config_class).parameters:
        fields["target_modules"] = targets or targets_of(folder)
    config = config_class(**{**fields, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In 32 bits, as adapters are trained and saved.
        model = peft.get_peft_model(_load(folder, dtype=torch.float32), config)
    fill_adapter(model, seed)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(made, save_embedding_layers=False)
    return made


def fill_adapter(model: nn.Module, seed: int) -> None:
    """Random values for everything that would be trained: enough to move the logits clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.requires_grad:
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(noise * 0.1)


# ----------------------------------------------------------------------------------- references


def reference(
    folder: Path,
    quant: str = "none",
    adapters: Path | Mapping[str, Path] | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:
    """The stock model, everything on `device`, in the format `quant` (one of `QUANTS`).

    `adapters` is one folder (named `default`) or folders by name, loaded in that order; the first
    one is active. Without adapters a plain transformers model, else a `PeftModel`. `options` go to
    `from_pretrained`.
    """
    from peft import PeftModel

    if config := quantization_config(quant, dtype):
        options["quantization_config"] = config
    model = _load(folder, dtype=dtype, device_map={"": device}, **options)
    plain_kernels(model)
    named = {"default": adapters} if isinstance(adapters, Path) else dict(adapters or {})
    for name, path in named.items():
        # `low_cpu_mem_usage=True` rounds the adapter through the base's 16 bits.
        how: dict[str, Any] = {"torch_device": device, "low_cpu_mem_usage": False}
        if isinstance(model, PeftModel):
            model.load_adapter(path, name, **how)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=name, **how)
    return model.eval()


def quantization_config(quant: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The `BitsAndBytesConfig` of a format; None for `none`."""
    from transformers import BitsAndBytesConfig

    if quant == "none":
        return None
    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant[:3],
        bnb_4bit_use_double_quant=quant.endswith("-dq"),
        bnb_4bit_compute_dtype=dtype,
    )


def plain_kernels(model: nn.Module) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights in place on a CPU with AVX512-BF16."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def _load(folder: Path, **options: Any) -> Any:
    """The class that the config names, since an auto class may load the bare language model."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, **options)


# --------------------------------------------------------------------------------------- inputs


def inputs(
    folder: Path,
    *,
    batch: int = 2,
    length: int = 12,
    seed: int = 0,
    modalities: tuple[str, ...] = ("text",),
    padded: bool = False,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Random arguments of `forward` and `generate`.

    `input_ids` and `attention_mask` are (batch, length), longer by the soft tokens of each further
    modality (`image`, `audio`); with `padded`, row i starts with i tokens of padding.
    """
    kind = _model_type(folder)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (batch, length), generator=generator)
    extra: dict[str, torch.Tensor] = {}
    if "image" in modalities:
        extra |= _gemma3_image(batch, generator) if kind == "gemma3" else _image(batch, generator)
        ids = torch.cat([_soft(batch, BEGIN_IMAGE, IMAGE, END_IMAGE), ids], dim=1)
    if "audio" in modalities:
        extra["input_features"] = torch.randn(batch, 16, 32, generator=generator)
        extra["input_features_mask"] = torch.ones(batch, 16, dtype=torch.bool)
        ids = torch.cat([_soft(batch, BEGIN_AUDIO, AUDIO, END_AUDIO), ids], dim=1)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch):
            ids[row] = torch.cat([torch.full((row,), PAD), ids[row, : ids.shape[1] - row]])
            mask[row, :row] = 0
    if kind == "gemma3":
        extra["token_type_ids"] = (ids == IMAGE).long()
    if kind == "gemma4":
        extra["mm_token_type_ids"] = (ids == IMAGE).long() + 3 * (ids == AUDIO).long()
    made = {"input_ids": ids, "attention_mask": mask, **extra}
    return {name: tensor.to(device) for name, tensor in made.items()}


def _soft(batch: int, begin: int, soft: int, end: int) -> torch.Tensor:
    return torch.tensor([[begin, *[soft] * 4, end]]).repeat(batch, 1)


def _gemma3_image(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}


def _image(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """6 x 6 patches of 8 x 8 pixels, pooled 3 x 3: four soft tokens."""
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    grid = torch.stack([columns.flatten(), rows.flatten()], dim=-1)
    return {
        "pixel_values": torch.rand(batch, 36, 3 * 8 * 8, generator=generator),
        "image_position_ids": grid.expand(batch, -1, -1).clone(),
    }


# ---------------------------------------------------------------------------------- comparisons


def logits(model: Any, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits of one forward, on the CPU: (batch, length, vocabulary)."""
    with torch.inference_mode():
        return model(**given).logits.cpu()


def tokens(model: Any, given: Mapping[str, torch.Tensor], count: int = 8) -> torch.Tensor:
    """Greedy continuation, exactly `count` tokens a row, on the CPU: (batch, count).

    With a dynamic cache: a static one, which a placement on a GPU takes, rounds differently.
    """
    length = given["input_ids"].shape[1]
    fixed = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
    fixed["cache_implementation"] = "dynamic"
    return model.generate(**given, **fixed)[:, length:].cpu()
