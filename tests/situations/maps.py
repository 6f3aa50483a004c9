"""Situations of TT2: device maps, plans and placements."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import transformers
from torch import nn

import tiny
from placing import placed
from situations.situation import CARD, SMALL, base, edit, llama, looked_at, shows
from trimtab import disk
from trimtab.api import load, plan
from trimtab.attach import attach
from trimtab.diagnosis import Finding, check
from trimtab.park import Wrapped


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


@shows("TT205", "the plan was made for the checkpoint FINGERPRINT, and DIR/base is FINGERPRINT")
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


@shows("TT224", "a forked process uses a placement that its parent made")
def _forked(at: Path, wrong: bool) -> None:
    with disk.OwnThreads(1, "reads") as threads:
        threads._owner = os.getppid() if wrong else os.getpid()
        threads.submit(int)
