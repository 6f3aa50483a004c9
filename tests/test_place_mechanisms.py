"""What PEFT and transformers do to a placed model: as on a resident one, or refused beforehand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file

import tiny
from alive import LiveBytes
from parked import hook_that_raises
from placing import placed
from residents import generated, is_parked, logits, logits_of, resident, two
from trimtab.disk import DiskSlab
from trimtab.errors import AdapterFault
from trimtab.merging import Refusal
from trimtab.placement import Placement
from trimtab.store import MemorySlab

devices = pytest.mark.parametrize("device", tiny.DEVICES)
AWAY = ("half", "head", "tables")
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny.checkpoint("llama")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that are read outside of their unit's forward."""
    names: list[str] = []
    for kind in (DiskSlab, MemorySlab):
        own = kind.read

        def read(self: Any, weight: str, device: Any, key: Any = None, own: Any = own) -> Any:
            names.append(weight)
            return own(self, weight, device, key)

        monkeypatch.setattr(kind, "read", read)
    return names


# ------------------------------------------------------------------------ loading an adapter


@devices
@pytest.mark.parametrize("quant", ["none", "nf4", "nf4-dq", "int8"])
def test_adding_an_adapter_reads_no_weight_and_allocates_no_base(
    folder: Path, quant: str, device: str, reads: list[str]
) -> None:
    """3.1 and case 12: nothing of the base is read or made, warm-up and `state_dict` included."""
    adapter = tiny.adapter(folder)
    with placed(folder, quant, AWAY, {}, device) as placement:
        before = logits(placement.model, folder)
        with LiveBytes() as live:
            applied = placement.add_adapter("a", adapter)
        # Of double quantization, a state's offset is read as a number.
        assert len(reads) <= (21 if quant == "nf4-dq" else 0)
        reads.clear()
        # The file's tensors and the model's.
        staying = sum(unit.staying_bytes for unit in placement.plan.units)
        staying += sum(unit.moving_bytes for unit in placement.plan.of_mode("looked up"))
        if quant == "nf4-dq":
            # An offset is read from a slab, which counts whole and was there before.
            staying += sum(unit.moving_bytes for unit in placement.plan.of_mode("streamed"))
        assert live.peak <= staying + 2.1 * applied.nbytes
        assert not torch.equal(logits(placement.model, folder), before)
        with placement.model.disable_adapter():
            assert torch.equal(logits(placement.model, folder), before)
        assert reads == []


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_state_dict_of_the_whole_model_reads_no_weight(
    folder: Path, quant: str, reads: list[str]
) -> None:
    """3.1: PEFT makes one for each of its own `load_adapter`, `save_pretrained` and hot swap."""
    with placed(folder, quant, AWAY, {"a": tiny.adapter(folder)}) as placement:
        before = logits(placement.model, folder)
        placement.model.state_dict()
        placement.model.load_adapter(tiny.adapter(folder, seed=5), "own", low_cpu_mem_usage=False)
        assert reads == []
        assert torch.equal(logits(placement.model, folder), before)


@pytest.mark.parametrize("away", [(), ("half",)], ids=["resident", "half"])
@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "int8"])
def test_a_model_that_has_run_is_the_same_after_a_state_dict_and_an_adapter(
    folder: Path, quant: str, away: tuple[str, ...]
) -> None:
    """1.1 and case 27: bitsandbytes repacks weights at the first forward on some CPUs."""
    with placed(folder, quant, away) as placement:
        before = logits(placement.model, folder)
        state = {key: one.clone() for key, one in placement.model.state_dict().items()}
        assert torch.equal(logits(placement.model, folder), before)
        placement.add_adapter("a", tiny.adapter(folder))
        with placement.model.disable_adapter():
            assert torch.equal(logits(placement.model, folder), before)
        placement.remove_adapter("a")
        assert torch.equal(logits(placement.model, folder), before)
        again = placement.model.state_dict()
        assert all(torch.equal(again[key], one) for key, one in state.items())


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_an_initialisation_that_rewrites_the_base_is_refused(
    folder: Path, init: str, tmp_path: Path
) -> None:
    """3.2: PEFT would take the parked weights' stand-ins apart when it loads the adapter."""
    adapter = tiny.writable(tiny.adapter(folder), tmp_path)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "init_lora_weights": init}))
    with placed(folder, "none", ("half",)) as placement:
        before = logits(placement.model, folder)
        with pytest.raises(AdapterFault) as caught:
            placement.add_adapter("a", adapter)
        assert caught.value.code == "TT308"
        assert torch.equal(logits(placement.model, folder), before)
        assert is_parked(placement)


@pytest.mark.parametrize("key", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj"])
def test_tensors_of_the_base_in_the_file(folder: Path, key: str, tmp_path: Path) -> None:
    """3.5: equal ones are dropped and said, others are refused; nothing becomes resident."""
    adapter = tiny.writable(tiny.adapter(folder, targets=["q_proj"]), tmp_path)
    tensors = load_file(adapter / FILE)
    own = load_file(folder / "model.safetensors")[f"{key}.weight"]
    stored = f"base_model.model.{key}.weight"
    save_file({**tensors, stored: own}, adapter / FILE)
    with placed(folder, "none", AWAY, {"a": adapter}) as placement:
        assert any(key in note for note in placement.applied["a"].notes)
        wanted = resident(folder, "none", {"a": tiny.adapter(folder, targets=["q_proj"])})
        assert torch.equal(logits(placement.model, folder), logits(wanted, folder))
        save_file({**tensors, stored: own + 1}, adapter / FILE)
        with pytest.raises(AdapterFault) as caught:
            placement.add_adapter("b", adapter)
        assert caught.value.code == "TT310"
        assert placement.adapters == ("a",)
        assert torch.equal(logits(placement.model, folder), logits(wanted, folder))
        assert is_parked(placement)


@devices
@pytest.mark.parametrize("kind", ["lora", "TrainableTokens"])
def test_trained_token_rows_on_a_looked_up_table(
    folder: Path, kind: str, device: str, reads: list[str]
) -> None:
    """3.9: PEFT takes rows of the table without calling it."""
    rows = {"trainable_token_indices": {"embed_tokens": [12, 40, 77]}}
    options = rows if kind == "lora" else {"token_indices": [12, 40, 77]}
    targets = None if kind == "lora" else ["embed_tokens"]
    adapter = tiny.adapter(folder, kind, targets=targets, **options)
    given = {"input_ids": torch.tensor([[1, 12, 77, 40, 12, 30]], device=device)}
    wanted = resident(folder, "none", {"a": adapter}, device)
    with placed(folder, "none", AWAY, {"a": adapter}, device) as placement:
        assert torch.equal(tiny.logits(placement.model, given), tiny.logits(wanted, given))
        with placement.model.disable_adapter():
            base = tiny.logits(placement.model, given)
        assert torch.equal(base, tiny.logits(tiny.reference(folder, device=device), given))
        assert not torch.equal(base, tiny.logits(wanted, given))
    assert reads == []


# ------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("kind", ["lora", "dora", "LoHa"])
@pytest.mark.parametrize("away", [("half",), ()], ids=["half", "resident"])
def test_merging_is_refused_before_the_first_layer(
    folder: Path, away: tuple[str, ...], kind: str
) -> None:
    with placed(folder, "none", away, {"a": tiny.adapter(folder, kind)}) as placement:
        model, wanted = placement.model, logits(placement.model, folder)
        with model.disable_adapter():
            base = logits(model, folder)
        layer = model.get_base_model().model.layers[1].self_attn.q_proj  # not away
        for merge in (model.merge_and_unload, model.merge_adapter, layer.merge,
                      model.base_model.merge_adapter):  # fmt: skip
            with pytest.raises(AdapterFault, match="cannot be merged into a placed") as caught:
                merge()
            assert caught.value.code == "TT309"
        assert torch.equal(logits(model, folder), wanted)
        with model.disable_adapter():
            assert torch.equal(logits(model, folder), base)
        assert torch.equal(logits(model.unload(), folder), base)


def test_closing_gives_the_methods_back(folder: Path) -> None:
    def refusals() -> list[Any]:
        values = [one for module in model.modules() for one in vars(module).values()]
        return [one for one in values if isinstance(one, Refusal)]

    with placed(folder, "none", ("half",), two(folder)) as placement:
        model = placement.model
        assert len(refusals()) == 2 + 42
    assert refusals() == []


# --------------------------------------------------------------------- what PEFT does to adapters


def weighted(kind: str, model: Any) -> None:
    options = {"svd": {"svd_rank": 8}}.get(kind, {})
    names, weights = ["a", "c"], [0.7, 0.4]
    model.add_weighted_adapter(names, weights, "mix", combination_type=kind, **options)
    model.set_adapter("mix")


def deleted(model: Any) -> None:
    model.set_adapter("b")
    model.delete_adapter("a")


def hotswapped(model: Any, path: Path) -> None:
    hotswap_adapter(model, str(path), "a", torch_device=str(model.device))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda model: model.set_adapter("b"),
    "set twice": lambda model: (model.set_adapter("c"), model.set_adapter("a")),
    "linear": functools.partial(weighted, "linear"),
    "cat": functools.partial(weighted, "cat"),
    "svd": functools.partial(weighted, "svd"),
    "delete": deleted,
    "disable layers": lambda model: model.base_model.disable_adapter_layers(),
    "scale": lambda model: [
        one.set_scale("a", 3.0) for one in model.modules() if hasattr(one, "set_scale")
    ],
}


@devices
@pytest.mark.parametrize("quant", ["none", "nf4"])
@pytest.mark.parametrize("change", [*CHANGES, "hotswap"])
def test_a_change_of_adapters_is_as_on_a_resident_model(
    folder: Path, change: str, quant: str, device: str, reads: list[str]
) -> None:
    """3.7, cases 20 and 21."""
    adapters = {**two(folder), "c": tiny.adapter(folder, seed=3)}
    if change == "hotswap":
        adapters = {"a": tiny.adapter(folder)}
    apply = CHANGES.get(change) or functools.partial(hotswapped, path=tiny.adapter(folder, seed=7))
    with placed(folder, quant, AWAY, adapters, device) as placement:
        stock = resident(folder, quant, adapters, device)
        before = logits(placement.model, folder)
        assert torch.equal(before, logits(stock, folder))
        reads.clear()
        apply(placement.model), apply(stock)
        assert reads == []
        found = logits(placement.model, folder)
        assert torch.equal(found, logits(stock, folder))
        assert torch.equal(found, before) is (change == "set twice")
        given = tiny.inputs(folder, device=device)
        assert torch.equal(tiny.tokens(placement.model, given), tiny.tokens(stock, given))
        assert is_parked(placement)


def test_a_mixed_batch_is_as_on_a_resident_model(folder: Path) -> None:
    adapters = {"a": tiny.adapter(folder), "c": tiny.adapter(folder, seed=3)}
    given, names = tiny.inputs(folder, batch=3), ["c", "__base__", "a"]
    with placed(folder, "nf4", AWAY, adapters) as placement, torch.no_grad():
        stock = resident(folder, "nf4", adapters)
        assert torch.equal(
            placement.model(**given, adapter_names=names).logits,
            stock(**given, adapter_names=names).logits,
        )
        how = {"adapter_names": names, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(placement.model.generate(**given, **how), stock.generate(**given, **how))


def test_saving_writes_the_bytes_that_were_loaded(
    folder: Path, tmp_path: Path, reads: list[str]
) -> None:
    # PEFT 0.18 takes an adapter "a" for every key that has an "a".
    named = {"first": tiny.adapter(folder), "second": tiny.adapter(folder, "dora")}
    with placed(folder, "none", AWAY, named) as placement:
        reads.clear()  # a DoRA's magnitude is first made from the weight
        placement.model.save_pretrained(tmp_path)
    for name, path in named.items():
        assert (tmp_path / name / FILE).read_bytes() == (path / FILE).read_bytes()
    assert reads == []


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@devices
def test_a_streamed_head_that_was_trained_whole(folder: Path, device: str) -> None:
    """PEFT copies the parked head to make room for its own."""
    adapter = tiny.adapter(folder, modules_to_save=["lm_head"])
    with placed(folder, "none", AWAY, {"a": adapter}, device) as placement:
        wanted = resident(folder, "none", {"a": adapter}, device)
        assert torch.equal(logits(placement.model, folder), logits(wanted, folder))
        with placement.model.disable_adapter(), wanted.disable_adapter():
            assert torch.equal(logits(placement.model, folder), logits(wanted, folder))
        assert is_parked(placement)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.filterwarnings("ignore:.*`past_key_values`:FutureWarning")
@devices
@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning", "PromptEncoder"])
def test_prompts_that_are_learned(folder: Path, kind: str, device: str) -> None:
    adapter = tiny.adapter(folder, kind, num_virtual_tokens=4)
    with placed(folder, "nf4", AWAY, {"a": adapter}, device) as placement:
        stock = resident(folder, "nf4", {"a": adapter}, device)
        given = tiny.inputs(folder, device=device)
        found = tiny.logits(placement.model, given)
        assert torch.equal(found, tiny.logits(stock, given))
        assert torch.equal(tiny.tokens(placement.model, given), tiny.tokens(stock, given))
        with placement.model.disable_adapter():
            assert not torch.equal(tiny.logits(placement.model, given), found)


# --------------------------------------------------------------------------------- generating

GENERATES: dict[str, dict[str, Any]] = {
    "without a cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams and sampling": {"num_beams": 2, "do_sample": True},
    "sampling": {"do_sample": True, "top_k": 20},
    "a static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "scores": {
        "output_scores": True,
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    },
}


@pytest.fixture(scope="module", params=tiny.DEVICES)
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Placement, PeftModel]]:
    """A placement and the resident model beside it."""
    adapters = {"a": tiny.adapter(folder)}
    with placed(folder, "nf4", AWAY, adapters, request.param) as placement:
        stock = resident(folder, "nf4", adapters, request.param)
        stock.generation_config.disable_compile = True
        yield placement, stock


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("how", GENERATES)
def test_every_way_to_generate_gives_the_resident_tokens(
    pair: tuple[Placement, PeftModel], folder: Path, how: str, batch: int
) -> None:
    """Case 25; the batch's lengths are unequal."""
    if how == "prompt lookup" and batch > 1:
        batch = 1  # transformers looks up for one sequence only
    placement, stock = pair
    given = tiny.inputs(folder, batch=batch, padded=batch > 1, device=str(placement.device))
    options = GENERATES[how]
    found = generated(placement.model, given, **options)
    assert torch.equal(found, generated(stock, given, **options))


def test_an_assistant_model(pair: tuple[Placement, PeftModel], folder: Path) -> None:
    placement, stock = pair
    given = tiny.inputs(folder, batch=1, device=str(placement.device))
    helper = tiny.reference(folder, device=placement.device.type)
    found = generated(placement.model, given, assistant_model=helper)
    assert torch.equal(found, generated(stock, given, assistant_model=helper))
    assert torch.equal(found, generated(stock, given))


def test_inputs_may_be_on_either_device(pair: tuple[Placement, PeftModel], folder: Path) -> None:
    """Case 23."""
    placement, _ = pair
    here, there = tiny.inputs(folder), tiny.inputs(folder, device=str(placement.device))
    found = tiny.logits(placement.model, here)
    assert torch.equal(found, tiny.logits(placement.model, there))
    assert torch.equal(generated(placement.model, here), generated(placement.model, there))


@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt, ValueError])
def test_a_forward_that_raises_costs_nothing(
    pair: tuple[Placement, PeftModel], folder: Path, kind: type[BaseException], at: int
) -> None:
    """Case 24, in a layer that is away and in ones that are not, while generating."""
    placement, stock = pair
    given = tiny.inputs(folder, device=str(placement.device))
    layer = placement.model.get_base_model().model.layers[at].mlp
    handle = layer.register_forward_hook(hook_that_raises(kind("here")))
    for call in (generated, logits_of):
        with pytest.raises(kind):
            call(placement.model, given)
        assert is_parked(placement)
    handle.remove()
    assert torch.equal(generated(placement.model, given), generated(stock, given))
