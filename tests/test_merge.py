"""A merged checkpoint equals PEFT's merge in memory, to the last bit, and is whole or absent."""

from __future__ import annotations

import errno
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
from trimtab import merge as public
from trimtab.errors import AdapterFault, FormatFault, MemoryFault
from trimtab.merge import merge

# What PEFT says while it makes the adapters and the references; merging itself is quiet, see below.
pytestmark = pytest.mark.filterwarnings("ignore")

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
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
    "experts": ("qwen3-moe", "lora", {"targets": ["q_proj"], "target_parameters": _EXPERTS}),
    "one expert matrix": (
        "qwen3-moe",
        "lora",
        {"targets": ["q_proj"], "target_parameters": _EXPERTS[1:]},
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


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All parameters by name, ties repeated, and nothing is missing or left over."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, said = getattr(transformers, name).from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert [key for key, found in said.items() if found] == []
    return dict(model.named_parameters(remove_duplicate=False))


def missing(folder: Path) -> set[str]:
    """Parameters that transformers does not find in a checkpoint."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    _, said = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    return set(said["missing_keys"])


def in_memory(base: Path, adapter: Path, **options: Any) -> dict[str, torch.Tensor]:
    """PEFT's merge of the same, by name."""
    merged = tiny.reference(base, "none", adapter, **options).merge_and_unload()
    return dict(merged.named_parameters(remove_duplicate=False))


def different(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    assert set(found) == set(wanted)
    return [name for name, one in wanted.items() if not torch.equal(found[name], one)]


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


def test_what_no_adapter_touches_keeps_its_bytes(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", shards=3)
    adapter = tiny.adapter(base, targets=["model.layers.0.self_attn.q_proj"])
    done = merge(base, adapter, tmp_path / "out")
    changed = []
    for file in done.files:
        before, after = load_file(base / file), load_file(tmp_path / "out" / file)
        assert list(before) == list(after)
        changed += [key for key in before if not torch.equal(before[key], after[key])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]
    assert (done.tensors, done.total) == (1, 57)
    same = [
        one for one in done.files if (base / one).read_bytes() == (done.folder / one).read_bytes()
    ]
    assert len(same) == len(done.files) - 1


def test_the_other_files(tmp_path: Path) -> None:
    base = tiny.writable(tiny.checkpoint("llama", shards=2), tmp_path)
    (base / "LICENSE").write_text("terms")
    (base / "README.md").write_text("the base's")
    (base / "notes.bin").write_bytes(b"no")
    adapter = tiny.adapter(tiny.checkpoint("llama", shards=2))
    done = merge(base, [adapter], tmp_path / "out", weights=[0.5])
    index = "model.safetensors.index.json"
    kept = {one.name for one in base.iterdir()} - {"notes.bin"}
    assert {one.name for one in done.folder.iterdir()} == kept
    for name in kept - {"README.md", index, *done.files}:
        assert (done.folder / name).read_bytes() == (base / name).read_bytes()
    held = [json.loads((one / index).read_text()) for one in (base, done.folder)]
    assert held[0]["weight_map"] == held[1]["weight_map"]
    assert held[1]["metadata"]["total_size"] == done.nbytes
    card = (done.folder / "README.md").read_text()
    assert f"| `{adapter}` | 0.5 |" in card
    assert f"`{base}` with these PEFT adapters" in card
    assert f"trimtab {trimtab.__version__}" in card


def test_a_merge_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.checkpoint("llama", shards=3)
    adapter = tiny.adapter(base)
    out = tmp_path / "out"
    written: list[str] = []

    def stop(file: str) -> None:
        written.append(file)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base, adapter, out, progress=stop)
    assert not out.exists()
    first = tmp_path / "out.partial" / written[0]
    before = first.stat().st_mtime_ns
    rest: list[str] = []
    done = merge(base, adapter, out, progress=rest.append)
    assert [*written, *rest] == list(done.files)
    assert (out / written[0]).stat().st_mtime_ns == before
    assert not (tmp_path / "out.partial").exists()
    assert different(loaded(out), in_memory(base, adapter)) == []


def test_a_merge_that_was_killed_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.changes import Changes

    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base)
    out = tmp_path / "out"
    left = [10]

    def value(self: Changes, key: str) -> torch.Tensor | None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return original(self, key)

    original = Changes.value
    monkeypatch.setattr(Changes, "value", value)
    with pytest.raises(KeyboardInterrupt):
        merge(base, adapter, out)
    names = {one.name for one in (tmp_path / "out.partial").iterdir()}
    assert names == {"trimtab-merge.json", "trimtab.lock"}
    monkeypatch.undo()
    merge(base, adapter, out)
    assert different(loaded(out), in_memory(base, adapter)) == []


def test_another_merge_does_not_go_on(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", shards=2)

    def stop(file: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base, tiny.adapter(base), tmp_path / "out", progress=stop)
    for adapter, weight in ((tiny.adapter(base, seed=2), 1.0), (tiny.adapter(base), 0.5)):
        with pytest.raises(AdapterFault, match="is of another merge") as caught:
            merge(base, [adapter], tmp_path / "out", weights=[weight])
        assert caught.value.code == "TT318"


def test_a_folder_that_is_taken(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base)
    (tmp_path / "empty").mkdir()
    merge(base, adapter, tmp_path / "empty")
    with pytest.raises(AdapterFault, match="is there already and not empty") as caught:
        merge(base, adapter, tmp_path / "empty")
    assert caught.value.code == "TT318"
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine").write_text("")
    with pytest.raises(AdapterFault, match="no merge that can go on"):
        merge(base, adapter, tmp_path / "other")
    assert (tmp_path / "other.partial" / "mine").exists()


def test_two_at_a_time(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", shards=2)
    adapter = tiny.adapter(base)

    def again(file: str) -> None:
        with pytest.raises(AdapterFault, match="another process is writing"):
            merge(base, adapter, tmp_path / "out")

    merge(base, adapter, tmp_path / "out", progress=again)


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_quantized_base_is_refused(quant: str, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    tiny.reference(tiny.checkpoint("llama"), quant).save_pretrained(folder)
    with pytest.raises(AdapterFault, match="is quantized") as caught:
        merge(folder, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT309"
    assert "rounded twice" in caught.value.why
    assert not (tmp_path / "out.partial").exists()


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


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trimtab.partial

    base = tiny.checkpoint("llama", shards=2)
    adapter = tiny.adapter(base)

    def full(file: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MemoryFault, match="are free") as caught:
        merge(base, adapter, tmp_path / "out", progress=full)
    assert caught.value.code == "TT403"
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 10})
        patch.setattr(trimtab.partial.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(MemoryFault, match="10 B are free"):
            merge(base, adapter, tmp_path / "out")
    merge(base, adapter, tmp_path / "out")


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


def test_one_shard_with_an_index(tmp_path: Path) -> None:
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    shard = "model-00001-of-00001.safetensors"
    (base / "model.safetensors").rename(base / shard)
    names = dict.fromkeys(load_file(base / shard), shard)
    index = {"metadata": {}, "weight_map": names}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = tiny.adapter(tiny.checkpoint("llama"))
    assert merge(base, adapter, tmp_path / "out").files == (shard,)
    assert different(loaded(tmp_path / "out"), in_memory(base, adapter)) == []


def test_it_is_as_strict_as_loading(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tiny.checkpoint("llama")
    folder = tiny.writable(tiny.adapter(base), tmp_path)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(iter(tensors))
    save_file({**tensors, key.replace("layers.0", "layers.99"): tensors[key].clone()}, file)
    with pytest.raises(AdapterFault) as caught:
        merge(base, folder, tmp_path / "out")
    assert caught.value.code == "TT303"
    done = merge(base, folder, tmp_path / "out", allow_unused=True)
    assert "left out" in " ".join(done.notes)


def test_a_tensor_that_the_base_lacks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatFault) as caught:
        merge(base, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT505"


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tiny.checkpoint("llama")
    folder = tiny.writable(tiny.adapter(base), tmp_path)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
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


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    tensors = load_file(base / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    tensors[key.removeprefix("model.")] = tensors[key].clone()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatFault, match="several tensors of") as caught:
        merge(base, tiny.adapter(tiny.checkpoint("llama")), tmp_path / "out")
    assert caught.value.code == "TT514"


def test_tensors_that_cannot_be_turned_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab import foreign

    base = tiny.checkpoint("qwen3-moe")
    adapter = tiny.adapter(base, targets=["q_proj"], target_parameters=_EXPERTS)
    revert = foreign.reverted_tensors

    def wrong(*given: Any) -> dict[str, torch.Tensor]:
        return {key: one + 1 for key, one in revert(*given).items()}

    monkeypatch.setattr(foreign, "reverted_tensors", wrong)
    with pytest.raises(FormatFault, match="cannot be turned back") as caught:
        merge(base, adapter, tmp_path / "out")
    assert caught.value.code == "TT514"


def test_the_public_name_is_the_function() -> None:
    assert public is merge
    assert trimtab.merge is merge
