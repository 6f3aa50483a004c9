"""Situations, each with the code that `trimtab explain` should give first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import failing_situations as failing
import further_situations as further
import gpu_situations as gpu

LAYER = "model.layers.2"
INNER = "model.language_model.layers.2"


@dataclass(frozen=True)
class Situation:
    """What is run, and the code it should get; before transformers 5.10 and in 5.1 maybe others."""

    run: Callable[[], object]
    code: str
    older: str = ""
    oldest: str = ""


def _of(code: str, run: Callable[..., object], *given: object, **named: object) -> Situation:
    older = str(named.pop("older", code))
    oldest = str(named.pop("oldest", older))
    return Situation(partial(run, *given, **named), code, older, oldest)


SEEN = {
    "default": _of("TT212", failing.second_by_default, "llama", LAYER, older="TT215"),
    "default-gpt2": _of(
        "TT212", failing.second_by_default, "gpt2", "transformer.h.2", older="TT215"
    ),
    "default-dora": _of("TT212", failing.second_by_default, "llama", LAYER, "dora", older="TT215"),
    "default-moe": _of("TT215", failing.second_by_default, "qwen3-moe", LAYER),
    "same-map": _of("TT214", failing.second_with_same_map, "llama", LAYER, older="TT215"),
    "merged": _of("TT212", failing.merged_offloaded, "llama", LAYER, older="TT215"),
    "smaller-plan": _of(
        "TT215", failing.second_plan_is_smaller, "gpt2", "transformer.h.2", older="TT215"
    ),
    "smaller-plan-gemma4": _of(
        "TT212", failing.second_plan_is_smaller, "gemma4", INNER, older="TT215"
    ),
    "dora-added": _of("TT212", failing.added_to_offloaded, "llama", LAYER, "dora"),
    "moe-without-folder": _of("TT218", failing.without_folder, "qwen3-moe", LAYER),
    "nowhere": _of("TT218", failing.nowhere_to_put, "llama", LAYER),
    "catch-all": _of("TT213", failing.catch_all, "llama", LAYER),
    "offloaded-nf4": _of("TT212", failing.offloaded_quantized, "nf4", older="TT512"),
    "placed-again-nf4-dq": _of("TT211", failing.second_dispatch, "nf4-dq", older="TT512"),
    "saved-nf4": _of("TT511", failing.state_of_offloaded, "nf4", older="TT512"),
    "saved-int8": _of("TT511", failing.state_of_offloaded, "int8", older="TT512"),
    "split-nf4": _of("TT219", failing.split_base, "llama", LAYER, "nf4"),
    "packed-nf4": _of("TT513", failing.packed, 200, "nf4"),
    "map-lacks-a-norm": _of("TT202", failing.map_lacks, "gpt2", "transformer.ln_f"),
    "no-gpu": _of("TT103", failing.gpu_that_is_not_here, "llama"),
    "gemma4-sdpa": _of("TT608", failing.attention, "gemma4", "sdpa"),
    "flash-attention": _of("TT101", failing.attention, "llama", "flash_attention_2"),
    "unknown-attention": _of("TT608", failing.attention, "llama", "nonsense"),
    "truncated": _of("TT502", failing.truncated),
    "no-weights": _of("TT503", failing.no_weights),
    "adapter-truncated": _of("TT302", failing.adapter_truncated),
    "no-targets": _of("TT304", failing.adapter_targets, "llama", ["query_key_value"]),
    "target-norm": _of("TT313", failing.adapter_targets, "llama", ["input_layernorm"]),
    "rank": _of("TT306", failing.adapter_of_another_size, "llama", "peft", r=4),
    "vocabulary": _of("TT306", failing.saved_vocabulary, "llama"),
    "rank-transformers": _of(
        "TT306", failing.adapter_of_another_size, "llama", "transformers", r=4
    ),
    "unknown-kind": _of("TT307", failing.adapter_config, peft_type="NEWLORA"),
    "no-adapter-config": _of("TT301", failing.adapter_missing, "adapter_config.json"),
    "no-adapter-weights": _of("TT301", failing.adapter_missing, "adapter_model.safetensors"),
    "ia3-nf4": _of("TT317", failing.kind_on_quantized, "IA3", "nf4"),
    "lokr-nf4": _of("TT317", failing.kind_on_quantized, "LoKr", "nf4"),
    "unknown-adapter": _of("TT311", failing.unknown_adapter, "llama"),
    "flash-attention-3": _of("TT101", failing.attention, "qwen3", "flash_attention_3"),
    "no-gpu-adapter": _of("TT103", failing.without_a_gpu, "adapter"),
    "automatic": _of("TT214", failing.automatic, "llama", LAYER, older="TT215"),
    "unknown-field": _of("TT307", failing.config_of_newer_peft, strange_field=3),
    "randlora-int8": _of("TT317", failing.kind_on_quantized, "RandLora", "int8"),
    "road-nf4": _of("TT317", failing.kind_on_quantized, "Road", "nf4"),
    "loha-nf4": _of("TT317", failing.kind_on_quantized, "LoHa", "nf4"),
    "adapter-pointer-transformers": _of("TT302", failing.adapter_pointer_file, True),
    "unknown-adapter-deleted": _of("TT311", failing.unknown_adapter, "llama", "delete_adapter"),
}
SEEN |= {
    "default-qwen3": _of("TT212", failing.second_by_default, "qwen3", "lm_head", older="TT215"),
    "default-tied": _of("TT212", failing.second_by_default, "llama-tied", LAYER, older="TT215"),
    "default-gemma3": _of("TT212", failing.second_by_default, "gemma3", LAYER, older="TT215"),
    "default-vision": _of("TT215", failing.second_by_default, "gemma3-vlm", INNER),
    "default-gemma4": _of("TT212", failing.second_by_default, "gemma4", INNER, older="TT215"),
    "one-linear": _of(
        "TT212", failing.second_by_default, "llama", f"{LAYER}.mlp.up_proj", older="TT215"
    ),
    "generated": _of("TT212", failing.generated, "qwen3", LAYER, older="TT215"),
    "automatic-moe": _of("TT215", failing.automatic, "qwen3-moe", LAYER),
    "same-map-qwen3": _of("TT214", failing.second_with_same_map, "qwen3", LAYER, older="TT215"),
    "same-map-gemma4": _of("TT214", failing.second_with_same_map, "gemma4", INNER, older="TT215"),
    "merged-gpt2": _of("TT212", failing.merged_offloaded, "gpt2", "transformer.h.2", older="TT215"),
    "merged-dora": _of("TT212", failing.merged_offloaded, "llama", LAYER, "dora", older="TT215"),
    "dora-added-qwen3": _of("TT212", failing.added_to_offloaded, "qwen3", LAYER, "dora"),
    "balanced": _of("TT217", failing.balanced, "llama", LAYER),
    "balanced-gpt2": _of("TT217", failing.balanced, "gpt2", "transformer.h.2"),
    "shared": _of("TT216", failing.shared_keys_and_values, INNER),
    "shared-full": _of("TT216", failing.shared_keys_and_values, "model.language_model.layers.3"),
    "shared-no-cache": _of("TT216", failing.shared_keys_and_values, INNER, use_cache=False),
    "nowhere-gpt2": _of("TT218", failing.nowhere_to_put, "gpt2", "transformer.h.2"),
    "catch-all-gpt2": _of("TT213", failing.catch_all, "gpt2", "transformer.h.2"),
    "catch-all-vision": _of("TT213", failing.catch_all, "gemma3-vlm", INNER),
    "offloaded-nf4-dq": _of("TT212", failing.offloaded_quantized, "nf4-dq", older="TT512"),
    "offloaded-int8": _of("TT103", failing.offloaded_quantized, "int8", older="TT512"),
    "offloaded-fp4": _of("TT212", failing.offloaded_quantized, "fp4", older="TT512"),
    "placed-again-nf4": _of("TT212", failing.second_dispatch, "nf4", older="TT512"),
    "placed-again-int8": _of("TT212", failing.second_dispatch, "int8", older="TT512"),
    "dispatched-fp4-dq": _of("TT211", failing.dispatched_quantized, "fp4-dq", older="TT512"),
    "saved-fp4-dq": _of("TT211", failing.state_of_offloaded, "fp4-dq", older="TT512"),
    "split-int8": _of("TT219", failing.split_base, "llama", LAYER, "int8"),
    "split-gpt2-nf4": _of("TT219", failing.split_base, "gpt2", "transformer.h.2", "nf4-dq"),
    "auto-map-nf4": _of("TT219", failing.auto_map_without_room, "qwen3", "nf4", 200_000),
    "packed-fp4": _of("TT513", failing.packed, 72, "fp4"),
    "no-gpu-dispatch": _of("TT103", failing.without_a_gpu, "dispatch"),
    "no-gpu-pipeline": _of("TT103", failing.without_a_gpu, "pipeline"),
    "gemma4-flash": _of("TT608", failing.attention, "gemma4", "flash_attention_2", older="TT101"),
    "pointer-file": _of("TT502", failing.pointer_file),
    "wrong-shapes": _of("TT506", failing.wrong_shapes),
    "new-architecture": _of("TT104", failing.new_architecture),
    "new-config": _of("TT104", failing.new_architecture_config),
    "target-mlp": _of("TT313", failing.adapter_targets, "llama", ["mlp"]),
    "target-gemma4": _of("TT313", failing.adapter_targets, "gemma4", ["q_proj"]),
    "no-targets-pattern": _of("TT304", failing.adapter_targets, "gpt2", r".*\.q_proj"),
    "no-targets-given": _of("TT304", failing.adapter_targets, "gemma3-vlm", None),
    "head": _of("TT306", failing.adapter_of_another_size, "llama", "head"),
    "rank-gpt2": _of("TT306", failing.adapter_of_another_size, "gpt2", "peft", r=16),
    "unknown-kind-transformers": _of(
        "TT307", failing.loaded_by_transformers, "llama", peft_type="X"
    ),
    "ia3-int8": _of("TT317", failing.kind_on_quantized, "IA3", "int8"),
    "randlora-fp4": _of("TT317", failing.kind_on_quantized, "RandLora", "fp4"),
    "vera-nf4": _of("TT317", failing.kind_on_quantized, "Vera", "nf4"),
    "lokr-fp4": _of("TT317", failing.kind_on_quantized, "LoKr", "fp4-dq"),
    "loha-fp4": _of("TT317", failing.kind_on_quantized, "LoHa", "fp4"),
    "automatic-vision": _of("TT215", failing.automatic, "gemma3-vlm", INNER),
    "automatic-gpt2": _of("TT214", failing.automatic, "gpt2", "transformer.h.2", older="TT215"),
    "adapter-pointer-file": _of("TT302", failing.adapter_pointer_file),
    "unknown-field-ia3": _of("TT307", failing.config_of_newer_peft, "IA3Config", new_field=1),
    "flash-attention-gpt2": _of("TT101", failing.attention, "gpt2", "flash_attention_2"),
    "hra-nf4": _of("TT317", failing.kind_on_quantized, "HRA", "nf4"),
}


SEEN |= {
    "warm-up": _of("TT405", gpu.warm_up, "llama"),
    "forward": _of("TT404", gpu.full, "llama"),
    "elsewhere": _of("TT220", gpu.elsewhere, "llama", "linear", "mat2", "wrapper_CUDA_mm"),
    "merged-ia3": _of("TT309", further.merged_quantized, "IA3", "nf4", "llama"),
    "hotswap": _of("TT319", further.hotswapped, "llama", LAYER),
    # Not recognised at first sight; see the README of the tracebacks.
    "later-bad-index": _of("TT502", further.bad_index),
    "later-no-library": _of("TT106", further.no_library),
    "name-plain": _of("TT102", further.missing_name, "plain", older="TT311"),
    "old-driver": _of("TT103", gpu.old_driver),
    "own-code": _of("TT104", further.own_code),
    "no-such-folder": _of("TT105", further.nowhere, "folder"),
    "no-such-model": _of("TT105", further.nowhere, "model"),
    "cuda-library": _of("TT106", gpu.library_of_cuda, "19.4"),
    "load-and-dispatch": _of("TT218", further.loaded_and_dispatched, "mistral", LAYER),
    "adapter-bad-pickle": _of("TT302", further.wrong_adapter, "pickle"),
    "adapter-no-json": _of("TT302", further.wrong_adapter, "config is no JSON"),
    "adapter-no-kind": _of("TT302", further.wrong_adapter, "no kind"),
    "merged-ia3-int8": _of("TT309", further.merged_quantized, "IA3", "int8"),
    "name-in-batch": _of("TT311", further.missing_name, "generate"),
    "hotswap-gpt2": _of("TT319", further.hotswapped, "gpt2", "transformer.h.2"),
    "hotswap-mistral": _of("TT319", further.hotswapped, "mistral", LAYER),
    "no-config": _of("TT501", further.wrong_file, "no config"),
    "bad-pickle": _of("TT502", further.wrong_file, "pickle"),
    "config-no-json": _of("TT502", further.wrong_file, "config is no JSON"),
    "no-shard": _of("TT503", further.wrong_file, "no shard"),
    "replaced-int8": _of("TT511", further.replaced_weight, "mistral", "int8"),
    "saved-whole": _of(
        "TT511", further.kind_on_quantized, "lora", "nf4", modules_to_save=["down_proj"]
    ),
    "flex-gemma4": _of("TT608", failing.attention, "gemma4", "flex_attention"),
    "no-accelerate": _of("TT101", further.without_package, "accelerate", device_map={"": "cpu"}),
}

HELD_OUT = {
    # What was placed, placed again.
    "again-mistral": _of("TT212", further.second, "mistral", LAYER, older="TT215"),
    "again-phi3": _of("TT212", further.second, "phi3", LAYER, older="TT215"),
    "again-mixtral": _of("TT215", further.second, "mixtral", LAYER),
    "again-neox": _of("TT215", further.second, "neox", "gpt_neox.layers.2"),
    "again-opt": _of("TT212", further.second, "opt", "model.decoder.layers.2", older="TT215"),
    "again-t5": _of("TT212", further.second, "t5", "decoder.block.1", older="TT215"),
    "again-ia3": _of("TT212", further.second, "mistral", LAYER, "IA3", older="TT215"),
    "prefixed-qwen3": _of("TT215", failing.second_with_prefixed_map, "qwen3", LAYER),
    "prefixed-mistral": _of("TT215", failing.second_with_prefixed_map, "mistral", LAYER),
    "third-time": _of("TT212", further.unloaded_again, "mistral", LAYER, older="TT215"),
    "dora-by-transformers": _of("TT212", further.by_transformers, "qwen3", LAYER, "dora"),
    "shared-generate": _of(
        "TT216", further.shared_states, "model.language_model.layers.1", "generate"
    ),
    "shared-hidden": _of("TT216", further.shared_states, "model.language_model.layers.5", "call"),
    # Maps.
    "tied-on-disk": _of("TT213", further.second, "qwen2", "model.embed_tokens"),
    "catch-all-opt": _of("TT213", further.catch_all_linear, "opt", "model.decoder.layers.2"),
    "lacks-layer-scalar": _of(
        "TT202",
        further.map_without,
        "gemma4",
        f"{INNER}.layer_scalar",
        f"{INNER}.mlp",
    ),
    "lacks-head": _of("TT202", further.map_without, "phi3", "lm_head", LAYER),
    "map-int8": _of("TT219", further.quantized_map, "mistral", "int8", LAYER),
    "map-fp4": _of("TT219", further.quantized_map, "phi3", "fp4", LAYER),
    # Files.
    "empty": _of("TT502", further.wrong_file, "empty"),
    "grown": _of("TT502", further.wrong_file, "grown"),
    "no-such-adapter": _of("TT301", further.nowhere, "adapter"),
    # What is not installed, or not here.
    "no-bitsandbytes": _of(
        "TT101", further.without_package, "bitsandbytes", quant="nf4", device_map={"": "cpu"}
    ),
    "gpu-mistral": _of("TT103", failing.gpu_that_is_not_here, "mistral"),
    # Adapters.
    "targets-t5": _of("TT304", further.adapted, "t5", ["q_proj"]),
    "targets-neox": _of("TT304", further.adapted, "neox", ["q_proj", "v_proj"]),
    "targets-norm": _of("TT313", further.adapted, "mistral", ["norm"]),
    "targets-layers": _of("TT313", further.adapted, "phi3", ["layers"]),
    "of-mistral-on-neox": _of("TT304", further.of_another, "neox", "mistral"),
    "of-qwen2-on-gpt2": _of("TT304", further.of_another, "gpt2", "qwen2"),
    "resized-table": _of("TT306", further.resized, "mistral", modules_to_save=["embed_tokens"]),
    "resized-head": _of("TT306", further.resized, "qwen2", modules_to_save=["lm_head"]),
    "adapter-empty": _of("TT302", further.wrong_adapter, "empty"),
    "adapter-newer": _of("TT307", further.wrong_adapter, "newer"),
    "name-weighted": _of("TT311", further.missing_name, "weighted"),
    "name-taken": _of("TT311", further.taken_name),
    # Quantized layers.
    "merged-loha": _of("TT317", further.merged_quantized, "LoHa", "nf4"),
    "hra-phi3": _of("TT317", further.kind_on_quantized, "HRA", "fp4", "phi3"),
    "road-qwen2": _of("TT317", further.kind_on_quantized, "Road", "int8", "qwen2"),
    "ia3-mistral": _of("TT317", further.kind_on_quantized, "IA3", "fp4"),
    # As on a GPU.
    "warm-up-phi3": _of("TT405", gpu.warm_up, "phi3", "nf4"),
    "warm-up-adapter": _of("TT405", gpu.warm_up, "mistral", "none", "adapter"),
    "warm-up-int8": _of("TT405", gpu.warm_up, "mistral", "int8", "adapter", oldest="TT511"),
    "full-gpt2": _of("TT404", gpu.full, "gpt2", "scaled_dot_product_attention", False),
    "full-mistral": _of("TT404", gpu.full, "mistral", "embedding"),
    "else-index": _of(
        "TT220",
        gpu.elsewhere,
        "qwen2",
        "embedding",
        "index",
        "wrapper_CUDA__index_select",
        False,
    ),
    "else-two": _of("TT220", gpu.two_devices, "phi3", "linear", "mat2", "wrapper_CUDA_mm"),
    # Attention.
    "flash-opt": _of("TT101", failing.attention, "opt", "flash_attention_2"),
    "flash-neox": _of("TT101", failing.attention, "neox", "flash_attention_2"),
    "flash-t5": _of("TT608", failing.attention, "t5", "flash_attention_2"),
    "sdpa-t5": _of("TT608", failing.attention, "t5", "sdpa"),
    "nonsense-mistral": _of("TT608", failing.attention, "mistral", "nonsense"),
}

HELD_OUT |= {
    # The second round: made after what the first one missed was mended.
    "later-gemma2": _of("TT212", further.second, "gemma2", LAYER, older="TT215"),
    "later-falcon": _of("TT212", further.second, "falcon", "transformer.h.2", older="TT215"),
    "later-olmo2": _of("TT212", further.second, "olmo2", LAYER, older="TT215"),
    "later-merged": _of("TT212", failing.merged_offloaded, "gemma2", LAYER, older="TT215"),
    "later-generated": _of("TT212", failing.generated, "olmo2", LAYER, older="TT215"),
    "later-automatic": _of("TT214", failing.automatic, "falcon", "transformer.h.1", older="TT215"),
    "later-same-map": _of("TT214", failing.second_with_same_map, "phi3", LAYER, older="TT215"),
    "later-dora-added": _of("TT212", failing.added_to_offloaded, "mistral", LAYER, "dora"),
    "later-no-folder": _of("TT218", failing.nowhere_to_put, "falcon", "transformer.h.2"),
    "later-catch-all": _of("TT213", failing.catch_all, "gemma2", LAYER),
    "later-lacks-table": _of("TT202", further.map_without, "olmo2", "model.embed_tokens", LAYER),
    "later-auto-int8": _of("TT219", failing.auto_map_without_room, "mistral", "int8", 200_000),
    "later-gone-base": _of("TT105", further.gone_base),
    "later-adapter-as-base": _of("TT501", further.adapter_as_base),
    "later-bad-header": _of("TT502", further.bad_header),
    "later-adapter-bad-header": _of("TT302", further.bad_header, True),
    "later-too-old": _of("TT102", further.too_old),
    "later-cuda-device": _of("TT103", further.to_the_gpu, "map"),
    "later-pipeline": _of("TT103", further.to_the_gpu, "pipeline"),
    "later-new-class": _of("TT104", failing.new_architecture),
    "later-targets-falcon": _of("TT304", further.adapted, "falcon", "all_linear"),
    "later-projector": _of("TT313", further.adapted, "gemma3-vlm", ["multi_modal_projector"]),
    "later-rank-pattern": _of("TT306", further.rank_pattern, "olmo2"),
    "later-field": _of("TT307", failing.config_of_newer_peft, "AdaLoraConfig", newer_field=2),
    "later-kind": _of("TT307", failing.loaded_by_transformers, "gemma2", peft_type="MEGALORA"),
    "later-delete": _of("TT311", failing.unknown_adapter, "falcon", "delete_adapter"),
    "later-merged-ia3": _of("TT309", further.merged_quantized, "IA3", "fp4", "gemma2"),
    "later-lokr": _of("TT317", further.kind_on_quantized, "LoKr", "nf4-dq", "olmo2"),
    "later-randlora": _of("TT317", further.kind_on_quantized, "RandLora", "int8", "olmo2"),
    "later-packed": _of("TT513", failing.packed, 40, "nf4-dq"),
    "later-saved-fp4": _of("TT511", failing.state_of_offloaded, "fp4", older="TT512"),
    "later-placed-again": _of("TT211", failing.second_dispatch, "fp4-dq", older="TT512"),
    "later-norm": _of(
        "TT220", gpu.elsewhere, "falcon", "layer_norm", "weight", "wrapper_CUDA__layer_norm"
    ),
    "later-full": _of("TT404", gpu.full, "qwen3", "silu"),
    "later-warm-up": _of("TT405", gpu.warm_up, "qwen3-moe"),
    "later-flash": _of("TT101", failing.attention, "olmo2", "flash_attention_3"),
    "later-flex": _of("TT608", failing.attention, "t5", "flex_attention"),
    "later-shared": _of("TT216", further.shared_states, "model.language_model.layers.6", "call"),
}

HELD_OUT |= {
    # The third round: made after what the second one missed was mended.
    "third-starcoder2": _of("TT212", further.second, "starcoder2", LAYER, older="TT215"),
    "third-automatic": _of("TT214", failing.automatic, "olmo2", LAYER, older="TT215"),
    "third-merged-dora": _of(
        "TT212", failing.merged_offloaded, "gemma2", LAYER, "dora", older="TT215"
    ),
    "third-split-nf4": _of("TT219", failing.split_base, "olmo2", LAYER, "nf4-dq"),
    "third-lacks-norm": _of("TT202", further.map_without, "gemma2", "model.norm", LAYER),
    "third-catch-all": _of("TT213", failing.catch_all, "starcoder2", LAYER),
    "third-no-folder": _of("TT218", failing.nowhere_to_put, "gemma2", LAYER),
    "third-targets": _of("TT304", further.adapted, "starcoder2", ["query_key_value"]),
    "third-target-mlp": _of("TT313", further.adapted, "falcon", ["mlp"]),
    "third-of-another": _of("TT304", further.of_another, "t5", "mistral"),
    "third-resized": _of("TT306", further.resized, "olmo2", modules_to_save=["lm_head"]),
    "third-rank": _of("TT306", failing.adapter_of_another_size, "gemma2", "transformers", r=2),
    "third-empty": _of("TT302", further.wrong_adapter, "empty", "olmo2"),
    "third-cut-adapter": _of("TT302", further.cut_pickle, True),
    "third-cut-base": _of("TT502", further.cut_pickle),
    "third-field": _of("TT307", failing.config_of_newer_peft, "LoHaConfig", newer_field=2),
    "third-name": _of("TT311", failing.unknown_adapter, "olmo2"),
    "third-hra": _of("TT317", further.kind_on_quantized, "HRA", "nf4-dq", "gemma2"),
    "third-loha": _of("TT317", further.kind_on_quantized, "LoHa", "fp4-dq", "starcoder2"),
    "third-ia3": _of("TT317", further.kind_on_quantized, "IA3", "int8", "gemma2"),
    "third-merged": _of("TT309", further.merged_quantized, "IA3", "int8", "gemma2"),
    "third-packed": _of("TT513", failing.packed, 104, "fp4"),
    "third-two-devices": _of(
        "TT220", gpu.two_devices, "gemma2", "linear", "mat2", "wrapper_CUDA_mm"
    ),
    "third-full": _of("TT404", gpu.full, "falcon", "embedding"),
    "third-warm-up": _of("TT405", gpu.warm_up, "gemma2", "int8"),
    "third-flash": _of("TT101", failing.attention, "falcon", "flash_attention_2"),
    "third-no-bitsandbytes": _of(
        "TT101", further.without_package, "bitsandbytes", quant="int8", device_map={"": "cpu"}
    ),
    "third-nonsense": _of("TT608", failing.attention, "starcoder2", "nonsense"),
    "third-cuda": _of("TT103", further.to_the_gpu, "call"),
    "third-own-config": _of("TT104", further.own_config),
    "third-no-model": _of("TT105", further.nowhere, "config"),
    "third-dispatched": _of("TT211", failing.dispatched_quantized, "nf4-dq", older="TT512"),
    "third-shared": _of(
        "TT216", further.shared_states, "model.language_model.layers.0", "generate"
    ),
    "third-hotswap": _of("TT319", further.hotswapped, "phi3", LAYER),
    "third-library": _of("TT106", gpu.library_of_cuda, "13.9"),
}
