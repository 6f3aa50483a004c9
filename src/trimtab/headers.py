"""The header of a safetensors file, checked against the size of the file.

Eight bytes of length, a JSON object from tensor names to dtype, shape and offsets, then the bytes
(the format's own description, safetensors 0.3).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trimtab.formats.base import DTYPE_BYTES

DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""torch's names of safetensors' dtypes."""


class DamagedFile(ValueError):
    """The file is not what its header says, or has no header; the message says how."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: safetensors' name of its dtype, and where its bytes begin and end."""

    name: str
    stored: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        """torch's name of the dtype; safetensors' in small letters, where torch has none."""
        return DTYPES.get(self.stored, self.stored.lower())

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The tensors of a file in the order of their bytes, and the file's own metadata.

    Raises:
        DamagedFile: the file is truncated, longer than its header says, or no safetensors file.
    """
    header, base, size = _parse(path)
    try:
        metadata = header.pop("__metadata__", {})
        entries = [_entry(name, one, base) for name, one in header.items()]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise DamagedFile("its header is not that of a safetensors file") from problem
    for one in entries:
        width = DTYPE_BYTES.get(one.dtype)
        if one.start < base or (width and one.nbytes != math.prod(one.shape) * width):
            raise DamagedFile(f"{one.name} has {one.nbytes} bytes for the shape {one.shape}")
    end = max((one.stop for one in entries), default=base)
    if end != size:
        raise DamagedFile(
            f"its header promises {end - base} bytes of tensors, it holds {size - base}"
        )
    return sorted(entries, key=lambda one: (one.start, one.stop)), metadata


def _entry(name: str, one: Any, base: int) -> Entry:
    start, stop = one["data_offsets"]
    shape = tuple(int(size) for size in one["shape"])
    return Entry(name, str(one["dtype"]), shape, base + int(start), base + int(stop))


def _parse(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where it ends, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > size - 8:
            raise DamagedFile(f"it has {size} bytes, and its header alone should be longer")
        try:
            header = json.loads(file.read(length))
        except ValueError as problem:
            raise DamagedFile("its header is not readable") from problem
    if not isinstance(header, dict):
        raise DamagedFile("its header is not that of a safetensors file")
    return header, 8 + length, size
