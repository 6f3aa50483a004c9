"""Makes tests/diagnosis/tracebacks on the installed stack: `python scripts/make_tracebacks.py`.

Each situation is run in a process and a folder of its own, and what Python prints of its failure is
kept, with the paths of this machine replaced. Run it once in each of the stacks that are tested. A
situation that does not fail on the installed versions leaves no file. `seen`: what the rules were
written with. `held_out`: what they were not. `unrelated`: what must match nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # a process that was forked has no threads
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
PROJECT = Path(__file__).resolve().parent.parent
TARGET = PROJECT / "tests" / "diagnosis" / "tracebacks"
sys.path.insert(0, str(PROJECT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402

import failing_situations as failing  # noqa: E402
import tiny  # noqa: E402
from unrelated_situations import UNRELATED  # noqa: E402

LAYER = "model.layers.2"
INNER = "model.language_model.layers.2"


@dataclass(frozen=True)
class Situation:
    """What is run, the code it should get, and the one on stacks before transformers 5.10."""

    run: Callable[[], object]
    code: str
    older: str = ""


def _of(code: str, run: Callable[..., object], *given: object, **named: object) -> Situation:
    older = str(named.pop("older", code))
    return Situation(partial(run, *given, **named), code, older)


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
HELD_OUT = {
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


def main() -> None:
    """Replaces the files of the installed stack; `names` on the command line are all by default."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    older = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 10)
    names = sys.argv[1:]
    for folder, situations in (("seen", SEEN), ("held_out", HELD_OUT)):
        for name, one in situations.items():
            label = f"{one.older if older else one.code}-{name}"
            _keep(folder, label, one.run, names)
    for name, run in ({} if older else UNRELATED).items():
        _keep("unrelated", name, run, names)


def _keep(folder: str, name: str, run: Callable[[], object], names: list[str]) -> None:
    if names and not any(one in name for one in names):
        return
    told = _failure(run)
    if "this transformers has no Gemma 4" in told or "cannot import name 'Gemma4" in told:
        told = ""
    print(f"{folder}/{name}: {told.strip().splitlines()[-1][:100] if told else 'no failure'}")
    file = TARGET / folder / f"{name}-{transformers.__version__}.txt"
    file.unlink(missing_ok=True)
    if told:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(told, encoding="utf-8")


def _failure(run: Callable[[], object]) -> str:
    """What Python prints of the failure, from a process of its own; empty if there is none."""
    reading, writing = os.pipe()
    folder = Path(tempfile.mkdtemp())
    if not (child := os.fork()):
        os.chdir(folder)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                run()
                told = ""
            except BaseException as error:
                own = error.__traceback__
                told = "".join(
                    traceback.format_exception(error.with_traceback(own and own.tb_next))
                )
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    shutil.rmtree(folder)
    return _anonymous(told, folder)


def _anonymous(text: str, folder: Path) -> str:
    places = {
        str(folder.resolve()): "/home/user/work",
        str(PROJECT / "scripts" / "failing_situations.py"): "/home/user/work/run.py",
        str(PROJECT / "scripts" / "unrelated_situations.py"): "/home/user/work/run.py",
        str(PROJECT): "/home/user/work",
        str(tiny.checkpoint("llama").parent): "/home/user/models",
        sysconfig.get_path("purelib"): "/home/user/venv/lib/python3.11/site-packages",
        sysconfig.get_path("stdlib"): "/usr/lib/python3.11",
        sys.prefix: "/home/user/venv",
    }
    for here, there in places.items():
        text = text.replace(here, there)
    return text


if __name__ == "__main__":
    main()
