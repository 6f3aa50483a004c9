"""Headers of safetensors files, whole and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trimtab.headers import DamagedFile, Entry, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    tensors = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.zeros(4)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def rewritten(path: Path, header: object, rest: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return path


def test_entries_are_in_the_order_of_their_bytes(file: Path) -> None:
    entries, metadata = read_header(file)
    assert metadata == {"format": "pt"}
    assert {(one.name, one.stored, one.dtype, one.shape, one.nbytes) for one in entries} == {
        ("a", "F32", "float32", (4,), 16),
        ("b", "BF16", "bfloat16", (2, 3), 12),
    }
    assert entries[0].stop == entries[1].start
    assert entries[-1].stop == file.stat().st_size


def test_a_dtype_that_torch_has_not() -> None:
    assert Entry("x", "F4", (2,), 0, 1).dtype == "f4"


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_truncated_file(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DamagedFile):
        read_header(file)


def test_a_file_that_is_too_long(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(DamagedFile, match="promises 28 bytes of tensors, it holds 29"):
        read_header(file)


ODD: dict[str, object] = {
    "is not readable": b"{no json",
    "its header is not that of a safetensors file": [1, 2],
    "a has 8 bytes for the shape": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("said", ODD)
def test_a_header_that_is_none(file: Path, said: str) -> None:
    with pytest.raises(DamagedFile, match=said):
        read_header(rewritten(file, ODD[said], bytes(8)))


def test_entries_without_a_shape(file: Path) -> None:
    with pytest.raises(DamagedFile, match="not that of a safetensors file"):
        read_header(rewritten(file, {"a": {"dtype": "F32"}}))
