"""`from_pretrained` under the intake: bounded, this thread's only, undone when it fails."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules import module as torch_module
from transformers import modeling_utils

import tiny
from alive import LiveBytes
from placing import carried_out, placed, planned
from trimtab.api import plan
from trimtab.errors import FormatFault
from trimtab.guard import is_guarded
from trimtab.intake import Intake
from trimtab.placement import Placement

WEIGHTS = "model.safetensors"


def rewritten(
    folder: Path, parent: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    """A copy of a checkpoint whose tensors `change` has changed."""
    return tiny.rewrite(tiny.writable(folder, parent), change)


def by_map(folder: Path, quant: str, away: Iterable[str], **options: Any) -> Placement:
    """A placement on a CPU, the modules `away` on the disk."""
    made = plan(
        folder,
        quant=quant,
        cpu="2GiB",
        disk="1GiB",
        context=64,
        device_map={"": "cpu", **dict.fromkeys(away, "disk")},
    )
    return carried_out(made, **options)


def global_state() -> tuple[Any, ...]:
    """All that a load changes outside of its model."""
    return (
        dict(torch_module._global_parameter_registration_hooks),
        dict(torch_module._global_module_registration_hooks),
        modeling_utils.caching_allocator_warmup,
        modeling_utils.accelerate_dispatch,
        dict(os.environ),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


# ------------------------------------------------------------------------------ how it loads


@pytest.mark.parametrize("before", [None, "0"])
def test_the_loaders_threads_are_off_while_loading_and_on_again(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", before)
    seen: list[tuple[str, str | None, int]] = []

    def arrived(name: str) -> None:
        seen.append((name, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"), threading.get_ident()))

    folder = tiny.checkpoint("llama")
    with carried_out(planned(folder, "nf4", ("half",)), progress=arrived) as placement:
        names = {name for name, _ in placement.model.named_parameters()}
    assert {value for _, value, _ in seen} == {"1"}
    assert {thread for _, _, thread in seen} == {threading.get_ident()}
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before
    # Each parameter arrives exactly once.
    assert sorted(name for name, _, _ in seen) == sorted(names)


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_only_this_threads_model_is_parked(quant: str) -> None:
    folder = tiny.checkpoint("llama")
    others: list[Any] = []

    def arrived(name: str) -> None:
        if name == "model.layers.2.self_attn.q_proj.weight":
            thread = threading.Thread(target=lambda: others.append(tiny.reference(folder, quant)))
            thread.start()
            thread.join()

    inputs = tiny.inputs(folder)
    with carried_out(planned(folder, quant, ("layers",)), progress=arrived) as placement:
        found = tiny.logits(placement.model, inputs)
    (other,) = others
    assert not any(is_guarded(one) for one in other.parameters())
    assert torch.equal(tiny.logits(other, inputs), found)


def test_a_parameter_of_another_model_is_left_alone() -> None:
    class Never:
        def receive(self, *_: Any) -> None:
            raise AssertionError("not this model's")

    with Intake({"weight": Never()}).open():
        torch.nn.Linear(2, 2)


@pytest.mark.parametrize("name", ["llama", "gemma4", "qwen3-moe"])
def test_no_hook_no_map_and_no_meta_tensor_is_left(name: str) -> None:
    folder = tiny.checkpoint(name)
    before = global_state()
    with placed(folder, "none", ("half", "towers")) as placement:
        assert global_state() == before
        assert not hasattr(placement.model, "hf_device_map")
        assert not any(hasattr(module, "_hf_hook") for module in placement.model.modules())
        assert not any(one.is_meta for one in placement.model.parameters())
        assert not any(one.is_meta for one in placement.model.buffers())
        assert not any(one.requires_grad for one in placement.model.parameters())
        # Norms and biases stay, wherever their unit rests.
        assert not any(is_guarded(one) for one in placement.model.parameters() if one.ndim < 2)
    assert global_state() == before


# ------------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("away", [(), ("model.layers.2",)], ids=["resident", "parked"])
@pytest.mark.parametrize("quant", ["none", "nf4"])
@pytest.mark.parametrize(
    "lost", ["model.layers.2.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"]
)
def test_a_missing_tensor_is_an_error_before_anything_runs(
    lost: str, quant: str, away: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rewritten(tiny.checkpoint("llama"), tmp_path, lambda tensors: tensors.pop(lost))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, before = sorted(tmp_path.iterdir()), global_state()
    with pytest.raises(FormatFault) as caught:
        by_map(folder, quant, away)
    assert caught.value.code == "TT505"
    assert lost in caught.value.what
    assert sorted(tmp_path.iterdir()) == left
    assert global_state() == before


@pytest.mark.parametrize("away", [(), ("model.layers.2",)], ids=["resident", "parked"])
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_a_tensor_of_the_wrong_shape_is_an_error(
    quant: str, away: tuple[str, ...], tmp_path: Path
) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    folder = rewritten(
        tiny.checkpoint("llama"), tmp_path, lambda found: found.update({name: found[name][:64]})
    )
    with pytest.raises(FormatFault) as caught:
        by_map(folder, quant, away)
    assert caught.value.code == "TT506"
    assert all(part in caught.value.what for part in (name, "[64, 128]", "[256, 128]"))


# ------------------------------------------------------------------------------------- ties

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def both(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBED].clone()


def different(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBED].flip(0).contiguous()


def only_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors.pop(EMBED)


AWAY = [("model.layers.1",), ("model.embed_tokens",), ("model.embed_tokens", "lm_head"),
        ("lm_head", "model.layers.1")]  # fmt: skip


@pytest.mark.parametrize("away", AWAY, ids="+".join)
@pytest.mark.parametrize("change", [both, different, only_head])
def test_tied_tensors_however_the_checkpoint_holds_them(
    change: Callable[[dict[str, torch.Tensor]], None], away: tuple[str, ...], tmp_path: Path
) -> None:
    """transformers compares the two parameters to decide whether they are tied."""
    folder = rewritten(tiny.checkpoint("llama-tied"), tmp_path, change)
    stock = tiny.reference(folder, "none")
    inputs = tiny.inputs(folder)
    with by_map(folder, "none", away) as placement:
        model = placement.model
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied is (stock.lm_head.weight is stock.model.embed_tokens.weight)
        assert torch.equal(tiny.logits(model, inputs), tiny.logits(stock, inputs))
        assert torch.equal(tiny.tokens(model, inputs), tiny.tokens(stock, inputs))


@pytest.mark.parametrize("away", AWAY, ids="+".join)
@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_tied_tensors_have_one_copy_of_their_bytes(name: str, away: tuple[str, ...]) -> None:
    folder = tiny.checkpoint(name)
    inputs = tiny.inputs(folder)
    with by_map(folder, "nf4", away) as placement:
        spans = [weight for slab in placement._rooms.slabs.values() for weight in slab.layout.spans]
        assert sum("embed_tokens" in one or "lm_head" in one for one in spans) <= 1
        assert placement.model.lm_head.weight is placement.model.model.embed_tokens.weight
        found = tiny.logits(placement.model, inputs)
    assert torch.equal(found, tiny.logits(tiny.reference(folder, "nf4"), inputs))


# ----------------------------------------------------------------------------------- failures


class Stop:
    """Raises when the nth parameter arrives."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("at", [1, 20, 57])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_load_that_fails_leaves_nothing_behind(
    kind: type[BaseException], at: int, tmp_path: Path
) -> None:
    folder = tiny.checkpoint("llama")
    made, before = planned(folder, "nf4", ("half", "head")), global_state()
    expected = FormatFault if kind is RuntimeError else kind
    with pytest.raises(expected, match="here"):
        carried_out(made, progress=Stop(kind("here"), at), disk_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert global_state() == before
    inputs = tiny.inputs(folder)
    with carried_out(made, disk_folder=tmp_path) as placement:
        found = tiny.logits(placement.model, inputs)
    assert torch.equal(found, tiny.logits(tiny.reference(folder, "nf4"), inputs))


# ------------------------------------------------------------------------------- bounded memory


def extra_of_loading(folder: Path, quant: str, device: str) -> tuple[int, Placement]:
    """The most bytes above those that stay, until the last parameter has arrived."""
    made = planned(folder, quant, ("layers", "head"), device=device)
    peaks: list[int] = []
    with LiveBytes() as live:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = 0 if device == "cpu" else torch.cuda.memory_allocated()

        def arrived(_: str) -> None:
            peaks.append(live.peak if device == "cpu" else torch.cuda.max_memory_allocated())

        placement = carried_out(made, progress=arrived)
    return peaks[-1] - before - sum(unit.staying_bytes for unit in made.units), placement


LARGEST = {"none": 2.0, "nf4": 1.3, "nf4-dq": 1.4, "int8": 2.6}
"""Largest tensors in 16 bits that are there at a time: on a CPU the file's own, too."""


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize("quant", LARGEST)
def test_loading_never_holds_more_than_what_stays_and_a_tensor(quant: str, device: str) -> None:
    folder = tiny.checkpoint("llama")
    extra, placement = extra_of_loading(folder, quant, device)
    placement.close()
    largest = max(one.nbytes for one in load_file(folder / WEIGHTS).values())
    # A GPU's allocator rounds each tensor up to 512 bytes.
    rounding = 0 if device == "cpu" else 512 * 4 * 57
    assert 0 < extra <= LARGEST[quant] * largest + rounding


@pytest.mark.parametrize("device", tiny.DEVICES)
def test_experts_are_counted_as_they_are_fused(device: str) -> None:
    """A fused expert tensor is made of all its experts: single, concatenated, stacked."""
    extra, placement = extra_of_loading(tiny.checkpoint("qwen3-moe"), "nf4", device)
    with placement:
        experts = placement.model.model.layers[0].mlp.experts
        fused = max(one.nbytes for one in experts.parameters())
    rounding = 0 if device == "cpu" else 512 * 4 * 57
    assert fused < extra <= 2.5 * fused + rounding
