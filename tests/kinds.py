"""Every kind of adapter on every format: what comes of it, beside the stock stack.

`ROWS` has one or more adapters of each kind that PEFT knows. `cell(row, quant, state)` puts one on
a tiny model and says what came of it: `equal`, to the last bit, to the resident model of the stock
stack; a code; a code and `*`, where the stock stack fails as well. Anything else is a fault. Used
by `test_kinds` and by `scripts/make_adapter_table.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tiny
from placing import AWAY, placed
from trimtab.adapters import read_adapter
from trimtab.errors import TrimtabError
from trimtab.placement import Placement

FORMATS: Mapping[str, str] = {"none": "16-bit", "nf4": "nf4", "nf4-dq": "nf4-dq", "int8": "int8"}
STATES = ("resident", "streamed", "idle")

LAYERS = r".*layers\.[01]\.(self_attn\.(q_proj|v_proj)|mlp\.down_proj)"
TOWER = r".*vision_tower.*layers\.[01]\.(self_attn\.(q_proj|v_proj)|mlp\.fc2)"
SQUARE = r".*layers\.[01]\.self_attn\.v_proj"
SQUARE_TOWER = r".*vision_tower.*layers\.[01]\.self_attn\.v_proj"


@dataclass(frozen=True)
class Row:
    """An adapter of the table.

    `kind` is PEFT's name of the kind; `config` the config class without `Config`; `targets` the
    modules on a language model, `tower` those in a tower, None where the adapter cannot reach
    into one: it is then on the language model, and an image goes through the tower. `inputs` are
    what the model is called with besides; `tower_options` what takes the place of options there.
    """

    name: str
    kind: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: str | list[str] | None = LAYERS
    tower: str | list[str] | None = TOWER
    model: str = "llama-biased"
    inputs: Mapping[str, Any] = field(default_factory=dict)
    tower_options: Mapping[str, Any] = field(default_factory=dict)


def _prompt(name: str, kind: str, config: str, **options: Any) -> Row:
    options = {"num_virtual_tokens": 4, **options}
    return Row(name, kind, config, options, targets=None, tower=None)


def _square(name: str, kind: str, config: str, **options: Any) -> Row:
    return Row(name, kind, config, options, SQUARE, SQUARE_TOWER)


USED = tiny.inputs(tiny.checkpoint("llama-biased"), length=6)["input_ids"][0, 2:4].tolist()
"""Tokens that the inputs hold."""

CPT = {
    "cpt_token_ids": [11, 12, 13, 14],
    "cpt_mask": [1, 1, 1, 1],
    "cpt_tokens_type_mask": [1, 2, 3, 4],
    "num_virtual_tokens": 4,
}

ROWS: tuple[Row, ...] = (
    Row("LoRA", "LORA", "lora"),
    Row(
        "LoRA, rank and alpha patterns",
        "LORA",
        "lora",
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}},
    ),
    Row("LoRA, rank-stabilised", "LORA", "lora", {"use_rslora": True}),
    Row("DoRA", "LORA", "dora"),
    Row("LoRA with its own biases", "LORA", "lora", {"lora_bias": True}),
    Row("LoRA with the base's biases", "LORA", "lora", {"bias": "lora_only"}),
    Row("LoRA of the embedding", "LORA", "lora", {}, ["embed_tokens"], None),
    Row("DoRA of the embedding", "LORA", "dora", {}, ["embed_tokens"], None),
    Row("LoRA of the head", "LORA", "lora", {}, ["lm_head"], None),
    Row("LoRA of parameters (`target_parameters`), such as experts", "LORA", "lora",
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        SQUARE, SQUARE_TOWER, "qwen3-moe",
        tower_options={"target_parameters": ["encoder.layers.0.mlp.fc2.weight"]}),
    Row("LoRA and a trained head (`modules_to_save`)", "LORA", "lora",
        {"modules_to_save": ["lm_head"]}, tower=None),
    Row("LoRA and a trained table (`modules_to_save`)", "LORA", "lora",
        {"modules_to_save": ["embed_tokens"]}, tower=None),
    Row("LoRA and a trained norm (`modules_to_save`)", "LORA", "lora",
        {"modules_to_save": ["norm"]}, tower=None),
    Row("LoRA and a trained linear (`modules_to_save`)", "LORA", "lora",
        {"modules_to_save": ["layers.1.self_attn.k_proj"]}),
    Row("LoRA and trained token rows", "LORA", "lora",
        {"trainable_token_indices": {"embed_tokens": USED}}, tower=None),
    Row("Activated LoRA", "LORA", "lora", {"alora_invocation_tokens": USED[:1]}),
    Row("QALoRA", "LORA", "lora", {"use_qalora": True, "qalora_group_size": 16}),
    Row("AdaLoRA", "ADALORA", "AdaLora", {"total_step": 10}),
    Row("AdaMSS", "ADAMSS", "Adamss"),
    Row("Adaption prompt", "ADAPTION_PROMPT", "AdaptionPrompt",
        {"adapter_len": 4, "adapter_layers": 2}, "self_attn", None),
    Row("BEFT", "BEFT", "Beft", {}, SQUARE, SQUARE_TOWER),
    Row("BOFT", "BOFT", "BOFT", {"boft_block_size": 4}),
    Row("Bone", "BONE", "Bone"),
    Row("C3A", "C3A", "C3A", {"block_size": 64}),
    _prompt("Cartridge", "CARTRIDGE", "Cartridge"),
    Row("CPT", "CPT", "CPT", CPT, None, None),
    Row("DEFT", "DEFT", "Deft"),
    Row("DeLoRA", "DELORA", "Delora"),
    Row("FourierFT", "FOURIERFT", "FourierFT", {"n_frequency": 20}),
    Row("FRoD", "FROD", "Frod"),
    Row("GLoRA", "GLORA", "Glora"),
    Row("GraLoRA", "GRALORA", "Gralora"),
    Row("HiRA", "HIRA", "Hira"),
    Row("HRA", "HRA", "HRA"),
    Row("IA3", "IA3", "IA3", {"feedforward_modules": r".*(down_proj|fc2)"}),
    Row("Lily", "LILY", "Lily", {}, SQUARE, SQUARE_TOWER),
    Row("LN tuning", "LN_TUNING", "LNTuning", {}, r".*layers\.[01]\.input_layernorm",
        r".*vision_tower.*layers\.[01]\.layer_norm1"),
    Row("LoHa", "LOHA", "LoHa"),
    Row("LoKr", "LOKR", "LoKr"),
    Row("MiSS", "MISS", "Miss"),
    Row("OFT", "OFT", "OFT"),
    Row("SHiRA", "SHIRA", "Shira"),
    _prompt("Prompt tuning", "PROMPT_TUNING", "PromptTuning"),
    Row("Multitask prompt tuning", "MULTITASK_PROMPT_TUNING", "MultitaskPromptTuning",
        {"num_virtual_tokens": 4}, None, None, inputs={"task_ids": torch.tensor([0, 0])}),
    Row("OSF", "OSF", "OSF", {"effective_rank": 8}),
    _prompt("P-tuning", "P_TUNING", "PromptEncoder", encoder_hidden_size=64),
    Row("PEANuT", "PEANUT", "Peanut"),
    Row("Poly", "POLY", "Poly", {"n_tasks": 2}),
    _prompt("Prefix tuning", "PREFIX_TUNING", "PrefixTuning"),
    Row("PSOFT", "PSOFT", "Psoft"),
    _square("PVeRA", "PVERA", "Pvera"),
    Row("RandLoRA", "RANDLORA", "RandLora"),
    Row("RoAd", "ROAD", "Road"),
    Row("Shadow", "SHADOW", "Shadow"),
    Row("Supertuning", "SUPERTUNING", "Supertuning"),
    Row("TinyLoRA", "TINYLORA", "TinyLora"),
    Row("Trained token rows", "TRAINABLE_TOKENS", "TrainableTokens",
        {"token_indices": USED}, ["embed_tokens"], None),
    Row("UniLoRA", "UNILORA", "UniLora"),
    Row("VBLoRA", "VBLORA", "VBLoRA", {"vector_length": 64, "num_vectors": 16, "topk": 2}),
    _square("VeRA", "VERA", "Vera"),
    Row("WaveFT", "WAVEFT", "WaveFT", {"n_frequency": 20}),
    Row("X-LoRA", "XLORA", "XLora"),
)  # fmt: skip


def known_kinds() -> set[str]:
    """The kinds that the installed PEFT knows."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(getattr(kind, "value", kind)) for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


def rows() -> tuple[Row, ...]:
    """The rows whose kind the installed PEFT knows."""
    known = known_kinds()
    return tuple(row for row in ROWS if row.kind in known)


def cell(row: Row, quant: str, state: str) -> str:
    """What comes of an adapter: `equal`, a code, a code and `*`, or a fault in words."""
    bench = _bench(_model(row, state), quant, state)
    expected = _expected(row.name, quant, state == "idle")
    found = bench.trimtab(source(row, state), expected, row.inputs)
    return found if bench.is_as_it_was() else f"{found}, and leaves something behind"


@functools.cache
def _expected(name: str, quant: str, idle: bool) -> torch.Tensor | Exception:
    """The stock stack's answer, the same wherever the layers are."""
    row = next(one for one in ROWS if one.name == name)
    state = "idle" if idle else "resident"
    return _bench(_model(row, state), quant, state).stock(source(row, state), row.inputs)


def _model(row: Row, state: str) -> str:
    return "gemma3-vlm" if state == "idle" else row.model


def source(row: Row, state: str) -> Path:
    targets, options = row.targets, dict(row.options)
    if state == "idle" and row.tower is not None:
        targets, options = row.tower, {**options, **row.tower_options}
    with _quiet():
        for name in (_model(row, state), row.model):
            try:
                return tiny.adapter(tiny.checkpoint(name), row.config, targets=targets, **options)
            except (ValueError, AttributeError, ImportError, TypeError):
                continue
    return _unmade(row)


def _unmade(row: Row) -> Path:
    """For a kind that PEFT does not make here: its config, and one tensor."""
    folder = tiny._root() / f"unmade-{row.kind}"
    folder.mkdir(exist_ok=True)
    config = {"peft_type": row.kind, "target_modules": "model.layers.0.self_attn.v_proj"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    key = f"base_model.model.model.layers.0.self_attn.v_proj.{row.kind.lower()}_A"
    save_file({key: torch.ones(8, 128)}, folder / "adapter_model.safetensors")
    return folder


@dataclass
class Bench:
    """A model in one format and one state, twice: the stock stack's, never run, and a placement."""

    given: dict[str, torch.Tensor]
    pristine: Any
    placement: Placement
    bare: torch.Tensor

    def stock(self, source: Path, inputs: Mapping[str, Any]) -> torch.Tensor | Exception:
        """The stock stack's logits, or what it raises."""
        from peft import PeftModel

        try:
            with _quiet():
                model = PeftModel.from_pretrained(
                    copy.deepcopy(self.pristine),
                    source,
                    torch_device="cpu",
                    low_cpu_mem_usage=False,
                )
                return tiny.logits(model.eval(), {**self.given, **inputs})
        except Exception as problem:
            return problem

    def trimtab(
        self, source: Path, expected: torch.Tensor | Exception, inputs: Mapping[str, Any]
    ) -> str:
        failed = "*" if isinstance(expected, Exception) else ""
        try:
            with _quiet():
                self.placement.add_adapter("default", read_adapter(source))
        except TrimtabError as fault:
            return fault.code + failed
        try:
            with _quiet():
                found = tiny.logits(self.placement.model, {**self.given, **inputs})
        except Exception as problem:
            return f"raises {type(problem).__name__}: {problem}"
        finally:
            self.placement.remove_adapter("default")
        if isinstance(expected, Exception):
            return f"computes, and the stock stack raises {type(expected).__name__}: {expected}"
        if not torch.equal(found, expected):
            return f"differs by {(found - expected).abs().max():.2g}"
        return "changes nothing" if torch.equal(found, self.bare) else "equal"

    def is_as_it_was(self) -> bool:
        return torch.equal(tiny.logits(self.placement.model, self.given), self.bare)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _bench(name: str, quant: str, state: str) -> Bench:
    folder = tiny.checkpoint(name)
    given = tiny.inputs(
        folder, length=6, modalities=("text", "image") if state == "idle" else ("text",)
    )
    away = {"resident": "resident", "streamed": "all", "idle": "towers"}[state]
    pristine = tiny.reference(folder, quant)
    bare = tiny.logits(copy.deepcopy(pristine), given)
    return Bench(given, pristine, placed(folder, quant, AWAY[away]), bare)


def is_right(found: str) -> bool:
    """Whether a cell is `equal` or a refusal."""
    return re.fullmatch(r"equal|TT3\d\d\*?", found) is not None
