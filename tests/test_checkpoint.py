from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from trimtab.checkpoint import TensorSpec, open_checkpoint
from trimtab.errors import EnvironmentFault, FormatFault, TrimtabError

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


def folder_with(path: Path, tensors: dict[str, torch.Tensor] | None = None, **more: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def fault(source: str | Path, kind: type[TrimtabError] = FormatFault) -> TrimtabError:
    with pytest.raises(kind) as caught:
        open_checkpoint(source)
    return caught.value


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_say_what_the_files_hold(shards: int) -> None:
    folder = tiny.checkpoint("llama", shards=shards)
    found = open_checkpoint(folder)
    held = {
        name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()
    }
    assert found.folder == folder
    assert {name: (one.dtype, one.shape, one.nbytes) for name, one in found.tensors.items()} == {
        name: (str(one.dtype)[6:], tuple(one.shape), one.nbytes) for name, one in held.items()
    }


def test_the_fingerprint_depends_on_the_model_and_not_on_its_place(tmp_path: Path) -> None:
    whole = open_checkpoint(tiny.checkpoint("llama"))
    assert open_checkpoint(tiny.checkpoint("llama", shards=3)).fingerprint == whole.fingerprint
    assert open_checkpoint(tiny.checkpoint("qwen3")).fingerprint != whole.fingerprint
    assert len(whole.fingerprint) == 16
    one = folder_with(tmp_path, {"a": torch.zeros(2, 2)})
    first = open_checkpoint(one).fingerprint
    assert open_checkpoint(folder_with(one, {"a": torch.zeros(2, 3)})).fingerprint != first
    assert open_checkpoint(folder_with(one, {"a": torch.ones(2, 2)})).fingerprint == first
    assert open_checkpoint(folder_with(one, rope_theta=5.0)).fingerprint != first
    assert open_checkpoint(folder_with(one, transformers_version="9")).fingerprint == first


def test_a_config_alone_is_enough_to_plan(tmp_path: Path) -> None:
    folder_with(tmp_path, quantization_config={"quant_method": "gptq"})
    found = open_checkpoint(tmp_path, need_weights=False)
    assert found.tensors == {}
    assert found.quantization == {"quant_method": "gptq"}
    assert fault(tmp_path).code == "TT503"


@pytest.mark.parametrize(
    "name",
    ["./nothing/here", "/nothing/here", "~/nothing", "a/b/c", "nothing-of-that-name", "me/nothing"],
)
def test_no_such_model(name: str) -> None:
    problem = fault(name, EnvironmentFault)
    assert problem.code == "TT105"
    assert name in problem.what


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert fault(tmp_path / "model.gguf", EnvironmentFault).code == "TT105"


def test_no_config(tmp_path: Path) -> None:
    problem = fault(tmp_path)
    assert (problem.code, problem.what) == ("TT501", f"{tmp_path} has no config.json")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert fault(tmp_path).code == "TT502"


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    file = folder_with(tmp_path, {"a": torch.zeros(64, 64)}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    problem = fault(tmp_path)
    assert problem.code == "TT502"
    assert str(file) in problem.what


def test_a_file_with_more_than_its_header_says(tmp_path: Path) -> None:
    file = folder_with(tmp_path, {"a": torch.zeros(2)}) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"0")
    assert fault(tmp_path).what == (
        f"{file} is truncated or damaged: its header promises 8 bytes of tensors, it holds 9"
    )


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama", shards=3), tmp_path)
    lost = sorted(folder.glob("*.safetensors"))[1]
    inside = len(load_file(lost))
    total = len(open_checkpoint(folder).tensors)
    lost.unlink()
    problem = fault(folder)
    assert problem.code == "TT503"
    assert problem.what == (
        f"the shard {lost.name} of {folder} is missing: {inside} of {total} tensors are in it"
    )


def test_an_index_that_names_what_no_file_holds(tmp_path: Path) -> None:
    folder = tiny.writable(tiny.checkpoint("llama", shards=3), tmp_path)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shard = next(iter(data["weight_map"].values()))
    data["weight_map"] |= dict.fromkeys(("x.weight", "y.weight"), shard)
    index.write_text(json.dumps(data))
    problem = fault(folder)
    assert (problem.code, problem.parts["tensors"]) == ("TT504", ["x.weight", "y.weight"])


def test_a_checkpoint_that_was_rewritten_in_place(tmp_path: Path) -> None:
    folder_with(tmp_path, {"base_model.model.lm_head.weight": torch.zeros(2), "b": torch.ones(2)})
    problem = fault(tmp_path)
    assert problem.code == "TT507"
    assert problem.parts["tensors"] == ["base_model.model.lm_head.weight"]


def test_a_pickle_is_read_as_weights_only(tmp_path: Path) -> None:
    folder_with(tmp_path)
    torch.save({"a": torch.zeros(2, 3, dtype=torch.float16)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).tensors == {
        "a": TensorSpec("a", "float16", (2, 3), 12, "pytorch_model.bin")
    }


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("content", [b"no pickle", pickle.dumps({"a": Evil()})])
def test_a_pickle_of_more_than_weights_is_refused(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder_with(tmp_path) / "pytorch_model.bin").write_bytes(content)
    assert fault(tmp_path).code == "TT502"
    assert not (tmp_path / "ran").exists()


def test_a_model_on_the_hub_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint is that of the same files in a folder."""
    local = folder_with(tmp_path, {"a": torch.zeros(2, 2, dtype=torch.bfloat16)})
    cached = tmp_path / "cache"
    cached.mkdir()
    folder_with(cached)
    info = huggingface_hub.utils.TensorInfo("BF16", [2, 2], (0, 8))
    file = huggingface_hub.utils.SafetensorsFileMetadata({}, {"a": info})
    repo = huggingface_hub.utils.SafetensorsRepoMetadata(
        None, False, {"a": "model.safetensors"}, {"model.safetensors": file}
    )
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file: str(cached / "config.json")
    )
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name: repo)
    found = open_checkpoint("me/model")
    assert found.folder is None
    assert found.tensors == open_checkpoint(local).tensors
    assert found.fingerprint == open_checkpoint(local).fingerprint
    save_file({"a": torch.zeros(2, 2, dtype=torch.bfloat16)}, cached / "model.safetensors")
    assert open_checkpoint("me/model").folder == cached
