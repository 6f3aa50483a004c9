"""Situations that fail for reasons of their own: nothing that `explain` should claim to know."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from torch import nn

import further_situations as further
import tiny  # of tests/


def _chained() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("the settings are not complete") from error


def _grouped() -> None:
    raise ExceptionGroup("several", [ValueError("one"), TypeError("unhashable type: 'set'")])


def _recursive() -> None:
    _recursive()


def _in_a_thread() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [1, 2][3]).result()


async def _slow() -> None:
    await asyncio.wait_for(asyncio.sleep(9), timeout=0.01)


def _backward_twice() -> None:
    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


def _load_state() -> None:
    nn.Linear(2, 3).load_state_dict(nn.Linear(3, 3).state_dict())


def _meta_module() -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    layer.to("cpu")


def _mixed_devices() -> None:
    torch.ones(2, 2).to("meta").numpy()


def _llama(**fields: object) -> None:
    transformers.LlamaConfig(**{"num_attention_heads": 3, "hidden_size": 64, **fields})
    tiny.MODELS["llama"]().forward(input_ids=torch.tensor([[1, 999]]))


def _generate() -> None:
    model = tiny.MODELS["llama"]()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, no_such_option=True)


def _template() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def _saved() -> None:
    shared = torch.ones(4)
    safetensors.torch.save_file({"a": shared, "b": shared[:2]}, "x.safetensors")


UNRELATED: dict[str, Callable[[], object]] = {
    "key": lambda: {1: 2}[22],
    "key-of-text": lambda: {}["model.layers.0.weight"],
    "index": lambda: [][1],
    "division": lambda: 1 / 0,
    "attribute": lambda: None.weight,  # type: ignore[attr-defined]
    "set-in-set": lambda: {frozenset(), {1}},
    "import": lambda: __import__("no_such_package_of_mine"),
    "file": lambda: Path("nowhere.json").read_text(),
    "json": lambda: json.loads("{'a': 1}"),
    "unicode": lambda: b"\xff".decode(),
    "number": lambda: int("12a"),
    "syntax": lambda: compile("def f(:", "<text>", "exec"),
    "assertion": lambda: (_ for _ in ()).throw(AssertionError("shapes differ")),
    "chained": _chained,
    "grouped": _grouped,
    "recursion": _recursive,
    "thread": _in_a_thread,
    "timeout": lambda: asyncio.run(_slow()),
    "process": lambda: subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True),
    "interrupted": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "numpy-shapes": lambda: np.ones((2, 3)) @ np.ones((2, 3)),
    "numpy-index": lambda: np.ones(3)[5],
    "torch-shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "torch-linear": lambda: nn.Linear(4, 4)(torch.ones(2, 3)),
    "torch-dtype": lambda: nn.Linear(4, 4)(torch.ones(2, 4, dtype=torch.float16)),
    "torch-embedding": lambda: nn.Embedding(4, 4)(torch.tensor([7])),
    "torch-view": lambda: torch.ones(6).view(4),
    "torch-cat": lambda: torch.cat([torch.ones(2, 2), torch.ones(3, 3)]),
    "torch-item": lambda: torch.ones(3).item(),
    "torch-meta-item": lambda: torch.ones(1, device="meta").item(),
    "torch-meta-module": _meta_module,
    "torch-mixed-devices": _mixed_devices,
    "torch-state": _load_state,
    "torch-backward": _backward_twice,
    "torch-inplace": lambda: torch.ones(2, requires_grad=True).add_(1),
    "torch-loss": lambda: nn.CrossEntropyLoss()(torch.ones(2, 3), torch.tensor([0, 5])),
    "torch-cuda": lambda: torch.ones(2, device="cuda"),
    "torch-submodule": lambda: nn.Sequential(nn.ReLU()).get_submodule("7.x"),
    "torch-load": lambda: torch.load("nowhere.pt"),
    "torch-attribute": lambda: nn.Linear(2, 2).no_such_thing,
    "transformers-token": _llama,
    "transformers-generate": _generate,
    "transformers-template": _template,
    "transformers-class": lambda: transformers.NoSuchModel,
    "safetensors-shared": _saved,
    "accelerate-moved": lambda: further.moved("llama", "model.layers.2"),
    "tokenizer-empty": lambda: tiny.tokenizer().decode(["x"]),
}
