"""Safetensors files are copied with some of their tensors replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trimtab.headers import read_header
from trimtab.shards import read_tensor, write_copy

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
}
METADATA = {"format": "pt"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.safetensors"
    save_file(TENSORS, file, metadata=METADATA)
    return file


def nothing(name: str) -> None:
    return None


def same(file: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(file)
    assert set(found) == set(wanted)
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name], one)


def test_a_tensor_is_read_into_memory_of_its_own(source: Path) -> None:
    for entry in read_header(source)[0]:
        one = read_tensor(source, entry)
        assert one.dtype == TENSORS[entry.name].dtype
        assert torch.equal(one, TENSORS[entry.name])
        assert one.untyped_storage().nbytes() == entry.stop - entry.start


def test_a_copy_has_the_bytes_and_the_metadata(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    assert write_copy(source, target, nothing, {}) == 6 * 2 + 4 + 4
    same(target, TENSORS)
    with safe_open(target, "pt") as opened:
        assert opened.metadata() == METADATA
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "source.safetensors",
        "target.safetensors",
    ]


def test_tensors_are_replaced_and_added(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    fresh = torch.ones(3, 2, dtype=torch.bfloat16).T  # not contiguous
    total = write_copy(
        source,
        target,
        lambda name: fresh if name == "a" else None,
        {"c": ("b", lambda: TENSORS["b"] + 1)},
    )
    assert total == 6 * 2 + 2 * 4 + 4
    same(target, {**TENSORS, "a": fresh, "c": TENSORS["b"] + 1})


@pytest.mark.parametrize(
    "wrong", [lambda: torch.ones(2, 3), lambda: torch.ones(3, 2, dtype=torch.bfloat16)]
)
def test_another_dtype_or_shape_leaves_no_file(
    source: Path, tmp_path: Path, wrong: Callable[[], torch.Tensor]
) -> None:
    target = tmp_path / "target.safetensors"
    with pytest.raises(AssertionError, match="a"):
        write_copy(source, target, lambda name: wrong() if name == "a" else None, {})
    assert [one.name for one in tmp_path.iterdir()] == ["source.safetensors"]


def test_an_interrupt_leaves_the_old_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.safetensors"
    save_file({"old": torch.ones(1)}, target)

    def interrupt(name: str) -> None:
        if name == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_copy(source, target, interrupt, {})
    same(target, {"old": torch.ones(1)})


def test_a_source_that_was_cut_short(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()

    def cut(name: str) -> None:
        source.write_bytes(whole[:-3])

    with pytest.raises(OSError, match="ends too early"):
        write_copy(source, tmp_path / "target.safetensors", cut, {})
    assert [one.name for one in tmp_path.iterdir()] == ["source.safetensors"]


def test_a_tensor_is_read_into_host_memory_whatever_the_default_device(source: Path) -> None:
    (entry, *_), _ = read_header(source)
    expected = read_tensor(source, entry)
    with torch.device("meta"):
        assert torch.equal(read_tensor(source, entry), expected)
