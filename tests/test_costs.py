from __future__ import annotations

import pytest

from trimtab import costs
from trimtab.outline import CacheLayer, Outline
from trimtab.plan import Unit, WeightSpec


def outline(
    *weights: WeightSpec, cache: tuple[CacheLayer, ...] = (), kind: str = "layer"
) -> Outline:
    units = (Unit("a", kind, weights), Unit("", "rest", ()))
    nothing: frozenset[str] = frozenset()
    return Outline("A", units, (), cache, 1000, 64, "bfloat16", "none", nothing, nothing)


def test_kv_cache() -> None:
    layers = (
        CacheLayer(2, 16, None, False),
        CacheLayer(1, 32, 100, False),
        CacheLayer(1, 32, 100, True),
    )
    whole, sliding = 2 * 2 * 16 * 2, 2 * 1 * 32 * 2
    assert costs.kv_cache(outline(cache=layers), 50, 1) == 50 * (whole + sliding)
    assert costs.kv_cache(outline(cache=layers), 1000, 3) == 3 * (1000 * whole + 100 * sliding)


def test_logits() -> None:
    assert costs.logits(outline(), 3) == 3 * 1000 * (4 + 2)


def test_activations() -> None:
    layer = outline(WeightSpec("a.w", (256, 64), "bfloat16"))
    assert costs.activations(layer, 10, 2) == 2 * (10 * (64 * 20 + 3 * 256 * 2) + 100)
    table = outline(WeightSpec("a.w", (1000, 512), "bfloat16"), kind="table")
    assert costs.activations(table, 10, 1) == 10 * (64 * 20 + 3 * (64 + 512) * 2) + 100


@pytest.mark.parametrize(
    ("storage", "runs", "nbytes"),
    [
        ("plain", "gpu:0", 0),
        ("nf4", "gpu:0", 128 * 64 * 2),
        ("nf4-dq", "cpu", 128 * 64 * 2 + 128 * 64 // 16),
        ("int8", "gpu:0", 128 * 64 * 2),
        ("int8", "cpu", 128 * 64 * 10),
    ],
)
def test_decoding(storage: str, runs: str, nbytes: int) -> None:
    small = WeightSpec("a", (64, 64), "bfloat16", storage)
    large = WeightSpec("b", (128, 64), "bfloat16", storage)
    assert costs.decoding([small, large], runs) == nbytes


def test_loading() -> None:
    matrix = WeightSpec("a", (100, 64), "bfloat16", "nf4")
    table = WeightSpec("t", (1000, 64), "bfloat16")
    experts = WeightSpec("b", (4, 100, 16), "bfloat16")
    eight = WeightSpec("e", (100, 64), "bfloat16", "int8")
    assert costs.loading([matrix], resident=True) == 100 * 64 * 2 * 7 // 5
    assert costs.loading([matrix], resident=False) == 100 * 64 * 2 * 7 // 5
    assert costs.loading([eight], resident=False) == 100 * 64 * 5
    assert costs.loading([table], resident=True) == 0
    assert costs.loading([table], resident=False) == 1000 * 64 * 2
    assert costs.loading([experts], resident=True) == 4 * 100 * 16 * 2 * 3 // 2
    assert costs.loading([matrix, experts], resident=False) == 4 * 100 * 16 * 2 * 5 // 2
    assert costs.loading([], resident=True) == 0
