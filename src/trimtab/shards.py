"""Safetensors files written a tensor at a time: new ones, and copies with some replaced."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch

from trimtab.headers import DTYPES, Entry, read_header

_CHUNK: Final = 8 << 20
_ALIGN: Final = 8
"""What safetensors pads its header to."""
_STORED: Final = {torch_name: stored for stored, torch_name in DTYPES.items()}


def read_tensor(path: Path, entry: Entry) -> torch.Tensor:
    """A private copy of one tensor, in memory of exactly its size."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    tensor = torch.empty(math.prod(entry.shape), dtype=dtype, device="cpu")
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


def entry_of(name: str, like: torch.Tensor) -> Entry:
    """The entry of a tensor in a file to be; where it lies there is not known yet."""
    stored = _STORED[str(like.dtype).removeprefix("torch.")]
    return Entry(name, stored, tuple(like.shape), 0, like.numel() * like.element_size())


def write_file(
    target: Path, entries: Iterable[Entry], tensors: Iterator[tuple[str, torch.Tensor]]
) -> int:
    """Writes a file of those entries; returns the bytes of its tensors.

    `tensors` come in the order of `entries`, on any device; only the one that is being written is
    held. `target` is there when it is whole, not before.
    """
    sizes = [(one.name, one) for one in entries]
    with _finished(target) as out:
        total = _write_header(out, sizes, {"format": "pt"})
        for wanted, entry in sizes:
            name, tensor = next(tensors)
            assert name == wanted, (name, wanted)
            _write(out, tensor, entry)
            del tensor  # else it is held while the next one is read
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
        # A part at a time: what is on a GPU has no whole copy in host memory.
        for part in tensor.detach().contiguous().reshape(-1).split(_CHUNK):
            out.write(_bytes_of(part.cpu()))


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
