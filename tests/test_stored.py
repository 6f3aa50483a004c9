"""Checkpoints that are stored quantized, by others, or whose config is not true of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from placing import AWAY, placed, planned
from trimtab.api import plan
from trimtab.diagnosis.check import check
from trimtab.errors import DoesNotFit, FormatFault

# transformers says of a quantized model which of its settings a config has, too.
pytestmark = pytest.mark.filterwarnings("ignore")


def stored(tmp_path: Path, quant: str, **said: Any) -> Path:
    """A llama as transformers stores it, with other words in its quantization_config."""
    out = tmp_path / "stored"
    tiny.reference(tiny.checkpoint("llama"), quant).save_pretrained(out)
    tell(out, **said)
    return out


def tell(folder: Path, **said: Any) -> None:
    configure(folder, lambda config: config["quantization_config"].update(said))


def configure(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("quant", "said", "found"),
    [
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "planned as fp4 and is stored as nf4, in blocks"),
        ("nf4", {"bnb_4bit_use_double_quant": True}, "planned as nf4-dq and is stored as nf4, in"),
        ("fp4-dq", {"bnb_4bit_use_double_quant": False}, "planned as fp4 and is stored as fp4-dq,"),
    ],
)
def test_a_config_that_is_not_true_of_its_weights_is_found(
    quant: str, said: dict[str, Any], found: str, tmp_path: Path
) -> None:
    out = stored(tmp_path, quant, **said)
    with pytest.raises(FormatFault, match=found) as caught:
        placed(out, "auto", AWAY["all"])
    assert caught.value.code == "TT508"
    true = {"bnb_4bit_quant_type": quant[:3], "bnb_4bit_use_double_quant": quant.endswith("dq")}
    tell(out, **true)  # as the error says
    with placed(out, "auto", AWAY["all"]) as one:
        wanted = tiny.logits(tiny.reference(out), tiny.inputs(out))
        assert torch.equal(tiny.logits(one.model, tiny.inputs(out)), wanted)


@pytest.mark.parametrize(
    ("quant", "part"), [("nf4", "absmax"), ("nf4-dq", "quant_map"), ("int8", "SCB")]
)
def test_a_weight_that_lacks_a_part_is_named(quant: str, part: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj." + ("SCB" if part == "SCB" else f"weight.{part}")
    out = tiny.rewrite(stored(tmp_path, quant), lambda tensors: tensors.pop(name))
    with pytest.raises(FormatFault, match=f"lacks 1 tensors .* {name}") as caught:
        placed(out, "auto", AWAY["all"])
    assert (caught.value.code, caught.value.parts["tensors"]) == ("TT505", [name])
    assert [one.code for one in check(out)] == ["TT505"]


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_quantized_weights_of_which_the_config_says_nothing(quant: str, tmp_path: Path) -> None:
    out = stored(tmp_path, quant)
    assert check(out) == []
    configure(out, lambda config: config.pop("quantization_config"))
    with pytest.raises(FormatFault, match="has no quantization_config") as caught:
        placed(out, "auto")
    assert caught.value.code == "TT509"
    assert "TT509" in [one.code for one in check(out)]


@pytest.mark.parametrize("said", ["float16", "float32", None])
def test_the_dtype_of_what_is_stored_is_that_of_its_tensors(
    said: str | None, tmp_path: Path
) -> None:
    out = stored(tmp_path, "nf4")

    def say(config: dict[str, Any]) -> None:
        for key in ("dtype", "torch_dtype"):
            if config.pop(key, None) and said:
                config[key] = said

    configure(out, say)
    given = tiny.inputs(out)
    with placed(out, "auto", AWAY["all"]) as one:
        assert one.plan.dtype == "bfloat16"
        wanted = tiny.reference(out, "none", dtype=torch.bfloat16)
        assert torch.equal(tiny.logits(one.model, given), tiny.logits(wanted, given))
    with pytest.raises(FormatFault, match="cannot be loaded as float32") as caught:
        planned(out, "auto", AWAY["all"], dtype="float32")
    assert caught.value.code == "TT509"


def test_a_config_that_asks_for_two_formats_is_not_understood(tmp_path: Path) -> None:
    out = stored(tmp_path, "nf4", load_in_8bit=True)
    with pytest.raises(FormatFault) as caught:
        planned(out, "auto")
    assert caught.value.code == "TT510"


def test_what_is_stored_is_not_told_to_be_quantized_again(tmp_path: Path) -> None:
    out = stored(tmp_path, "int8")
    for folder, helps in ((tiny.checkpoint("llama"), True), (out, False)):
        with pytest.raises(DoesNotFit) as caught:
            plan(folder, quant="auto" if folder == out else "int8", cpu=1, disk="1GiB")
        assert ("--quant nf4 makes the layers" in caught.value.fix) == helps
