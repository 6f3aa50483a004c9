"""Situations of TT5: formats and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from placing import placed
from situations.situation import CARD, SMALL, base, edit, llama, lora, shortened, shows, without
from tiny import rewrite
from trimtab.api import load
from trimtab.diagnosis import Finding, check
from trimtab.merge import merge
from trimtab.plan import WeightSpec
from trimtab.store import MemorySlab, SlabLayout


@shows("TT501", "DIR/base has no config.json")
def _config(at: Path, wrong: bool) -> list[Finding]:
    return check(without(base(at), "config.json", wrong), hardware=CARD)


@shows(
    "TT502",
    "DIR/base/model.safetensors is truncated or damaged: its header promises 2493696 bytes of "
    "tensors, it holds 2493695",
)
def _truncated(at: Path, wrong: bool) -> list[Finding]:
    return check(shortened(base(at), "model.safetensors", wrong), hardware=CARD)


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
    return check(without(base(at), "model.safetensors", wrong), hardware=CARD)


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
