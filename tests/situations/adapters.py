"""Situations of TT3: adapters that are damaged, do not fit, or cannot be used so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import tiny
from placing import placed
from situations.situation import CARD, base, edit, llama, lora, shortened, shows, without
from tiny import rewrite
from trimtab.adapters import read_adapter
from trimtab.compat import check_base
from trimtab.diagnosis import Finding, check
from trimtab.merge import merge


def of_llama(folder: Path) -> list[Finding]:
    return check(llama(), adapters=folder, hardware=CARD)


@shows("TT301", "there is no folder DIR/lara")
def _adapter(at: Path, wrong: bool) -> list[Finding]:
    lora(at)
    return of_llama(at / ("lara" if wrong else "lora"))


@shows("TT301", "DIR/lora has no adapter_config.json")
def _adapter_config(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(without(lora(at), "adapter_config.json", wrong))


@shows(
    "TT301",
    "DIR/lora has adapter_config.json but no weights: neither adapter_model.safetensors nor "
    "adapter_model.bin",
)
def _adapter_weights(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(without(lora(at), "adapter_model.safetensors", wrong))


@shows("TT302", "DIR/lora/adapter_model.safetensors is damaged")
def _adapter_damaged(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(shortened(lora(at), "adapter_model.safetensors", wrong))


@shows(
    "TT302",
    "DIR/lora/adapter_model.bin is a pickle that holds more than weights; it was not loaded",
)
def _adapter_pickle(at: Path, wrong: bool) -> list[Finding]:
    file = lora(at) / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    file.unlink()
    torch.save({**tensors, **({"x": Path("x")} if wrong else {})}, at / "lora/adapter_model.bin")
    return of_llama(at / "lora")


STRAY = "base_model.model.model.layers.77.mlp.up_proj.lora_A.weight"


@shows("TT303", f"1 of the 85 tensors of DIR/lora match nothing in the model: {STRAY}")
def _stray(at: Path, wrong: bool) -> list[Finding]:
    def add(tensors: dict[str, Any]) -> None:
        tensors[STRAY] = torch.zeros(8, 128)

    return of_llama(rewrite(lora(at), add if wrong else lambda tensors: None))


@shows(
    "TT304",
    "target_modules=[query_key_value] of DIR/lora matches no module that its file has tensors for: "
    "model.layers.0.mlp.down_proj, model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj and 39 "
    "more",
)
def _targets(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), **({"target_modules": ["query_key_value"]} if wrong else {})))


@shows("TT305", "DIR/lora was made for acme/bert, the base is acme/llama")
def _other_base(at: Path, wrong: bool) -> None:
    folder = edit(lora(at), base_model_name_or_path=f"acme/{'bert' if wrong else 'llama-bnb-4bit'}")
    check_base(read_adapter(folder), "acme/llama", False, [])


@shows(
    "TT306",
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight of DIR/lora is [8, 256], the "
    "model needs [4, 256]",
)
def _rank(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), r=4 if wrong else 8))


@shows("TT307", "DIR/lora sets strange_field=3, which the installed PEFT does not know")
def _field(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), **({"strange_field": 3} if wrong else {})))


@shows("TT307", "DIR/lora is of the kind NEWLORA, which the installed PEFT does not know")
def _kind(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), peft_type="NEWLORA" if wrong else "LORA"))


@shows("TT308", "DIR/lora was saved with init_lora_weights='pissa'")
def _init(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), init_lora_weights="pissa" if wrong else True))


@shows("TT309", "an adapter cannot be merged into a placed model")
def _merge_placed(at: Path, wrong: bool) -> None:
    with placed(llama(), "none", ("half",), {"a": lora(at)}) as found:
        getattr(found.model, "merge_adapter" if wrong else "disable_adapter")()


@shows("TT309", "DIR/base is quantized (bitsandbytes): nothing is merged into it")
def _merge_quantized(at: Path, wrong: bool) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    merge(edit(base(at), quantization_config=stored if wrong else None), lora(at), at / "out")


@shows(
    "TT310",
    "DIR/lora holds its own values of model.embed_tokens.weight, a tensor of the base",
)
def _base_tensor(at: Path, wrong: bool) -> None:
    name = "model.embed_tokens.weight"
    table = safetensors.torch.load_file(llama() / "model.safetensors")[name]

    def add(tensors: dict[str, Any]) -> None:
        tensors[f"base_model.model.{name}"] = table + wrong

    placed(llama(), adapters={"a": rewrite(lora(at), add)}).close()


@shows("TT311", "an adapter named 'a' is loaded already")
def _name(at: Path, wrong: bool) -> None:
    with placed(llama(), adapters={"a": lora(at)}) as found:
        found.add_adapter("a" if wrong else "b", at / "lora")


@shows(
    "TT312",
    "DIR/lora targets 1 modules that its file has no tensors for: model.layers.3.mlp.up_proj",
)
def _tensors(at: Path, wrong: bool) -> list[Finding]:
    def cut(tensors: dict[str, Any]) -> None:
        for key in [one for one in tensors if "layers.3.mlp.up_proj" in one] if wrong else ():
            del tensors[key]

    return of_llama(rewrite(lora(at), cut))


@shows(
    "TT313",
    "DIR/lora adapts 1 modules that PEFT cannot adapt: model.layers.3.mlp",
)
def _wrapper(at: Path, wrong: bool) -> list[Finding]:
    def rename(tensors: dict[str, Any]) -> None:
        for key in [one for one in tensors if "layers.3.mlp.up_proj" in one] if wrong else ():
            tensors[key.replace("mlp.up_proj", "mlp")] = tensors.pop(key)

    targets = ["mlp", *tiny.targets_of(llama())]
    return of_llama(edit(rewrite(lora(at), rename), target_modules=targets))


@shows("TT314", "DIR/lora uses the kind XLORA, which trimtab does not support")
def _unsupported_kind(at: Path, wrong: bool) -> list[Finding]:
    return of_llama(edit(lora(at), peft_type="XLORA" if wrong else "LORA"))


@shows("TT315", "PEFT refused DIR/lora")
def _refused(at: Path, wrong: bool) -> None:
    kind = "LoHa" if wrong else "lora"
    with placed(llama(), adapters={"a": tiny.adapter(llama())}) as found:
        found.add_adapter("b", lora(at, kind=kind))


@shows("TT316", "DIR/lora was made for DIR/other, the base is BASE")
def _moved_base(at: Path, wrong: bool) -> list[Finding]:
    made_for = at / "other" if wrong else llama()
    return of_llama(edit(lora(at), base_model_name_or_path=str(made_for)))


@shows(
    "TT317",
    "DIR/lora (IA3) does not compute on quantized layers: model.layers.0.self_attn.q_proj",
)
def _on_quantized(at: Path, wrong: bool) -> None:
    placed(llama(), "nf4" if wrong else "none", adapters={"a": lora(at, kind="IA3")}).close()


@shows("TT318", "DIR/out is there already and not empty")
def _taken(at: Path, wrong: bool) -> None:
    if wrong:
        (at / "out").mkdir()
        (at / "out" / "config.json").write_text("{}")
    merge(llama(), lora(at), at / "out")


@shows("TT321", "DIR/lora cannot take the place of the adapter 'a'")
def _swap(at: Path, wrong: bool) -> None:
    new = lora(at, kind="LoHa" if wrong else "lora", seed=2)
    with placed(llama(), adapters={"a": tiny.adapter(llama())}) as found:
        found.swap_adapter("a", new)
