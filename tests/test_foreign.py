"""What is changed in other libraries comes back, whoever else changes it, whatever interrupts."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from torch import nn
from transformers import modeling_utils

import tiny
from interrupts import at_each_line
from trimtab import foreign
from trimtab.checkpoint import open_checkpoint
from trimtab.skeleton import config_of, model_class_of


def test_two_loads_leave_the_loader_as_it_was() -> None:
    before = modeling_utils.caching_allocator_warmup, modeling_utils.accelerate_dispatch
    entered, waiting = threading.Event(), threading.Event()

    def first() -> None:
        with foreign.watched_load(lambda model: None):
            entered.set()
            assert waiting.wait(10)

    def second() -> None:
        assert entered.wait(10)
        threading.Timer(0.05, waiting.set).start()  # when it stands before the lock
        with foreign.watched_load(lambda model: None):
            pass

    threads = [threading.Thread(target=one) for one in (first, second)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    after = modeling_utils.caching_allocator_warmup, modeling_utils.accelerate_dispatch
    assert after == before


def test_an_interrupt_at_any_line_leaves_accelerates_hooks() -> None:
    modules: list[Any] = [nn.Linear(2, 2) for _ in range(3)]
    own = [{"_hf_hook": object(), "_old_forward": one.forward, "forward": 1} for one in modules]
    for module, held in zip(modules, own, strict=True):
        vars(module).update(held)

    restoring = False

    def work() -> None:
        nonlocal restoring
        restoring = False
        with foreign.hooks_off(modules):
            assert not any("_hf_hook" in vars(one) for one in modules)
            restoring = True

    lines = 0
    for where in at_each_line({foreign.__file__, contextlib.__file__}, work):
        if restoring:
            break  # a second interrupt may meet what undoes the first
        lines += 1
        for module, held in zip(modules, own, strict=True):
            assert {name: vars(module).get(name) for name in held} == held, where
    assert lines > 10


def test_infinities_of_a_config_are_read(tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    found: Any = config_of(checkpoint, model_class_of(checkpoint))
    assert found.time_step_limit == [0.0, float("inf")]
