"""Texts and messages become the model's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from trimtab.errors import RunningFault
from trimtab.prompts import Prompts, as_plain_text, is_text

CPU = torch.device("cpu")
PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w20 w21"}]}
]


@pytest.fixture
def prompts() -> Prompts:
    return Prompts(tiny.checkpoint("llama"))


def test_a_text_is_a_message_of_the_user(prompts: Prompts) -> None:
    text = prompts.tokenizer.decode(torch.arange(tiny.FIRST_WORD, tiny.FIRST_WORD + 3))
    said = prompts.encode(text, CPU)
    parts = prompts.encode([{"role": "user", "content": [{"type": "text", "text": text}]}], CPU)
    assert set(said) == {"input_ids", "attention_mask"}
    assert said["input_ids"].shape[0] == 1
    whole = prompts.encode([{"role": "user", "content": text}], CPU)
    assert torch.equal(said["input_ids"], whole["input_ids"])
    assert parts["input_ids"].shape[0] == 1


def test_without_a_chat_template_a_text_is_itself(prompts: Prompts) -> None:
    prompts.tokenizer.chat_template = None
    text = prompts.tokenizer.decode(torch.arange(tiny.FIRST_WORD, tiny.FIRST_WORD + 3))
    found = prompts.encode(text, CPU)["input_ids"]
    assert torch.equal(found, prompts.tokenizer(text, return_tensors="pt")["input_ids"])


@pytest.mark.parametrize(
    "config",
    # Older transformers make a tokenizer without words for a model that they know.
    [pytest.param('{"model_type": "llama"}', marks=pytest.mark.newest), "{}"],
)
def test_a_folder_without_a_tokenizer_is_said(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(RunningFault) as caught:
        Prompts(tmp_path).encode("hello", CPU)
    assert caught.value.code == "TT607"
    assert caught.value.what == f"{tmp_path} has no tokenizer that can be loaded"
    assert caught.value.why
    assert "\n" not in caught.value.why
    assert caught.value.fix == (
        "put the tokenizer's files beside its config, or give model.generate input_ids"
    )


def test_images_need_a_processor(prompts: Prompts) -> None:
    with pytest.raises(RunningFault) as caught:
        prompts.encode(PARTS, CPU)
    assert caught.value.code == "TT607"


def test_a_processor_gets_all_parts_and_gives_all_inputs(prompts: Prompts) -> None:
    class Processor:
        tokenizer = prompts.tokenizer

        def apply_chat_template(self, messages: Any, **how: Any) -> dict[str, torch.Tensor]:
            assert messages == PARTS
            assert how["add_generation_prompt"]
            return {"input_ids": torch.ones(1, 4), "pixel_values": torch.zeros(1, 3, 4, 4)}

    vars(prompts)["processor"] = Processor()
    assert set(prompts.encode(PARTS, CPU)) == {"input_ids", "pixel_values"}


def test_what_is_text() -> None:
    assert is_text([{"content": "a"}, {"content": [{"type": "text", "text": "b"}]}])
    assert not is_text(PARTS)
    assert as_plain_text([{"content": "a"}, {"content": [{"type": "text", "text": "b"}]}]) == "a\nb"


def test_a_message_without_content_has_no_text() -> None:
    """As a call of a tool has it."""
    called: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": []},
    ]
    assert is_text(called)
    assert as_plain_text(called) == "a\n\n"
