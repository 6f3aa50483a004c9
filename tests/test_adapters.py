"""Adapter headers: what is read, what is counted, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import adapter, checkpoint
from trimtab.adapters import adapter_bytes, load_tensors, read_adapter
from trimtab.errors import AdapterFault


def made(tmp_path: Path, kind: str = "lora", **options: Any) -> Path:
    """A copy of an adapter of the tiny Llama, to be changed."""
    return Path(
        shutil.copytree(adapter(checkpoint("llama"), kind, **options), tmp_path / "adapter")
    )


def refused(source: str | Path, code: str) -> AdapterFault:
    with pytest.raises(AdapterFault) as caught:
        read_adapter(source)
    assert caught.value.code == code
    return caught.value


def test_a_header_has_the_config_and_every_tensor(tmp_path: Path) -> None:
    folder = made(tmp_path)
    header = read_adapter(str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    assert header.source == str(folder)
    assert header.peft_type == "LORA"
    assert header.base_name == str(checkpoint("llama"))
    assert header.ranks == (8,)
    assert header.init_weights is True
    assert not header.use_dora
    assert header.modules_to_save == ()
    assert header.base_tensors == ()
    assert {key: one.shape for key, one in header.tensors.items()} == {
        key: tuple(one.shape) for key, one in weights.items()
    }
    assert len(header.weights) == 84
    assert load_tensors(header).keys() == weights.keys()


def test_importing_it_does_not_import_torch() -> None:
    code = "import trimtab.adapters, trimtab.fit, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_are_those_of_32_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = made(tmp_path)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({key: one.to(dtype) for key, one in weights.items()}, file)
    assert adapter_bytes(read_adapter(folder)) == 4 * sum(one.numel() for one in weights.values())


@pytest.mark.filterwarnings(
    "ignore:Model has:UserWarning"
)  # peft 0.18, of a model that ties nothing
def test_whole_modules_keep_their_dtype_and_base_tensors_add_nothing(tmp_path: Path) -> None:
    folder = made(tmp_path, modules_to_save=["lm_head"])
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    head = "base_model.model.lm_head.weight"
    lora = 4 * sum(one.numel() for key, one in weights.items() if key != head)
    weights[head] = weights[head].to(torch.bfloat16)
    weights["base_model.model.model.embed_tokens.base_layer.weight"] = torch.zeros(256, 128)
    save_file(weights, file)
    header = read_adapter(folder)
    assert header.saved_keys == (head,)
    assert header.base_tensors == ("base_model.model.model.embed_tokens.base_layer.weight",)
    assert adapter_bytes(header) == lora + 2 * weights[head].numel()


def test_a_pickle_of_weights_is_read(tmp_path: Path) -> None:
    folder = made(tmp_path)
    before = read_adapter(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(weights, folder / "adapter_model.bin")
    header = read_adapter(folder)
    assert header.tensors == before.tensors
    assert all(torch.equal(one, weights[key]) for key, one in load_tensors(header).items())


class Harmful:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Harmful, "ran", True)


@pytest.mark.parametrize(
    "write", [torch.save, lambda one, file: file.write_bytes(pickle.dumps(one))]
)
def test_a_pickle_that_is_not_weights_runs_nothing(tmp_path: Path, write: Any) -> None:
    folder = made(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    write({"weight": Harmful()}, folder / "adapter_model.bin")
    refused(folder, "TT302")
    assert not Harmful.ran


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1, 2])])
def test_a_damaged_pickle(tmp_path: Path, content: bytes) -> None:
    folder = made(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(content)
    refused(folder, "TT302")


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    file = made(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refused(file.parent, "TT302").what


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32"}},
        {"a": 3},
        [1],
    ],
)
def test_a_header_that_does_not_add_up(tmp_path: Path, header: Any) -> None:
    file = made(tmp_path) / "adapter_model.safetensors"
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    refused(file.parent, "TT302")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"peft_type": 3}'])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    folder = made(tmp_path)
    (folder / "adapter_config.json").write_text(text)
    refused(folder, "TT302")


def test_no_adapter_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "TT301")
    refused("./nowhere", "TT301")
    refused("a/b/c", "TT301")
    refused(tmp_path, "TT301")
    refused("nobody/not-cached", "TT301")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    assert "no weights" in refused(folder, "TT301").what


def test_a_file_without_tensors(tmp_path: Path) -> None:
    folder = made(tmp_path)
    save_file({}, folder / "adapter_model.safetensors")
    refused(folder, "TT301")
