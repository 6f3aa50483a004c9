"""The README's tables are what benchmarks/results have."""

from __future__ import annotations

import pytest

import make_benchmark_tables as tables  # of scripts/


def test_the_readme_is_up_to_date() -> None:
    text = tables.README.read_text(encoding="utf-8")
    assert text == tables.render(text), "run python scripts/make_benchmark_tables.py"


def test_a_way_that_failed_is_in_the_table_with_its_reason() -> None:
    ways = {
        "one": {"tokens_per_second": 13.604, "peak": 2**30, "prefill_s": 0.126, "load_s": 7.95},
        "other": {"failed": "not done in 150 s"},
    }
    assert tables.peers({"ways": ways})[1:] == [
        ["one", "13.6", "1.00 GiB", "0.13 s", "8.0 s"],
        ["other", "not done in 150 s", "", "", ""],
    ]


def test_tokens_that_differ_are_not_hidden() -> None:
    one = {
        "eager": {"per_second": 20.0},
        "captured": {"per_second": 253.6},
        "without adapter": 259.6,
        "share": 1.0,
        "equal": False,
    }
    assert tables.decode({"shares": ["resident"], "resident": one})[1] == [
        "none", "20.0", "254", "260", "1.000", "DIFFER",
    ]  # fmt: skip
    one |= {"equal": True, "modes": {"streamed": 14}}
    assert tables.decode({"shares": ["4GiB"], "4GiB": one})[1] == [
        "14, for 4 GiB in all", "20.0", "254", "260", "1.000", "equal to resident",
    ]  # fmt: skip


def test_a_readme_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="no place for the table peers"):
        tables.render("# nothing here")
