"""The one route by which adapters are put on: exact, proved, and undone when it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from tiny import adapter, checkpoint, inputs, logits, reference, rewrite
from trimtab.adapted import adapter_state, shapes_of
from trimtab.adapters import adapter_bytes, read_adapter
from trimtab.apply import fit_model, load_onto, remove
from trimtab.errors import AdapterFault

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("lora", {}),
    ("dora", {}),
    ("lora", {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}}),
    ("LoHa", {}),
    ("LoKr", {}),
    ("IA3", {"targets": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("OFT", {}),
    ("HRA", {}),
    ("VBLoRA", {"vector_length": 64, "num_vectors": 16, "topk": 2}),
    ("LNTuning", {"targets": ["input_layernorm"]}),
    ("Shira", {}),
    ("PromptTuning", {"num_virtual_tokens": 4}),
    ("PrefixTuning", {"num_virtual_tokens": 4}),
]


def layout(model: torch.nn.Module) -> list[Any]:
    """What an undone change must leave as it was: modules, parameters, their flags."""
    modules = [(name, id(one), one.training) for name, one in model.named_modules()]
    return [modules, [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]]


def changed(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    folder = Path(shutil.copytree(adapter(checkpoint("llama")), tmp_path / "changed"))
    return rewrite(folder, change)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT's, of odd kinds
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_first_and_second_equal_the_stock_model_and_leave_nothing(
    kind: str, options: dict[str, Any]
) -> None:
    folder = checkpoint("llama")
    path, given = adapter(folder, kind, **options), inputs(folder)
    expected = logits(reference(folder, adapters=path), given)
    base = reference(folder)
    bare, modules = logits(base, given), [id(one) for one in base.modules()]

    model, applied = load_onto(base, read_adapter(path), "a")
    assert torch.equal(logits(model, given), expected)
    assert applied.tensors == len(load_file(path / "adapter_model.safetensors"))
    model, _ = load_onto(model, read_adapter(path), "b")  # peft 0.18 would round this one
    assert model.active_adapter == "a"
    model.set_adapter("b")
    assert torch.equal(logits(model, given), expected)
    model = remove(model, "b")
    assert torch.equal(logits(model, given), expected)
    model = remove(model, "a")
    assert model is base
    assert [id(one) for one in base.modules()] == modules
    assert torch.equal(logits(base, given), bare)


@pytest.mark.parametrize(
    "name", ["llama", "gemma4", "gemma3-vlm", "gpt2", "qwen3-moe", "llama-tied"]
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_architectures(name: str, kind: str) -> None:
    folder = checkpoint(name)
    path, given = adapter(folder, kind), inputs(folder)
    model, applied = load_onto(reference(folder), read_adapter(path))
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))
    assert applied.notes == ()
    assert applied.nbytes == adapter_bytes(read_adapter(path))


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "int8"])
def test_quantized_bases(quant: str) -> None:
    folder = checkpoint("llama")
    path, given = adapter(folder), inputs(folder)
    base = reference(folder, quant)
    assert shapes_of(base) == shapes_of(reference(folder))
    model, _ = load_onto(base, read_adapter(path))
    assert shapes_of(model) == shapes_of(reference(folder))
    expected = reference(folder, quant, path)
    assert torch.equal(logits(model, given), logits(expected, given))


def test_every_weight_is_the_files_in_32_bits_and_frozen() -> None:
    folder = checkpoint("llama")
    header = read_adapter(adapter(folder))
    weights = load_file(header.file)
    model, _ = load_onto(reference(folder), header, "a")
    model, _ = load_onto(model, header, "b")
    for name in ("a", "b"):
        state = adapter_state(model, header, name)
        assert state.keys() == weights.keys()
        for key, one in state.items():
            assert one.dtype == torch.float32
            assert not one.requires_grad
            assert torch.equal(one, weights[key])


def test_targets_by_their_ends_on_a_model_with_towers(tmp_path: Path) -> None:
    """Case 17: stock raises, since the towers wrap their linears."""
    folder = checkpoint("gemma4")
    ends = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    by_pattern = adapter(folder, targets=r".*language_model.*\.(" + "|".join(ends) + ")")
    path = Path(shutil.copytree(by_pattern, tmp_path / "by-ends"))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ends}))
    model, applied = load_onto(reference(folder), read_adapter(path))
    given = inputs(folder)
    expected = logits(reference(folder, adapters=by_pattern), given)
    assert torch.equal(logits(model, given), expected)
    assert "model.vision_tower." in applied.notes[0] or "model.audio_tower." in applied.notes[0]


def test_an_adapter_with_the_names_of_an_older_class(tmp_path: Path) -> None:
    """Case 14: stock runs the bare base."""
    folder = checkpoint("gemma3-vlm")

    def older(weights: dict[str, torch.Tensor]) -> None:
        for key in list(weights):
            weights[key.replace("model.language_model.", "language_model.model.")] = weights.pop(
                key
            )
        assert any(".language_model.model.layers" in key for key in weights)

    new = adapter(folder)
    path = rewrite(Path(shutil.copytree(new, tmp_path / "older")), older)
    model, applied = load_onto(reference(folder), read_adapter(path))
    given = inputs(folder)
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=new), given))
    assert "language_model.model.* are model.language_model.* here" in applied.notes[0]


def half(weights: dict[str, torch.Tensor]) -> None:
    del weights["base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"]


def stray(weights: dict[str, torch.Tensor]) -> None:
    weights["base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight"] = torch.ones(1)


def bias(weights: dict[str, torch.Tensor]) -> None:
    key = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
    weights[key.replace("A.weight", "A.bias")] = torch.ones(8)


def table(weights: dict[str, torch.Tensor]) -> None:
    weights["base_model.model.model.embed_tokens.weight"] = torch.ones(256, 128)


@pytest.mark.parametrize(
    ("change", "code"), [(half, "TT312"), (stray, "TT303"), (bias, "TT303"), (table, "TT310")]
)
@pytest.mark.parametrize("beside", [False, True])
def test_what_fails_leaves_the_model_as_it_was(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], code: str, beside: bool
) -> None:
    folder = checkpoint("llama")
    header, given = read_adapter(adapter(folder, targets=["v_proj"])), inputs(folder)
    model: Any = reference(folder).train()
    if beside:
        model, _ = load_onto(model, header, "first")
    before, expected = layout(model), logits(model.eval() if beside else model, given)
    with pytest.raises(AdapterFault) as caught:
        load_onto(model, read_adapter(changed(tmp_path, change)), "second")
    assert caught.value.code == code
    assert layout(model) == before
    assert torch.equal(logits(model, given), expected)
    model, _ = load_onto(model, header, "second")  # the name is free again
    assert set(model.peft_config) == ({"first", "second"} if beside else {"second"})


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("llama")
    model = reference(folder)
    before = layout(model)
    calls = iter(range(20))

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(calls) == 10:
            raise KeyboardInterrupt

    from peft.tuners.lora.layer import LoraLayer

    monkeypatch.setattr(LoraLayer, "reset_lora_parameters", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_onto(model, read_adapter(adapter(folder)))
    assert layout(model) == before
    assert not any(isinstance(one, BaseTunerLayer) for one in model.modules())
    assert "peft_config" not in vars(model)


def test_tensors_equal_to_the_bases_are_dropped_and_said(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    base = reference(folder)
    embedding = base.get_input_embeddings().weight

    def repeat(weights: dict[str, torch.Tensor]) -> None:
        weights["base_model.model.model.embed_tokens.weight"] = embedding.detach().float()

    path = changed(tmp_path, repeat)
    _, applied = load_onto(base, read_adapter(path))
    assert applied.tensors == 84
    assert applied.notes == ("the file repeats 1 tensors of the base: model.embed_tokens.weight",)
    assert base.get_input_embeddings().weight is embedding


@pytest.mark.filterwarnings(
    "ignore:Model has:UserWarning"
)  # peft 0.18, of a model that ties nothing
def test_modules_that_were_trained_whole() -> None:
    folder = checkpoint("llama")
    path, given = adapter(folder, modules_to_save=["lm_head"]), inputs(folder)
    base = reference(folder)
    bare = logits(base, given)
    model, applied = load_onto(base, read_adapter(path))
    assert "lm_head" in applied.modules
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))
    assert torch.equal(logits(remove(model, "default"), given), bare)


def test_names(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    header = read_adapter(adapter(folder))
    model, _ = load_onto(reference(folder), header, "lora")  # PEFT warns of such a name
    for name in ("lora", "", "a.b"):
        with pytest.raises(AdapterFault, match="TT311"):
            load_onto(model, header, name)
    with pytest.raises(AdapterFault, match="TT311"):
        remove(model, "other")
    with pytest.raises(AdapterFault, match="TT311"):
        load_onto(model.get_base_model(), header, "new")  # adapter layers without their PeftModel


def test_what_peft_refuses_is_said(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    model, _ = load_onto(reference(folder), read_adapter(adapter(folder)))
    with pytest.raises(AdapterFault, match="TT315") as caught:
        load_onto(model, read_adapter(adapter(folder, "LoHa")), "other-kind")
    assert "LOHA" in caught.value.why
    assert tuple(model.peft_config) == ("default",)


def test_fields_of_a_newer_peft(tmp_path: Path) -> None:
    """Case 18."""
    folder = checkpoint("llama")
    path = changed(tmp_path, lambda weights: None)
    file = path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "from_the_future": None}))
    _, applied = load_onto(reference(folder), read_adapter(path))
    assert applied.notes == (
        "config fields that the installed PEFT does not know: from_the_future",
    )
    for fields in ({"from_the_future": 2}, {"peft_type": "FUTURE"}):
        file.write_text(json.dumps({**config, **fields}))
        with pytest.raises(AdapterFault, match="TT307"):
            fit_model(reference(folder), read_adapter(path))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied weights
@pytest.mark.parametrize("quant", ["none", "nf4"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("TrainableTokens", {"token_indices": [12, 13], "targets": ["embed_tokens"]}),
        ("lora", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("lora", {"targets": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
    ],
)
def test_what_peft_ties_with_a_tied_base(kind: str, options: dict[str, Any], quant: str) -> None:
    folder = checkpoint("llama-tied")
    path, given = adapter(folder, kind, **options), inputs(folder)
    given["input_ids"][0, :2] = torch.tensor([12, 13])
    model, applied = load_onto(reference(folder, quant), read_adapter(path))
    assert applied.tensors == len(load_file(path / "adapter_model.safetensors"))
    assert torch.equal(logits(model, given), logits(reference(folder, quant, path), given))


@pytest.mark.filterwarnings("ignore:Model has:UserWarning")
def test_two_ends_of_a_tie_that_differ_in_the_file(tmp_path: Path) -> None:
    folder = checkpoint("llama-tied")
    plain = adapter(folder, "TrainableTokens", token_indices=[12, 13], targets=["embed_tokens"])
    path = Path(shutil.copytree(plain, tmp_path / "differ"))
    rewrite(path, lambda held: held["base_model.model.lm_head.trainable_tokens_delta"].add_(1))
    with pytest.raises(AdapterFault, match="trainable_tokens_delta") as caught:
        load_onto(reference(folder), read_adapter(path))
    assert caught.value.code == "TT303"


def test_an_adapter_that_changes_nothing_says_so(tmp_path: Path) -> None:
    def untrained(weights: dict[str, torch.Tensor]) -> None:
        for key, one in weights.items():
            weights[key] = one * 0 if ".lora_B." in key else one

    path = changed(tmp_path, untrained)
    _, applied = load_onto(reference(checkpoint("llama")), read_adapter(path))
    assert applied.notes == (f"{path} changes nothing: its lora_B or its lora_alpha is zero",)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    def broken(weights: dict[str, torch.Tensor]) -> None:
        for key in sorted(weights)[:3]:
            weights[key][0, 0] = float("nan")

    with pytest.raises(AdapterFault, match="nor are 2 more of its tensors") as caught:
        load_onto(reference(checkpoint("llama")), read_adapter(changed(tmp_path, broken)))
    assert caught.value.code == "TT302"


def test_biases_of_its_own_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = checkpoint("llama-biased")
    base = reference(folder)
    path = Path(shutil.copytree(adapter(folder), tmp_path / "biased"))
    weights = load_file(path / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"
    weights[key] = base.model.layers[0].self_attn.q_proj.bias.detach().float()
    save_file(weights, path / "adapter_model.safetensors")
    _, applied = load_onto(base, read_adapter(path))  # as the base has them
    assert applied.notes[0].startswith("the file repeats 1 tensors of the base")
    weights[key] += 1
    save_file(weights, path / "adapter_model.safetensors")
    with pytest.raises(AdapterFault, match="TT310") as caught:
        load_onto(reference(folder), read_adapter(path))
    assert "model.layers.0.self_attn.q_proj.bias" in caught.value.what
    assert "not take them back" in caught.value.why


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_adaption_prompt_is_taken_off_again() -> None:
    folder = checkpoint("llama-biased")
    options: dict[str, Any] = {"targets": "self_attn", "adapter_len": 4, "adapter_layers": 2}
    path, given = adapter(folder, "AdaptionPrompt", **options), inputs(folder)
    base = reference(folder)
    before, bare = layout(base), logits(base, given)
    model, applied = load_onto(base, read_adapter(path))
    assert applied.tensors == 4
    assert torch.equal(logits(model, given), logits(reference(folder, adapters=path), given))
    with pytest.raises(AdapterFault, match="TT314"):  # PEFT has one at a time in the model
        load_onto(model, read_adapter(path), "second")
    assert remove(model, "default") is base
    assert [[one[:2] for one in part] for part in layout(base)] == [
        [one[:2] for one in part] for part in before
    ]
    assert torch.equal(logits(base, given), bare)


@pytest.mark.filterwarnings("ignore:Model has:UserWarning")
def test_a_resized_vocabulary_and_the_way_that_works(tmp_path: Path) -> None:
    """Case 19."""
    import transformers

    folder = checkpoint("llama")
    resized = reference(folder)
    resized.resize_token_embeddings(272)
    resized.save_pretrained(tmp_path / "base")
    path = adapter(tmp_path / "base", modules_to_save=["lm_head", "embed_tokens"])
    header = read_adapter(path)
    with pytest.raises(AdapterFault, match=r"\[272, 128\], the model needs \[256, 128\]") as caught:
        load_onto(reference(folder), header, allow_other_base=True)
    assert caught.value.code == "TT306"
    assert "resize_token_embeddings(272)" in caught.value.fix
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model, _ = load_onto(base, header)
    expected = reference(tmp_path / "base", adapters=path, dtype=base.dtype)
    given = inputs(folder)
    assert torch.equal(logits(model, given), logits(expected, given))
