"""`trimtab.cli.picture`: the plan as it is printed."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from trimtab.cli.picture import compressed, draw, share, strip, title
from trimtab.memory import Budget, KiB
from trimtab.plan import Forecast, PlacedUnit, Plan


def unit(name: str, mode: str = "resident", kind: str = "layer", why: str = "why") -> PlacedUnit:
    away = mode != "resident"
    return PlacedUnit(
        name=name,
        kind=kind,
        mode=mode,
        rests="disk" if away else "cpu",
        runs="cpu",
        moving=("w",) if away else (),
        moving_bytes=100 * KiB if away else 0,
        staying_bytes=0 if away else 100 * KiB,
        reason=why,
    )


PLAN = Plan(
    model="tiny",
    fingerprint="0",
    architecture="TinyForCausalLM",
    quant="nf4",
    dtype="bfloat16",
    budget=Budget(runs="cpu", gpu=0, cpu=600 * KiB, disk=1000 * KiB),
    context=128,
    batch=1,
    modalities=("text",),
    units=(
        unit("vision", "idle", "tower", "only prompts with image use it"),
        unit("embed", "looked up", "table", "read by row"),
        unit("layers.0", why="there is room"),
        unit("layers.1", "streamed", why="brought in"),
        unit("layers.2", why="there is room"),
        unit("layers.3", "streamed", why="brought in"),
        unit("", kind="rest", why="used all the time"),
    ),
    adapters=(),
    slots=1,
    slot_bytes=100 * KiB,
    costs={"kv_cache": 50 * KiB, "slots": 100 * KiB, "logits": 0},
    totals={"cpu": 450 * KiB, "disk": 400 * KiB},
    forecast=Forecast(12.345, "disk", 200 * KiB, "the disk at 1.0 GB/s (assumed)"),
    notes=("something",),
)

PICTURE = """\
tiny  TinyForCausalLM
nf4, bfloat16; context 128, batch 1, text

cpu    ███████████████████████===========············  450.00 KiB of 600.00 KiB
disk   ▓▓▓▓▓▓▓▓▓▒▒▒▒░░░░░····························  400.00 KiB of 1000.00 KiB
units  ░▒█▓█▓█                                         7, in running order
█ resident   ▓ streamed   ▒ looked up   ░ idle   = working memory   · free

            units          cpu          disk
resident        3   300.00 KiB
streamed        2                 200.00 KiB
looked up       1                 100.00 KiB
idle            1                 100.00 KiB
kv cache             50.00 KiB
slots               100.00 KiB
total           7   450.00 KiB    400.00 KiB
budget              600.00 KiB   1000.00 KiB

█ resident
  layers.{0,2}: there is room
  norms, scalars and buffers: used all the time

▓ streamed
  layers.{1,3}: brought in

▒ looked up
  embed: read by row

░ idle
  vision: only prompts with image use it

about 12.3 tokens/s at batch 1, bound by the disk at 1.0 GB/s (assumed)
200.00 KiB brought in for a token
note: something
"""


def drawn(encoding: str, width: int = 80, plan: Plan = PLAN) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    draw(plan, Console(file=file, width=width, highlight=False, markup=False))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_picture() -> None:
    assert drawn("utf-8") == PICTURE


def test_without_block_characters() -> None:
    pairs = dict(zip("█▓▒░·", "#>:-.", strict=True))
    assert drawn("ascii") == PICTURE.translate(str.maketrans(pairs))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn("utf-8", width).splitlines()
    assert max(map(len, lines)) <= max(width, 45)


def test_many_units_are_all_drawn() -> None:
    layers = tuple(unit(f"layers.{at}", ("resident", "streamed")[at % 2]) for at in range(200))
    said = drawn("utf-8", plan=dataclasses.replace(PLAN, units=layers))
    rows = said.partition("\nunits")[2].partition("\n█ resident")[0]
    assert re.sub("[^█▓]", "", rows) == "█▓" * 100
    names = re.sub(r"\s", "", said.partition("▓ streamed\n")[2])
    assert f"{{{','.join(str(at) for at in range(1, 200, 2))}}}" in names


@pytest.mark.parametrize(
    ("amounts", "lengths"),
    [
        ([1, 1], [5, 5]),
        ([0, 1000], [0, 10]),
        ([1, 10**12, 1], [1, 8, 1]),
        ([0, 0], [0, 0]),
        ([1] * 4, [2, 2, 3, 3]),
    ],
)
def test_share(amounts: list[int], lengths: list[int]) -> None:
    found = share(amounts, 10)
    assert sorted(found) == sorted(lengths)
    assert [bool(one) for one in found] == [bool(one) for one in amounts]


def test_more_than_the_budget_fills_the_strip() -> None:
    plan = dataclasses.replace(PLAN, budget=Budget(runs="cpu", gpu=0, cpu=1, disk=1))
    assert strip(plan, "cpu", 20, plain=True).plain == "#" * 13 + "=" * 7


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.b"], "a.b"),
        (["m.layers.0"], "m.layers.0"),
        (["m.layers.0", "m.layers.1", "m.layers.2", "m.layers.7"], "m.layers.{0-2,7}"),
        (["m.0.x", "m.1.x", "head"], "m.{0-1}.x, head"),
    ],
)
def test_compressed(names: list[str], said: str) -> None:
    assert compressed(names) == said


def test_a_long_path_is_named_by_its_end() -> None:
    long = dataclasses.replace(PLAN, model="/somewhere/" + "deep/" * 10 + "llama/")
    assert title(long) == "llama  TinyForCausalLM"
