"""What an adapter's file and config say, computed without PEFT: dense weights in float32.

`apply(model, tensors, config)` adds to a plain float32 Llama what each tensor of the file is
worth, by its name. It knows what `test_corruption` makes: LoRA with patterns, rows and whole
modules, DoRA, IA3, LoHa, VeRA.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from typing import Any

import torch
import transformers
from torch import nn

Tensors = dict[str, torch.Tensor]

_ENDS = r"(lora_|ia3_|hada_|vera_|token_adapter|trainable_tokens|weight$|base_layer)"


def dense(quantized: nn.Module) -> nn.Module:
    """A plain float32 model with the weights that a model in any format has."""
    config = copy.deepcopy(quantized.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    made = transformers.LlamaForCausalLM(config).float().eval()
    state = {name: _true(one) for name, one in quantized.named_parameters()}
    made.load_state_dict(state)
    return made


def _true(weight: nn.Parameter) -> torch.Tensor:
    if hasattr(weight, "quant_state") and weight.quant_state is not None:
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.detach().float()


def apply(model: nn.Module, tensors: Tensors, config: dict[str, Any]) -> nn.Module:
    """A copy of the model with the adapter in it."""
    made = copy.deepcopy(model)
    sites: dict[str, Tensors] = defaultdict(dict)
    for key, one in tensors.items():
        path, _, rest = _split(key)
        sites[path][rest] = one.float()
    modules = dict(made.named_modules())
    with torch.no_grad():
        for path, own in sites.items():
            if path:
                name = next(one for one in modules if one == path or one.endswith(f".{path}"))
                _change(modules[name], name, own, {**sites.get("", {})}, config)
    return made


def _split(key: str) -> tuple[str, str, str]:
    """The module, by the end of its name, and what follows; shared tensors have no module."""
    if key.startswith("base_model.vera_"):
        return "", "", key.removeprefix("base_model.")
    found = re.match(rf"(.*?)\.({_ENDS}.*)$", key)
    assert found, key
    path = re.sub(r"^.*?\.?(\d+\.|embed_tokens|lm_head|norm$)", r"\1", found[1])
    return path, "", found[2]


def _change(module: Any, name: str, own: Tensors, shared: Tensors, config: dict[str, Any]) -> None:
    if "weight" in own:  # trained whole
        module.weight.copy_(own["weight"])
    rows = own.get("token_adapter.trainable_tokens_delta")
    if rows is not None:
        indices = config["trainable_token_indices"]
        module.weight[indices if isinstance(indices, list) else indices["embed_tokens"]] = rows
    if "ia3_l" in own:
        scale = own["ia3_l"].flatten()
        if name.endswith("down_proj"):
            module.weight.mul_(scale[None, :])
        else:
            module.weight.mul_(scale[:, None])
            module.bias.mul_(scale)
    if "hada_w1_a" in own:
        scale = _value(config, "alpha", name) / _value(config, "rank", name)
        first, second = own["hada_w1_a"] @ own["hada_w1_b"], own["hada_w2_a"] @ own["hada_w2_b"]
        module.weight.add_(scale * first * second)
    if "vera_lambda_b" in own:
        outputs, inputs = module.weight.shape
        down = shared["vera_A"][: config["r"], :inputs] * own["vera_lambda_d"][:, None]
        module.weight.add_((shared["vera_B"][:outputs] * own["vera_lambda_b"][:, None]) @ down)
    if "lora_embedding_A" in own:
        module.weight.add_(
            _scale(config, name) * (own["lora_embedding_B"] @ own["lora_embedding_A"]).T
        )
    if "lora_A.weight" in own:
        delta = _scale(config, name) * (own["lora_B.weight"] @ own["lora_A.weight"])
        size = own.get("lora_magnitude_vector", own.get("lora_magnitude_vector.weight"))
        if size is not None and config.get("use_dora"):
            whole = module.weight + delta
            module.weight.copy_(size[:, None] * whole / whole.norm(dim=1, keepdim=True))
        else:
            module.weight.add_(delta)


def _scale(config: dict[str, Any], name: str) -> float:
    rank = _value(config, "rank", name)
    return _value(config, "alpha", name) / (rank**0.5 if config.get("use_rslora") else rank)


def _value(config: dict[str, Any], what: str, name: str) -> float:
    plain = {"rank": "r", "alpha": "lora_alpha" if config["peft_type"] == "LORA" else "alpha"}[what]
    for pattern, value in (config.get(f"{what}_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(value)
    return float(config[plain])
