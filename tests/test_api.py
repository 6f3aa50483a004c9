"""`trimtab.plan`: facts in, a plan out, nothing loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
import trimtab
from trimtab.errors import AdapterFault, FormatFault, MemoryFault
from trimtab.hardware import Gpu, Hardware
from trimtab.memory import GiB

CARD = Hardware((Gpu("a card", 8 * GiB, 7 * GiB),), 32 * GiB, 16 * GiB, 99 * GiB, 12.0, 300.0)
BARE = Hardware((), 32 * GiB, 16 * GiB, 99 * GiB)


def test_a_plan_of_a_folder() -> None:
    folder = tiny.checkpoint("llama")
    made = trimtab.plan(folder, quant="nf4-dq", gpu="1GiB", cpu="2GB", context=64, hardware=CARD)
    assert (made.model, made.architecture) == (str(folder), "LlamaForCausalLM")
    assert (made.quant, made.dtype, made.runs) == ("nf4-dq", "bfloat16", "gpu:0")
    assert (made.budget.gpu, made.budget.cpu, made.budget.disk) == (GiB, 2 * 10**9, 0)
    assert len(made.fingerprint) == 16


def test_a_config_is_enough(tmp_path: Path) -> None:
    folder = tiny.checkpoint("llama")
    shutil.copy(folder / "config.json", tmp_path)
    alone = trimtab.plan(tmp_path, hardware=BARE, context=64)
    whole = trimtab.plan(folder, hardware=BARE, context=64)
    assert alone.units == whole.units
    assert alone.fingerprint != whole.fingerprint


def test_adapters_are_counted_in_the_dtype_peft_gives_them() -> None:
    folder = tiny.checkpoint("llama")
    adapter = tiny.adapter(folder)
    made = trimtab.plan(folder, {"a": adapter}, hardware=BARE, context=64)
    (counted,) = made.adapters
    assert (counted.name, counted.source, counted.modules) == ("a", str(adapter), 6 * 7)
    assert made.costs["adapters"] == counted.nbytes > 0


def test_an_adapter_that_does_not_fit_is_said() -> None:
    folder = tiny.checkpoint("llama")
    right, wrong = tiny.adapter(folder), tiny.adapter(tiny.checkpoint("gemma4"))
    made = trimtab.plan(folder, {"a": right, "b": wrong}, hardware=BARE, context=64)
    (note,) = made.notes
    assert note.startswith("the adapter b does not fit as it is: ")
    with pytest.raises(AdapterFault) as caught:
        trimtab.load(made)
    assert note.endswith(f"{caught.value.what} [{caught.value.code}]")
    assert len(made.adapters) == 2


@pytest.mark.parametrize(
    ("options", "kind", "code"),
    [
        ({"gpu": "6 potatoes"}, MemoryFault, "TT402"),
        ({"quant": "q4_0"}, FormatFault, "TT509"),
        ({"adapters": {"a": "./nothing"}}, AdapterFault, "TT301"),
        ({"cpu": "1KiB"}, MemoryFault, "TT401"),
    ],
)
def test_bad_input(options: dict[str, object], kind: type[Exception], code: str) -> None:
    with pytest.raises(kind) as caught:
        trimtab.plan(tiny.checkpoint("llama"), hardware=BARE, **options)  # type: ignore[arg-type]
    assert getattr(caught.value, "code") == code  # noqa: B009


def test_the_planner_needs_no_torch() -> None:
    """It is pure: `plan` and `check` may be shown without a device and its libraries."""
    code = "import sys, trimtab.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
