"""A placement saved as it is quantized: transformers' own file, and the same model when loaded."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from alive import LiveBytes
from placing import AWAY, placed
from trimtab import saving
from trimtab.errors import FormatFault, MemoryFault, PlacementFault
from trimtab.placement import Placement
from trimtab.saving import Weights, save

# transformers says of a quantized model which of its settings a config has, too.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [("llama", quant) for quant in ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")] + [
    (name, quant)
    for name in ("llama-tied", "llama-biased", "gemma3-vlm", "gemma4", "qwen3-moe", "gpt2")
    for quant in ("nf4-dq", "int8")
]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        key: one
        for file in sorted(folder.glob("*.safetensors"))
        for key, one in load_file(file).items()
    }


def different(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    assert set(found) == set(wanted)
    return [
        key
        for key, one in wanted.items()
        if one.dtype != found[key].dtype or not torch.equal(one, found[key])
    ]


def stock(folder: Path, **options: Any) -> Any:
    """transformers' own model of a checkpoint that is quantized already."""
    return tiny.reference(folder, "none", **options)


def saved_parts(
    placement: Placement, folder: Path, shard: int, progress: Callable[[str], None] | None = None
) -> saving.Saved:
    weights = Weights(placement._modules, placement._gate.units, placement._rooms)
    return save(folder, placement.plan, weights, shard=shard, progress=progress)


@pytest.mark.parametrize("device", tiny.DEVICES)
@pytest.mark.parametrize(("name", "quant"), CASES)
def test_both_load_what_was_saved(name: str, quant: str, device: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(name)
    given = tiny.inputs(base, device=device)
    out = tmp_path / "out"
    with placed(base, quant, AWAY["all"], device=device) as first:
        first.save_quantized(out)
        logits, tokens = tiny.logits(first.model, given), tiny.tokens(first.model, given)
    model = stock(out, device=device)
    assert torch.equal(tiny.logits(model, given), logits)
    assert torch.equal(tiny.tokens(model, given), tokens)
    with placed(out, "auto", AWAY["all"], device=device) as second:
        assert second.plan.quant == quant
        assert second.plan.units == first.plan.units
        assert torch.equal(tiny.logits(second.model, given), logits)
        assert torch.equal(tiny.tokens(second.model, given), tokens)
    assert not out.with_name("out.partial").exists()


@pytest.mark.parametrize(("name", "quant"), CASES)
def test_it_is_the_file_that_transformers_writes(name: str, quant: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(name)
    tiny.reference(base, quant).save_pretrained(tmp_path / "stock")
    with placed(base, quant, AWAY["all"]) as one:
        done = one.save_quantized(tmp_path / "ours")
    wanted, found = tensors(tmp_path / "stock"), tensors(tmp_path / "ours")
    assert different(found, wanted) == []
    assert done.files == ("model.safetensors",)
    assert done.tensors == len(wanted)
    assert done.nbytes == sum(tensor.nbytes for tensor in wanted.values())
    configs = [json.loads((tmp_path / at / "config.json").read_text()) for at in ("stock", "ours")]
    assert configs[1]["quantization_config"].pop("quantized_from") == "bfloat16"
    for key in ("quantization_config", "dtype", "architectures", "model_type"):
        assert configs[0][key] == configs[1][key]


def test_a_config_that_is_not_true_of_its_scales_is_found(tmp_path: Path) -> None:
    base, out = tiny.checkpoint("llama", dtype=torch.float32), tmp_path / "out"
    with placed(base, "nf4", AWAY["all"], dtype="float32") as one:
        one.save_quantized(out)
        logits = tiny.logits(one.model, tiny.inputs(base))
    with placed(out, "auto", AWAY["all"]) as again:
        assert torch.equal(tiny.logits(again.model, tiny.inputs(base)), logits)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quantized_from"] == "float32"
    config["quantization_config"]["quantized_from"] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatFault, match=r"more digits than torch\.bfloat16") as caught:
        placed(out, "auto", AWAY["all"])
    assert caught.value.code == "TT508"
    # Where nothing moves, nothing depends on it.
    with placed(out, "auto") as resident:
        assert torch.equal(tiny.logits(resident.model, tiny.inputs(base)), logits)


@pytest.mark.parametrize("quant", ["nf4-dq", "int8"])
@pytest.mark.parametrize("away", AWAY)
def test_wherever_it_rests_and_after_it_ran(away: str, quant: str, tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    with placed(base, quant, AWAY[away]) as one:
        before = tiny.logits(one.model, tiny.inputs(base))
        one.save_quantized(tmp_path / "ran")
        assert torch.equal(tiny.logits(one.model, tiny.inputs(base)), before)
    tiny.reference(base, quant).save_pretrained(tmp_path / "stock")
    assert different(tensors(tmp_path / "ran"), tensors(tmp_path / "stock")) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {}),
        ("dora", {}),
        ("lora", {"trainable_token_indices": [3, 5]}),
        ("lora", {"modules_to_save": ["lm_head"]}),
        ("LNTuning", {"targets": ["input_layernorm"]}),
    ],
)
def test_the_base_is_saved_without_its_adapters(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = tiny.checkpoint("llama")
    adapters = {"b": tiny.adapter(base, kind, seed=2, **options)}
    if kind != "LNTuning":  # PEFT has it alone
        adapters = {"a": tiny.adapter(base), **adapters}
    with placed(base, "nf4", AWAY["half"], adapters) as one, one.using("b") as model:
        tiny.logits(model, tiny.inputs(base))
        one.save_quantized(tmp_path / "ours")
    tiny.reference(base, "nf4").save_pretrained(tmp_path / "stock")
    assert different(tensors(tmp_path / "ours"), tensors(tmp_path / "stock")) == []


def test_what_was_saved_is_saved_again(tmp_path: Path) -> None:
    with placed(tiny.checkpoint("llama-tied"), "nf4-dq", AWAY["all"]) as first:
        first.save_quantized(tmp_path / "one")
    with placed(tmp_path / "one", "auto", AWAY["half"]) as second:
        second.save_quantized(tmp_path / "two")
    for file in sorted(one.name for one in (tmp_path / "one").iterdir()):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_tie_that_is_stored_as_the_head(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = tiny.writable(tiny.checkpoint("llama-tied"), tmp_path)
    held = load_file(base / "model.safetensors")
    held["lm_head.weight"] = held.pop("model.embed_tokens.weight")
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    with placed(base, "nf4", AWAY["all"]) as one:
        one.save_quantized(tmp_path / "out")
        logits = tiny.logits(one.model, tiny.inputs(base))
    assert "lm_head.weight" in tensors(tmp_path / "out")
    assert "model.embed_tokens.weight" not in tensors(tmp_path / "out")
    assert torch.equal(tiny.logits(stock(tmp_path / "out"), tiny.inputs(base)), logits)


def test_another_dtype_than_the_checkpoint_has(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    with placed(base, "nf4", AWAY["all"], dtype="float16") as one:
        one.save_quantized(tmp_path / "out")
        logits = tiny.logits(one.model, tiny.inputs(base))
    found = stock(tmp_path / "out", dtype="auto")
    assert found.dtype is torch.float16
    assert torch.equal(tiny.logits(found, tiny.inputs(base)), logits)


def test_files_of_bounded_size(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    limit = 200_000
    with placed(base, "nf4", AWAY["all"]) as one:
        whole = saved_parts(one, tmp_path / "whole", 2**30)
        seen: list[str] = []
        parts = saved_parts(one, tmp_path / "parts", limit, seen.append)
    assert whole.files == ("model.safetensors",)
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()
    count = len(parts.files)
    assert count > 3
    assert parts.files == tuple(seen)
    assert parts.files[1] == f"model-00002-of-{count:05}.safetensors"
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": whole.nbytes}
    for file in parts.files:
        held = load_file(tmp_path / "parts" / file)
        assert {index["weight_map"][key] for key in held} == {file}
        # Larger than the limit only for a weight that is so by itself.
        one_weight = len({key.split(".weight")[0] for key in held}) == 1
        assert sum(tensor.nbytes for tensor in held.values()) <= limit or one_weight
    assert different(tensors(tmp_path / "parts"), tensors(tmp_path / "whole")) == []
    given = tiny.inputs(base)
    expected = tiny.logits(stock(tmp_path / "whole"), given)
    assert torch.equal(tiny.logits(stock(tmp_path / "parts"), given), expected)


def test_one_weight_at_a_time_is_in_memory(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama-tied")
    with placed(base, "nf4", ("layers",)) as one:
        table = one.model.get_input_embeddings().weight.nbytes  # it is there anyway
        slabs = one._rooms.slabs.values()
        largest = max(
            sum(span.nbytes for span in parts.values())
            for slab in slabs
            for parts in slab.layout.spans.values()
        )
        assert sum(slab.layout.nbytes for slab in slabs) > 20 * largest
        with LiveBytes() as live:
            one.save_quantized(tmp_path / "out")
        small = 8 * 2**10  # code books and states
    assert largest <= live.peak - table <= largest + small


@pytest.mark.gpu
def test_a_gpu_has_no_part_in_it(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    with placed(base, "nf4-dq", AWAY["all"], device="cuda") as one:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one.save_quantized(tmp_path / "out")
        assert torch.cuda.max_memory_allocated() <= before + 2**16  # code books are copied


def test_what_lies_beside_the_weights_is_there(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    with placed(base, "int8", AWAY["half"]) as one:
        one.save_quantized(tmp_path / "out")
    names = {file.name for file in base.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    own = json.loads((base / "config.json").read_text())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["load_in_8bit"] is True
    assert config == own


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with placed(tiny.checkpoint("llama"), "nf4", AWAY["half"]) as one:
        with monkeypatch.context() as patched:
            patched.setattr(saving, "write_file", full)
            with pytest.raises(MemoryFault) as caught:
                one.save_quantized(tmp_path / "out")
        assert caught.value.code == "TT403"
        assert list(tmp_path.iterdir()) == []
        one.save_quantized(tmp_path / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    with placed(tiny.checkpoint("llama"), "nf4", AWAY["half"]) as one:
        one.save_quantized(tmp_path / "out")
        held = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
        with pytest.raises(FormatFault) as caught:
            one.save_quantized(tmp_path / "out")
        assert caught.value.code == "TT516"
        assert caught.value.what == f"{tmp_path / 'out'} is there already and not empty"
        (tmp_path / "other.partial").mkdir()
        (tmp_path / "other.partial" / "mine.txt").write_text("mine")
        with pytest.raises(FormatFault) as caught:
            one.save_quantized(tmp_path / "other")
        assert (
            caught.value.what
            == f"{tmp_path / 'other.partial'} is there already, and no save that can go on"
        )
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == held
    assert (tmp_path / "other.partial" / "mine.txt").read_text() == "mine"


def test_what_is_not_quantized_is_not_saved(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    with placed(base, "none", AWAY["half"]) as one, pytest.raises(FormatFault) as caught:
        one.save_quantized(tmp_path / "out")
    assert caught.value.code == "TT516"
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_changed_meanwhile(tmp_path: Path) -> None:
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    with placed(base, "nf4", AWAY["half"]) as one:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
        with pytest.raises(PlacementFault) as caught:
            one.save_quantized(tmp_path / "out")
        assert caught.value.code == "TT205"
    with pytest.raises(PlacementFault) as caught:
        one.save_quantized(tmp_path / "out")
    assert caught.value.code == "TT208"
    assert not (tmp_path / "out").exists()
