"""Safetensors files copied with some of their tensors replaced, a tensor at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from trimtab.headers import Entry, read_header

_CHUNK: Final = 8 << 20
_ALIGN: Final = 8
"""What safetensors pads its header to."""


def read_tensor(path: Path, entry: Entry) -> torch.Tensor:
    """A private copy of one tensor, in memory of exactly its size."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    tensor = torch.empty(math.prod(entry.shape), dtype=dtype)
    if tensor.numel():
        with path.open("rb") as file:
            file.seek(entry.start)
            file.readinto(_bytes_of(tensor))
    return tensor.reshape(entry.shape)


def write_copy(
    source: Path,
    target: Path,
    replaced: Callable[[str], torch.Tensor | None],
    added: Mapping[str, tuple[str, Callable[[], torch.Tensor]]],
) -> int:
    """Copies a file; returns the bytes of its tensors.

    A tensor is replaced by what `replaced` gives for its name, of the same dtype and shape; None:
    its bytes are copied. `added` maps the name of a further tensor to the name of one of this file
    that it is like, and to what makes it. `target` is there when it is whole, not before.
    """
    entries, metadata = read_header(source)
    like = {one.name: one for one in entries}
    sizes = [(one.name, one) for one in entries] + [
        (name, like[of]) for name, (of, _) in added.items()
    ]
    with _finished(target) as out:
        total = _write_header(out, sizes, metadata)
        with source.open("rb") as file:
            for one in entries:
                tensor = replaced(one.name)
                if tensor is None:
                    _copy(file, out, one)
                else:
                    _write(out, tensor, one)
        for of, make in added.values():
            _write(out, make(), like[of])
    return total


def _write_header(
    out: IO[bytes], sizes: list[tuple[str, Entry]], metadata: Mapping[str, str]
) -> int:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, one in sizes:
        end = at + one.stop - one.start
        header[name] = {"dtype": one.stored, "shape": list(one.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    out.write(struct.pack("<Q", len(text)) + text)
    return at


def _copy(file: IO[bytes], out: IO[bytes], entry: Entry) -> None:
    file.seek(entry.start)
    left = entry.stop - entry.start
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise OSError(f"{entry.name} ends too early")
        out.write(chunk)
        left -= len(chunk)


def _write(out: IO[bytes], tensor: torch.Tensor, entry: Entry) -> None:
    wanted = getattr(torch, entry.dtype)
    assert (tensor.dtype, tuple(tensor.shape)) == (wanted, entry.shape), entry.name
    if tensor.numel():
        out.write(_bytes_of(tensor.detach().contiguous()))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    found: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(found)


@contextlib.contextmanager
def _finished(target: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is written to the end and safe on the disk."""
    growing = target.with_name(target.name + ".growing")
    try:
        with growing.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        growing.replace(target)
    finally:
        growing.unlink(missing_ok=True)
