"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.errors import MemoryFault
from trimtab.memory import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6GiB", 6 * 2**30), ("6 gb", 6 * 10**9), ("0.5MiB", 2**19), ("512 B", 512), ("0", 0),
        ("1048576", 2**20), ("8589934592", 8 * 2**30), (8, 8), (None, None),
    ],
)  # fmt: skip
def test_a_size(text: Any, nbytes: int | None) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "6G", "6 potatoes", "GiB", -1, True, 1.5])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(MemoryFault, match="is not a size") as caught:
        parse_size(text)
    assert caught.value.code == "TT402"


@pytest.mark.parametrize(("text", "nbytes"), [("8", 8), (" 24 ", 24), ("1048575", 2**20 - 1)])
def test_a_number_whose_unit_was_forgotten(text: str, nbytes: int) -> None:
    with pytest.raises(MemoryFault, match=f"would be {nbytes} bytes") as caught:
        parse_size(text)
    assert caught.value.code == "TT402"
    assert "6GiB" in caught.value.fix


def test_what_is_shown_can_be_asked_for() -> None:
    for nbytes in (1, 1023, 1024, 2**20 + 1, 7 * 2**30 - 1):
        shown = format_size(nbytes, up=True)
        asked = parse_size(shown)
        assert asked is not None
        assert asked >= nbytes
