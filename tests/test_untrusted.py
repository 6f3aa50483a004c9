"""Adapters of strangers: their weights are read as weights, and their configs run nothing."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kinds import known_kinds
from tiny import adapter, checkpoint, inputs, logits, reference, rewrite, writable
from trimtab.adapters import read_adapter
from trimtab.apply import load_onto
from trimtab.errors import AdapterFault

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of odd configs


class Harmful:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that could be imported, and is not."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "harmful_core.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield "harmful_core"
    assert "harmful_core" not in sys.modules


def hostile(tmp_path: Path, kind: str = "lora", base: dict[str, Any] | None = None, **config: Any):  # type: ignore[no-untyped-def]
    """An adapter folder whose config was changed, and the valid one."""
    plain = adapter(checkpoint("llama"), kind, **(base or {}))
    folder = writable(plain, tmp_path)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder, plain


def refused(code: str, folder: Path) -> AdapterFault:
    with pytest.raises(AdapterFault) as caught:
        load_onto(reference(checkpoint("llama")), read_adapter(folder))
    assert caught.value.code == code
    return caught.value


def equal(folder: Path, plain: Path, **extra: Any) -> tuple[str, ...]:
    given = {**inputs(checkpoint("llama")), **extra}
    model, applied = load_onto(reference(checkpoint("llama")), read_adapter(folder))
    expected = logits(reference(checkpoint("llama"), adapters=plain), given)
    assert torch.equal(logits(model, given), expected)
    return applied.notes


def test_a_module_that_the_config_names_is_not_imported(tmp_path: Path, module: str) -> None:
    folder, plain = hostile(tmp_path, megatron_config={"a": 1}, megatron_core=module)
    (note,) = equal(folder, plain)
    assert note.startswith("megatron_config of ")
    assert "is not followed" in note


def test_a_class_that_the_config_names_is_not_imported(tmp_path: Path, module: str) -> None:
    mapping = {"base_model_class": "Model", "parent_library": module}
    assert equal(*hostile(tmp_path, auto_mapping=mapping)) == ()


@pytest.mark.parametrize("name", ["state.bin", "state.safetensors"])
def test_a_file_that_the_config_names_is_not_read(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / name
    elsewhere.write_bytes(pickle.dumps(Harmful()))
    folder, plain = hostile(
        tmp_path,
        "MultitaskPromptTuning",
        {"num_virtual_tokens": 4},
        prompt_tuning_init="EXACT_SOURCE_TASK",
        prompt_tuning_init_state_dict_path=str(elsewhere),
    )
    (note,) = equal(folder, plain, task_ids=torch.tensor([0, 0]))
    assert str(elsewhere) in note
    assert not Harmful.ran


def test_a_tokenizer_that_the_config_names_is_not_loaded(tmp_path: Path) -> None:
    folder, plain = hostile(
        tmp_path,
        "PromptTuning",
        {"num_virtual_tokens": 4},
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text="x",
        tokenizer_name_or_path=str(tmp_path / "tokenizer"),
        tokenizer_kwargs={"trust_remote_code": True},
    )
    assert equal(folder, plain) == ()


def test_settings_for_the_run_are_not_the_authors(tmp_path: Path) -> None:
    assert equal(*hostile(tmp_path, runtime_config={"ephemeral_gpu_offload": True})) == ()


@pytest.mark.parametrize("kind", ["XLORA", "SHADOW", "POLY"])
def test_adapters_and_models_that_the_config_names_are_not_loaded(
    tmp_path: Path, kind: str
) -> None:
    where = str(tmp_path / "elsewhere")
    folder, _ = hostile(tmp_path, peft_type=kind, adapters={"0": where}, shadow_model=where)
    refused("TT314" if kind in known_kinds() else "TT307", folder)


def test_statistics_that_the_config_names_are_not_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "cache.pt"
    elsewhere.write_bytes(pickle.dumps(Harmful()))
    config = {"cache_file": str(elsewhere), "covariance_file": str(elsewhere)}
    refused("TT308", hostile(tmp_path, init_lora_weights="corda", corda_config=config)[0])
    assert not Harmful.ran


def test_weights_beside_a_pickle_are_read_alone(tmp_path: Path) -> None:
    folder, plain = hostile(tmp_path)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"weight": Harmful()}))
    (folder / "training_args.bin").write_bytes(pickle.dumps(Harmful()))
    assert equal(folder, plain) == ()
    assert not Harmful.ran


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_a_pattern_that_never_ends(tmp_path: Path, field: str) -> None:
    fault = refused("TT302", hostile(tmp_path, **{field: r"(.*\w+)*\.+!"})[0])
    assert "could take forever" in fault.why


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_a_config_without_a_bottom(tmp_path: Path, opened: str) -> None:
    folder, _ = hostile(tmp_path)
    (folder / "adapter_config.json").write_text(opened * 200_000)
    refused("TT302", folder)


@pytest.mark.parametrize(
    ("kind", "base", "field"),
    [
        ("LoHa", {}, "r"),
        ("HRA", {}, "r"),
        ("PromptTuning", {"num_virtual_tokens": 4}, "num_virtual_tokens"),
        ("FourierFT", {"n_frequency": 20}, "n_frequency"),
    ],
)
def test_a_size_that_would_fill_the_memory(
    tmp_path: Path, kind: str, base: dict[str, Any], field: str
) -> None:
    fault = refused("TT312", hostile(tmp_path, kind, base, **{field: 10**12})[0])
    assert f"{field}={10**12}" in fault.what


def test_a_rank_that_would_fill_the_memory(tmp_path: Path) -> None:
    folder, _ = hostile(tmp_path, rank_pattern={"q_proj": 10**12})
    assert "q_proj=1000000000000" in refused("TT312", folder).what


def test_a_key_is_not_a_path(tmp_path: Path) -> None:
    folder, _ = hostile(tmp_path)
    path = "base_model.model.../../../etc/passwd.lora_A.weight"
    rewrite(folder, lambda tensors: tensors.update({path: torch.ones(8, 128)}))
    refused("TT303", folder)


@pytest.mark.parametrize("kind", ["Vera", "LoHa", "HRA", "OFT"])
def test_a_config_by_which_peft_divides_by_zero(tmp_path: Path, kind: str) -> None:
    folder, _ = hostile(tmp_path, kind, r=0, oft_block_size=0)
    header = read_adapter(folder)
    config = {key: one for key, one in header.config.items() if kind == "OFT" or "oft" not in key}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    refused("TT315", folder)
