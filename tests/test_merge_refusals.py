"""What is not merged: each refusal, by its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from merged import EXPERTS
from trimtab.errors import AdapterFault, FormatFault
from trimtab.merge import merge

# What PEFT says while it makes the adapters and the references.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_quantized_base_is_refused(quant: str, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    tiny.reference(tiny.checkpoint("llama"), quant).save_pretrained(folder)
    with pytest.raises(AdapterFault, match="is quantized") as caught:
        merge(folder, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT309"
    assert "rounded twice" in caught.value.why
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("kind", ["Vera", "PrefixTuning"])
def test_a_kind_that_cannot_be_merged(kind: str, tmp_path: Path) -> None:
    options = {"num_virtual_tokens": 4} if kind == "PrefixTuning" else {}
    base = tiny.checkpoint("llama")
    with pytest.raises(AdapterFault, match="cannot be merged module by module") as caught:
        merge(base, tiny.adapter(base, kind, **options), tmp_path / "out")
    assert caught.value.code == "TT314"


def test_weights_of_what_has_no_scale(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    saved = tiny.adapter(base, modules_to_save=["lm_head"])
    for adapter in (saved, tiny.adapter(base, "HRA")):
        with pytest.raises(AdapterFault) as caught:
            merge(base, [adapter], tmp_path / "out", weights=[0.5])
        assert caught.value.code == "TT314"
    with pytest.raises(ValueError, match="as many finite weights"):
        merge(base, [saved], tmp_path / "out", weights=[0.5, 1])


def test_an_adapter_that_would_undo_another(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    pair = [
        tiny.adapter(base, targets=["lm_head", "q_proj"]),
        tiny.adapter(base, modules_to_save=["lm_head"]),
    ]
    with pytest.raises(AdapterFault, match=r"holds lm_head\.weight whole") as caught:
        merge(base, pair, tmp_path / "out")
    assert caught.value.code == "TT310"


def test_it_is_as_strict_as_loading(tmp_path: Path) -> None:
    def stray(tensors: dict[str, torch.Tensor]) -> None:
        key = next(iter(tensors))
        tensors[key.replace("layers.0", "layers.99")] = tensors[key]

    base = tiny.checkpoint("llama")
    folder = tiny.rewrite(tiny.writable(tiny.adapter(base), tmp_path), stray)
    with pytest.raises(AdapterFault) as caught:
        merge(base, folder, tmp_path / "out")
    assert caught.value.code == "TT303"
    done = merge(base, folder, tmp_path / "out", allow_unused=True)
    assert "left out" in " ".join(done.notes)


def test_a_tensor_that_the_base_lacks(tmp_path: Path) -> None:
    lost = "model.layers.0.self_attn.q_proj.weight"
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tiny.rewrite(base, lambda tensors: tensors.pop(lost))
    with pytest.raises(FormatFault) as caught:
        merge(base, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT505"


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = float("nan")

    base = tiny.checkpoint("llama")
    folder = tiny.rewrite(tiny.writable(tiny.adapter(base), tmp_path), spoil)
    with pytest.raises(AdapterFault, match=r"is not finite") as caught:
        merge(base, folder, tmp_path / "out")
    assert caught.value.code in ("TT302", "TT303")
    assert not (tmp_path / "out").exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    with pytest.raises(FormatFault, match=r"pytorch_model\.bin") as caught:
        merge(base, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT509"


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tiny.rewrite(base, lambda tensors: tensors.update({key.removeprefix("model."): tensors[key]}))
    with pytest.raises(FormatFault, match="several tensors of") as caught:
        merge(base, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT514"


def test_tensors_that_cannot_be_turned_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab import foreign

    base = tiny.checkpoint("qwen3-moe")
    adapter = tiny.adapter(base, targets=["q_proj"], target_parameters=EXPERTS)
    revert = foreign.reverted_tensors

    def wrong(*given: Any) -> dict[str, torch.Tensor]:
        return {key: one + 1 for key, one in revert(*given).items()}

    monkeypatch.setattr(foreign, "reverted_tensors", wrong)
    with pytest.raises(FormatFault, match="cannot be turned back") as caught:
        merge(base, adapter, tmp_path / "out")
    assert caught.value.code == "TT514"
