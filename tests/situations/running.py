"""Situations of TT6: what a placed model does not do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import torch
from torch import nn

import tiny
from placing import carried_out, placed, planned
from situations.situation import CARD, llama, shows
from trimtab.diagnosis import Finding, check


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
