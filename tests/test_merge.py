"""A merged checkpoint equals PEFT's merge in memory, to the last bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
import trimtab
from alive import LiveBytes
from merged import EXPERTS, different, in_memory, loaded
from trimtab import merge as public
from trimtab.errors import FormatFault
from trimtab.merge import merge

# What PEFT says while it makes the adapters and the references; merging itself is quiet, see below.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "lora", {}),
    "dora": ("llama", "dora", {}),
    "rslora": ("llama", "lora", {"use_rslora": True}),
    "patterns": ("llama", "lora", {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 5}}),
    "some layers": ("llama", "lora", {"layers_to_transform": [1, 4]}),
    "table": ("llama", "lora", {"targets": ["embed_tokens", "q_proj"]}),
    "table, dora": ("llama", "dora", {"targets": ["embed_tokens", "q_proj"]}),
    "head": ("llama", "lora", {"targets": ["lm_head", "q_proj"]}),
    "head trained whole": ("llama", "lora", {"modules_to_save": ["lm_head"]}),
    "rows": ("llama", "lora", {"trainable_token_indices": [3, 5, 200]}),
    "tied": ("llama-tied", "lora", {}),
    "tied, rows": ("llama-tied", "lora", {"trainable_token_indices": [3, 5, 200]}),
    "tied, table trained whole": ("llama-tied", "lora", {"modules_to_save": ["embed_tokens"]}),
    "renamed keys": ("gemma3-vlm", "lora", {}),
    "renamed keys, dora": ("gemma3-vlm", "dora", {}),
    "gemma4": ("gemma4", "lora", {}),
    "beside experts": ("qwen3-moe", "lora", {}),
    "experts": ("qwen3-moe", "lora", {"targets": ["q_proj"], "target_parameters": EXPERTS}),
    "one expert matrix": (
        "qwen3-moe",
        "lora",
        {"targets": ["q_proj"], "target_parameters": EXPERTS[1:]},
    ),
    "conv1d": ("gpt2", "lora", {}),
    "conv1d, dora": ("gpt2", "dora", {}),
    "all biases": ("gpt2", "lora", {"bias": "all"}),
    "biases of the targets": ("gpt2", "lora", {"bias": "lora_only"}),
    "biases of the deltas": ("gpt2", "lora", {"lora_bias": True}),
    "loha": ("llama", "LoHa", {}),
    "lokr": ("llama", "LoKr", {}),
    "ia3": (
        "llama",
        "IA3",
        {"targets": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "oft": ("llama", "OFT", {"oft_block_size": 32}),
    "boft": ("llama", "BOFT", {"boft_block_size": 4}),
    "hra": ("llama", "HRA", {}),
    "layer norms": ("llama", "LNTuning", {"targets": ["input_layernorm"]}),
    "fourier": ("llama", "FourierFT", {}),
    "miss": ("llama", "Miss", {}),
    "shira": ("llama", "Shira", {}),
    "wavelets": ("llama", "WaveFT", {}),
    "road": ("llama", "Road", {}),
    "delora": ("llama", "Delora", {}),
    "c3a": ("llama", "C3A", {"block_size": 64}),
    "adalora": ("llama", "AdaLora", {"total_step": 10}),
}


def missing(folder: Path) -> set[str]:
    """Parameters that transformers does not find in a checkpoint."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    _, said = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    return set(said["missing_keys"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", [1, 3])
def test_equal_to_the_merge_in_memory(case: str, shards: int, tmp_path: Path) -> None:
    name, kind, options = CASES[case]
    base = tiny.checkpoint(name, shards=shards)
    adapter = tiny.adapter(base, kind, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = merge(base, adapter, tmp_path / "out")
    wanted = in_memory(base, adapter)
    found = loaded(tmp_path / "out")
    assert different(found, wanted) == []
    assert different(loaded(base), wanted) != []
    assert len(done.files) >= shards
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", dtype=dtype)
    adapter = tiny.adapter(base)
    merge(base, adapter, tmp_path / "out")
    assert different(loaded(tmp_path / "out", dtype), in_memory(base, adapter, dtype=dtype)) == []


@pytest.mark.parametrize("kinds", [("lora", "lora"), ("lora", "dora"), ("dora", "lora")])
def test_two_adapters(kinds: tuple[str, str], tmp_path: Path) -> None:
    from peft import PeftModel

    base = tiny.checkpoint("llama")
    first = tiny.adapter(base, kinds[0])
    second = tiny.adapter(base, kinds[1], targets=["q_proj", "up_proj"], seed=2)
    done = merge(base, [first, second], tmp_path / "out")
    # One after the other: beside each other, PEFT 0.18 rounds the second adapter to 16 bits, and
    # PEFT 0.21 scales a DoRA by the norm of the base without the first.
    merged = tiny.reference(base, "none", first).merge_and_unload()
    both = PeftModel.from_pretrained(merged, second, low_cpu_mem_usage=False).merge_and_unload()
    wanted = dict(both.named_parameters(remove_duplicate=False))
    assert different(loaded(tmp_path / "out"), wanted) == []
    assert [one for one, _ in done.adapters] == [str(first), str(second)]


@pytest.mark.parametrize("kind", ["lora", "dora", "LoHa"])
def test_weights(kind: str, tmp_path: Path) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base, kind)
    model = tiny.reference(base, "none", adapter)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.scaling["default"] *= 0.25
    wanted = dict(model.merge_and_unload().named_parameters(remove_duplicate=False))
    merge(base, [adapter], tmp_path / "out", weights=[0.25])
    assert different(loaded(tmp_path / "out"), wanted) == []


@pytest.mark.parametrize("name", ["llama-tied", "gemma3-vlm", "gemma4"])
@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_tie_that_the_adapter_breaks(name: str, end: str, shards: int, tmp_path: Path) -> None:
    base = tiny.checkpoint(name, shards=shards)
    adapter = tiny.adapter(base, targets=rf".*{end}")
    done = merge(base, adapter, tmp_path / "out")
    found, before, wanted = loaded(tmp_path / "out"), loaded(base), in_memory(base, adapter)
    table = next(key for key in before if key.endswith("embed_tokens.weight"))
    changed, same = (
        (table, "lm_head.weight") if end == "embed_tokens" else ("lm_head.weight", table)
    )
    # PEFT in memory changes both, since they are one tensor: the adapter changes one.
    assert different(found, wanted) == [same]
    assert torch.equal(found[same], before[same])
    assert not torch.equal(found[changed], before[changed])
    assert done.untied == tuple(sorted((table, "lm_head.weight")))
    assert "are two now" in done.notes[-1]
    assert done.tensors == (2 if end == "embed_tokens" else 1)


def test_a_broken_tie_computes_what_base_and_adapter_do(tmp_path: Path) -> None:
    import transformers

    base = tiny.checkpoint("llama-tied", dtype=torch.float32)
    adapter = tiny.adapter(base, targets=["embed_tokens"])
    merge(base, adapter, tmp_path / "out")
    given = tiny.inputs(base)
    wanted = tiny.logits(tiny.reference(base, "none", adapter, dtype=torch.float32), given)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(tiny.logits(model, given), wanted, rtol=1e-4, atol=1e-4)


def test_memory_is_bounded_by_a_module(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base)
    merge(base, adapter, tmp_path / "warm")
    largest = max(one.nbytes for one in load_file(base / "model.safetensors").values())
    held = sum(one.nbytes for one in load_file(adapter / "adapter_model.safetensors").values())
    total = sum(one.nbytes for one in load_file(base / "model.safetensors").values())
    with LiveBytes() as live:
        merge(base, adapter, tmp_path / "out")
    # The weight, the difference in 32 bits and what scales it, the adapter's part of it.
    assert live.peak < held + 10 * largest < total


def test_a_table_of_its_own_stays_tied(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tiny.checkpoint("llama-tied")
    folder = tiny.writable(tiny.adapter(base), tmp_path)
    file = folder / "adapter_model.safetensors"
    table = loaded(base)["model.embed_tokens.weight"].detach() * 2
    save_file({**load_file(file), "base_model.model.model.embed_tokens.weight": table}, file)
    done = merge(base, folder, tmp_path / "out")
    assert done.untied == ()
    found = loaded(tmp_path / "out")
    assert torch.equal(found["model.embed_tokens.weight"], table)
    assert torch.equal(found["lm_head.weight"], table)


def _renamed(key: str) -> str:
    """A key of Gemma 3 as transformers 4 wrote it before its classes were changed, or after."""
    old, new = "language_model.model.", "model.language_model."
    return key.replace(old, new) if key.startswith(old) else key.replace(new, old)


@pytest.mark.parametrize("targets", [r".*language_model.*\.q_proj", r".*embed_tokens"])
def test_keys_of_either_time(targets: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    first = tiny.checkpoint("gemma3-vlm")
    adapter = tiny.adapter(first, targets=targets)
    merge(first, adapter, tmp_path / "first")
    base = tiny.writable(first, tmp_path)
    tensors = {_renamed(key): one for key, one in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    if missing(base):  # transformers 5.5 does not load them itself
        with pytest.raises(FormatFault) as caught:
            merge(base, adapter, tmp_path / "out")
        assert caught.value.code == "TT505"
        return
    merge(base, adapter, tmp_path / "out")
    assert set(tensors) <= set(load_file(tmp_path / "out" / "model.safetensors"))
    assert different(loaded(tmp_path / "out"), loaded(tmp_path / "first")) == []


def test_the_public_name_is_the_function() -> None:
    assert public is merge
    assert trimtab.merge is merge
