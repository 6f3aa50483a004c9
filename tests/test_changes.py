"""What a merge changes of a checkpoint, made when it is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny
from trimtab.changes import Untied
from trimtab.deltas import check_mergeable
from trimtab.errors import AdapterFault, FormatFault
from unmerged import opened

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of ties and experts

Q = "model.layers.0.self_attn.q_proj.weight"


def test_only_what_the_adapters_touch_changes() -> None:
    folder = tiny.checkpoint("llama")
    it = opened(folder)
    changes = it.changes(it.delta(tiny.adapter(folder, targets=["q_proj"])))
    assert changes.keys == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(6)}
    assert changes.value("model.norm.weight") is None
    merged = tiny.reference(folder, "none", tiny.adapter(folder, targets=["q_proj"]))
    stock = dict(merged.merge_and_unload().named_parameters())
    for key in changes.keys:
        value = changes.value(key)
        assert value is not None
        assert torch.equal(value, stock[key])
    assert changes.untied == ()
    assert changes.added(frozenset(it.tensors)) == {}


def test_tensors_that_are_made_together_are_read_once() -> None:
    folder = tiny.checkpoint("qwen3-moe")
    it = opened(folder)
    asked: list[str] = []
    read = it.read
    it.read = lambda key: asked.append(key) or read(key)  # type: ignore[method-assign, func-returns-value]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    path = tiny.adapter(folder, targets=["q_proj"], target_parameters=experts)
    changes = it.changes(it.delta(path))
    keys = sorted(key for key in changes.keys if ".layers.1.mlp.experts." in key)
    assert len(keys) == 12
    assert all(changes.value(key) is not None for key in keys)
    assert sorted(asked) == keys
    assert (changes._ready, changes._made) == ({}, {})
    changes.value(keys[0])
    changes.forget()
    assert (changes._ready, changes._made) == ({}, {})


def test_a_head_that_leaves_its_tie_gets_a_key() -> None:
    folder = tiny.checkpoint("llama-tied")
    it = opened(folder)
    table = "model.embed_tokens.weight"
    changes = it.changes(it.delta(tiny.adapter(folder, targets=["lm_head", "q_proj"])))
    assert changes.untied == (Untied("lm_head.weight", "lm_head.weight", table),)
    assert changes.broken == {"lm_head.weight", table}
    assert table not in changes.keys
    ((name, (like, make)),) = changes.added(frozenset([table])).items()
    assert (name, like) == ("lm_head.weight", table)
    assert not torch.equal(make(), it.tensors[table])
    assert changes.added(frozenset()) == {}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("TrainableTokens", {"token_indices": [12, 13], "targets": ["embed_tokens"]}),
        ("lora", {"trainable_token_indices": [12, 13]}),
    ],
)
def test_rows_keep_the_tie(kind: str, options: dict[str, object]) -> None:
    folder = tiny.checkpoint("llama-tied")
    it = opened(folder)
    delta = it.delta(tiny.adapter(folder, kind, **options))  # type: ignore[arg-type]
    changes = it.changes(delta)
    assert changes.untied == ()
    value = changes.value("model.embed_tokens.weight")
    assert value is not None
    rows = next(one for key, one in delta.tensors.items() if "embed_tokens" in key)
    assert torch.equal(value[[12, 13]], rows.to(value.dtype))


def test_rows_that_differ_between_the_ends_of_a_tie() -> None:
    folder = tiny.checkpoint("llama-tied")
    it = opened(folder)
    options = {"token_indices": [12, 13], "targets": ["embed_tokens"]}
    delta = it.delta(tiny.adapter(folder, "TrainableTokens", **options))  # type: ignore[arg-type]
    check_mergeable(delta)
    key = "base_model.model.lm_head.trainable_tokens_delta"
    other = dataclasses.replace(delta, tensors={**delta.tensors, key: delta.tensors[key] + 1})
    with pytest.raises(AdapterFault, match="lm_head") as caught:
        check_mergeable(other)
    assert caught.value.code == "TT303"


def test_adapters_that_undo_each_other() -> None:
    folder = tiny.checkpoint("llama")
    it = opened(folder)
    whole = it.delta(tiny.adapter(folder, modules_to_save=["lm_head"]))
    other = it.delta(tiny.adapter(folder, targets=["lm_head"]))
    with pytest.raises(AdapterFault, match=r"holds lm_head\.weight whole") as caught:
        it.changes(whole, other)
    assert caught.value.code == "TT310"


def test_a_base_in_8_bits(tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tensors = dict(opened(folder).tensors)
    tensors[Q] = tensors[Q].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    it = opened(folder)
    with pytest.raises(AdapterFault, match="is stored as float8_e4m3fn") as caught:
        it.changes(it.delta(tiny.adapter(tiny.checkpoint("llama"))))
    assert caught.value.code == "TT309"


def test_a_tensor_that_the_base_lacks(tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tensors = {key: one for key, one in opened(folder).tensors.items() if key != Q}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    it = opened(folder)
    with pytest.raises(FormatFault, match=f"lacks {Q}") as caught:
        it.changes(it.delta(tiny.adapter(tiny.checkpoint("llama"))))
    assert caught.value.code == "TT505"
