"""What is refused on bases that accelerate has placed, which stay as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig

import trimtab
from dispatched import half_on_disk, placement
from tiny import adapter, checkpoint, inputs, logits, reference, rewrite
from trimtab.errors import AdapterFault, FormatFault, PlacementFault, RunningFault

pytestmark = pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")


def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path = Path(shutil.copytree(adapter(checkpoint("llama")), tmp_path / "broken"))
    lost = "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"
    rewrite(path, lambda weights: weights.pop(lost))
    given = inputs(folder)
    before = [placement(base), logits(base, given), [id(one) for one in base.modules()]]
    with pytest.raises(AdapterFault, match="TT312"):
        trimtab.attach(base, path)
    assert placement(base) == before[0]
    assert torch.equal(logits(base, given), before[1])
    assert [id(one) for one in base.modules()] == before[2]


def test_a_quantized_layer_on_meta_is_refused(tmp_path: Path) -> None:
    folder = checkpoint("llama")
    base = reference(folder, "nf4")
    dispatched = base.get_submodule("model.layers.1.mlp.up_proj")
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    weights = {"weight": dispatched.weight.data.clone()}
    hook = AlignDevicesHook(execution_device="cpu", offload=False)
    add_hook_to_module(dispatched, hook)
    hook.offload, hook.weights_map = True, weights
    dispatched.weight = torch.nn.Parameter(dispatched.weight.data.to("meta"), requires_grad=False)
    with pytest.raises(PlacementFault, match="TT204"):
        trimtab.attach(base, adapter(folder))


def test_a_base_that_is_packed_for_this_cpu_is_refused_and_a_fresh_one_stays_unpacked() -> None:
    folder = checkpoint("llama")
    base = reference(folder, "nf4")
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True
    state = base.get_submodule("model.layers.1.mlp.up_proj").weight.quant_state
    state.packing_format_for_cpu = True  # as its first forward leaves it, where the CPU can
    with pytest.raises(
        FormatFault, match=r"1 4-bit layers .* model.layers.1.mlp.up_proj"
    ) as caught:
        trimtab.attach(base, adapter(folder))
    assert caught.value.code == "TT513"
    assert not any("lora" in name for name, _ in base.named_modules())
    state.packing_format_for_cpu = False
    model = trimtab.attach(base, adapter(folder))
    given = inputs(folder)
    wanted = reference(folder, "nf4", adapter(folder))
    assert torch.equal(logits(model, given), logits(wanted, given))
    model.load_adapter(adapter(folder, seed=5), "b")
    assert torch.equal(logits(model, given), logits(wanted, given))


def test_a_base_on_meta_is_refused() -> None:
    folder = checkpoint("llama")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(PlacementFault, match="TT207"):
        trimtab.attach(base, adapter(folder))


def test_merging_and_training_are_refused(tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path, given = adapter(checkpoint("llama")), inputs(folder)
    model = trimtab.attach(base, path)
    expected = logits(model, given)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(AdapterFault, match="TT309"):
            merge()
    with pytest.raises(AdapterFault, match="TT309"):
        base.get_submodule("model.layers.1.mlp.up_proj").merge()
    with pytest.raises(RunningFault, match="TT607"):
        model.load_adapter(path, "trained", is_trainable=True)
    assert torch.equal(logits(model, given), expected)


def test_a_new_adapter_that_would_rewrite_the_base_is_refused(tmp_path: Path) -> None:
    folder, base = half_on_disk("llama", tmp_path)
    path, given = adapter(checkpoint("llama")), inputs(folder)
    model = trimtab.attach(base, path)
    expected, before = logits(model, given), placement(base)
    for init, said in (("pissa", "TT308"), ("sideways", "sideways")):
        config = LoraConfig(r=4, target_modules=["q_proj"])
        config.init_lora_weights = init
        with pytest.raises((AdapterFault, ValueError), match=said):
            model.add_adapter("other", config)
        assert tuple(model.peft_config) == ("default",)
        assert not any(".other." in name for name, _ in model.named_parameters())
        assert placement(base) == before
        assert torch.equal(logits(model, given), expected)
