"""Hot swap: what takes a loaded adapter's place computes what it computes when it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from placing import placed
from residents import generated
from test_decode import captured
from trimtab.errors import AdapterFault
from trimtab.guard import is_guarded
from trimtab.placement import Placement
from trimtab.swapping import Exchange

pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has:UserWarning",  # peft 0.18, of a model that ties nothing
    "ignore:Unsupported layer type:UserWarning",  # peft 0.18, of experts
)

LOADED: dict[str, dict[str, Any]] = {"lora": {}, "dora": {}}
"""Of rank 8."""

NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "of the same rank": ("lora", {}),
    "scaled otherwise": ("lora", {"lora_alpha": 4, "use_rslora": True}),
    "smaller": ("lora", {"r": 4}),
    "larger": ("lora", {"r": 16, "lora_alpha": 8}),
    "of several ranks": (
        "lora",
        {"r": 4, "rank_pattern": {"q_proj": 12}, "alpha_pattern": {"v_proj": 3}},
    ),
    "smaller DoRA": ("dora", {"r": 4}),
    "larger DoRA": ("dora", {"r": 16}),
}


def logits(placement: Placement, name: str = "a") -> torch.Tensor:
    folder = Path(placement.plan.model)
    with placement.using(name) as model:
        return tiny.logits(model, tiny.inputs(folder, device=placement.device.type))


def fresh(folder: Path, path: Path, **options: Any) -> torch.Tensor:
    with placed(folder, "nf4", ("half",), {"a": path}, **options) as placement:
        return logits(placement)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Zeros beside the ranks may make sums go in another order, which 16 bits round otherwise.

    Measured: at most 0.06 of the logits' deviation, 0.008 on average; in 32 bits see below.
    """
    off = (found - wanted).float().abs() / wanted.float().std()
    assert off.max() < 0.1
    assert off.mean() < 0.015


@pytest.mark.parametrize(("here", "new"), [(8, 4), (12, 8), (64, 4)])
def test_zeros_beside_the_ranks_change_the_order_of_sums_and_no_more(here: int, new: int) -> None:
    folder = tiny.checkpoint("llama", dtype=torch.float32)
    path = tiny.adapter(folder, seed=9, r=new)
    with placed(folder, "none", ("half",), {"a": tiny.adapter(folder, r=here)}) as placement:
        placement.swap_adapter("a", path)
        found = logits(placement)
    with placed(folder, "none", ("half",), {"a": path}) as placement:
        wanted = logits(placement)
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()


@pytest.fixture
def llama() -> Path:
    return tiny.checkpoint("llama")


@pytest.fixture(params=["resident", "resting"])
def placement(request: pytest.FixtureRequest, llama: Path) -> Iterator[Placement]:
    adapters = {"a": tiny.adapter(llama), "b": tiny.adapter(llama, seed=2)}
    with placed(llama, "nf4", ("half",), adapters) as found:
        if request.param == "resting":
            found.shelf.cap = found.shelf.here // 2
            logits(found, "b")
            assert found.shelf.resting == ("a",)
        yield found


@pytest.mark.parametrize("what", [name for name in NEW if "DoRA" not in name])
def test_it_equals_the_adapter_loaded_fresh(
    placement: Placement, llama: Path, what: str, tmp_path: Path
) -> None:
    kind, options = NEW[what]
    path = tiny.adapter(llama, kind, seed=9, **options)
    beside = logits(placement, "b")
    old = placement.applied["a"]
    applied = placement.swap_adapter("a", path)
    assert (applied.tensors, applied.modules) == (old.tensors, old.modules)
    assert placement.applied["a"] is applied
    near(logits(placement), fresh(llama, path))
    if what not in ("smaller", "of several ranks"):
        assert torch.equal(logits(placement), fresh(llama, path))
    assert torch.equal(logits(placement, "b"), beside)
    placement.remove_adapter("b")  # peft 0.18 would save it as part of one that is called "a"
    placement.model.save_pretrained(tmp_path, selected_adapters=["a"])
    assert torch.equal(fresh(llama, tmp_path / "a"), logits(placement))


@pytest.mark.parametrize("what", [name for name in NEW if "DoRA" in name])
def test_a_dora(llama: Path, what: str) -> None:
    kind, options = NEW[what]
    path = tiny.adapter(llama, kind, seed=9, **options)
    with placed(llama, "nf4", ("half",), {"a": tiny.adapter(llama, "dora")}) as placement:
        placement.swap_adapter("a", path)
        near(logits(placement), fresh(llama, path))


@pytest.mark.parametrize("away", [(), ("layers",)])
def test_embeddings_and_whole_modules(llama: Path, away: tuple[str, ...]) -> None:
    targets = ["q_proj", "embed_tokens"]
    options: dict[str, Any] = {"targets": targets, "modules_to_save": ["lm_head"]}
    old, new = (tiny.adapter(llama, seed=n, r=r, **options) for n, r in ((1, 8), (2, 4)))
    with placed(llama, "none", away, {"a": old}) as placement:
        placement.swap_adapter("a", new)
        found = logits(placement)
    with placed(llama, "none", away, {"a": new}) as placement:
        near(found, logits(placement))


@pytest.mark.parametrize("kind", ["LoHa", "IA3", "OFT"])
def test_other_kinds_of_the_same_shape(llama: Path, kind: str) -> None:
    old, new = tiny.adapter(llama, kind), tiny.adapter(llama, kind, seed=9)
    with placed(llama, "none", ("half",), {"a": old}) as placement:
        before = logits(placement)
        placement.swap_adapter("a", new)
        found = logits(placement)
    with placed(llama, "none", ("half",), {"a": new}) as placement:
        assert torch.equal(logits(placement), found)
    assert not torch.equal(found, before)


def weights(placement: Placement) -> dict[str, int]:
    named = placement.model.named_parameters()
    return {
        name: one.data_ptr() for name, one in named if ".b." not in name and not is_guarded(one)
    }


def test_places_change_only_where_a_rank_grows(llama: Path) -> None:
    with placed(llama, "nf4", ("half",), {"a": tiny.adapter(llama)}) as placement:
        before = weights(placement)
        for options in ({}, {"r": 4}, {"r": 8}):
            placement.swap_adapter("a", tiny.adapter(llama, seed=9, **options))
            assert weights(placement) == before
        placement.swap_adapter("a", tiny.adapter(llama, r=8, rank_pattern={"q_proj": 12}))
        moved = {name for name, at in weights(placement).items() if at != before[name]}
        assert moved == {name for name in before if "q_proj.lora_" in name}
        before = weights(placement)
        placement.swap_adapter("a", tiny.adapter(llama, seed=9))  # into the larger place
        assert weights(placement) == before
        near(logits(placement), fresh(llama, tiny.adapter(llama, seed=9)))


def test_captured_steps_stay_where_only_values_change(llama: Path) -> None:
    adapters = {"a": tiny.adapter(llama), "b": tiny.adapter(llama, seed=2)}
    asked = tiny.inputs(llama, batch=1)
    fixed = {"min_new_tokens": 20, "max_new_tokens": 20}

    def tokens(path: Path) -> torch.Tensor:
        with placed(llama, "nf4", ("layers",), {"a": path}, poison=False, slots=3) as other:
            captured(other)
            return generated(other.model, asked, **fixed)

    with placed(llama, "nf4", ("layers",), adapters, poison=False, slots=3) as placement:
        captured(placement)
        for name in "abab":
            with placement.using(name) as model:
                generated(model, asked, **fixed)
        count, kept = placement.steps.captured, len(placement.steps._steps)
        same = tiny.adapter(llama, seed=9)
        placement.swap_adapter("a", same)
        assert len(placement.steps._steps) == kept
        assert torch.equal(generated(placement.model, asked, **fixed), tokens(same))
        assert placement.steps.captured == count
        other = tiny.adapter(llama, seed=9, r=16, lora_alpha=8)
        placement.swap_adapter("a", other)
        assert len(placement.steps._steps) < kept
        assert torch.equal(generated(placement.model, asked, **fixed), tokens(other))
        assert placement.steps.captured > count
        with placement.using("b") as model:
            count = placement.steps.captured
            generated(model, asked, **fixed)
            assert placement.steps.captured == count


def changed(path: Path, tmp_path: Path, **fields: Any) -> Path:
    copy = Path(shutil.copytree(path, tmp_path / "changed"))
    file = copy / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return copy


def state(placement: Placement) -> list[Any]:
    config = placement.model.peft_config["a"].to_dict()
    scaling = [
        (dict(one.scaling), dict(one.r), dict(one.lora_alpha))
        for one in placement.model.modules()
        if hasattr(one, "scaling") and hasattr(one, "lora_A")
    ]
    return [config, scaling, weights(placement), placement.applied["a"]]


def refused_kinds(llama: Path, tmp_path: Path) -> dict[str, Path]:
    lora = tiny.adapter(llama, seed=9)
    return {
        "its config differs: use_dora": tiny.adapter(llama, "dora"),
        "lacks 24 tensors": tiny.adapter(llama, targets=["q_proj", "k_proj", "v_proj", "o_proj",
                                                         "up_proj"]),
        "has also": tiny.adapter(llama, modules_to_save=["lm_head"]),
        "it is OFT, not LORA": tiny.adapter(llama, "OFT"),
        "PROMPT_TUNING": tiny.adapter(llama, "PromptTuning", num_virtual_tokens=4),
        "fan_in_fan_out is True, not False": changed(lora, tmp_path, fan_in_fan_out=True),
    }  # fmt: skip


def test_what_cannot_take_the_place_changes_nothing(
    placement: Placement, llama: Path, tmp_path: Path
) -> None:
    before, found = state(placement), logits(placement, "a")
    logits(placement, "b")
    before = state(placement)
    for why, path in refused_kinds(llama, tmp_path).items():
        with pytest.raises(AdapterFault) as caught:
            placement.swap_adapter("a", path)
        assert caught.value.code == "TT321"
        assert why in caught.value.why, caught.value
        assert state(placement) == before
    with pytest.raises(AdapterFault, match="TT311"):
        placement.swap_adapter("c", tiny.adapter(llama))
    with pytest.raises(AdapterFault, match="TT3"):
        placement.swap_adapter("a", tiny.adapter(tiny.checkpoint("gpt2")), allow_other_base=True)
    assert state(placement) == before
    assert torch.equal(logits(placement), found)


@pytest.mark.parametrize("what", ["smaller", "larger", "of several ranks"])
def test_an_interrupt_leaves_the_adapter_as_it_was(
    placement: Placement, llama: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = logits(placement)
    logits(placement, "b")
    before = state(placement)
    kind, options = NEW[what]
    calls = iter(range(100))
    own = Exchange.carry_out

    def interrupt(self: Exchange) -> None:
        own(self)
        if next(calls) == 30:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "carry_out", interrupt)
        with pytest.raises(KeyboardInterrupt):
            placement.swap_adapter("a", tiny.adapter(llama, kind, seed=9, **options))
    assert state(placement) == before
    assert torch.equal(logits(placement), found)
    assert not any(one.requires_grad for one in placement.model.parameters())


def test_experts_are_swapped_where_their_shapes_are_the_same() -> None:
    folder = tiny.checkpoint("qwen3-moe")
    options: dict[str, Any] = {
        "targets": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"],
    }  # fmt: skip
    old, new, smaller = (
        tiny.adapter(folder, seed=n, r=r, **options) for n, r in ((1, 8), (2, 8), (3, 4))
    )
    with placed(folder, "none", ("half",), {"a": old}) as placement:
        with pytest.raises(AdapterFault, match="TT321"):
            placement.swap_adapter("a", smaller)
        placement.swap_adapter("a", new)
        found = logits(placement)
    with placed(folder, "none", ("half",), {"a": new}) as placement:
        assert torch.equal(logits(placement), found)


def test_a_file_that_is_half_is_refused(placement: Placement, llama: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny.adapter(llama, seed=9), tmp_path / "half"))
    lost = "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"
    tiny.rewrite(path, lambda held: held.pop(lost))
    before = state(placement)
    with pytest.raises(AdapterFault, match="TT321"):
        placement.swap_adapter("a", path)
    assert state(placement) == before


@pytest.mark.gpu
@pytest.mark.parametrize("what", NEW)
def test_on_a_gpu_with_steps_that_were_captured(llama: Path, what: str) -> None:
    kind, options = NEW[what]
    old, new = tiny.adapter(llama, kind), tiny.adapter(llama, kind, seed=9, **options)
    asked = tiny.inputs(llama, batch=1, device="cuda")
    fixed = {"min_new_tokens": 24, "max_new_tokens": 24}
    with placed(llama, "nf4", ("layers",), {"a": new}, "cuda", poison=False) as placement:
        wanted = logits(placement)
    with placed(llama, "nf4", ("layers",), {"a": old}, "cuda", poison=False) as placement:
        for _ in range(2):
            generated(placement.model, asked, **fixed)
        placement.swap_adapter("a", new)
        near(logits(placement), wanted)
        found = generated(placement.model, asked, **fixed)
        steps = placement.steps
        assert steps.replayed > 24
        steps._steps.clear()
        steps._met.clear()
        assert torch.equal(generated(placement.model, asked, **fixed), found)
