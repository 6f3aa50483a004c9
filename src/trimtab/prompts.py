"""Text and chat messages as model inputs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import RunningFault, first_line

if TYPE_CHECKING:
    import torch

Messages = list[dict[str, Any]]


class Prompts:
    """The processor or tokenizer of a checkpoint, loaded when it is first needed.

    `source` is the folder or hub name of the checkpoint.
    """

    def __init__(self, source: Path | str) -> None:
        self._source = source

    @cached_property
    def processor(self) -> Any:
        """The checkpoint's processor, or its tokenizer where it has none.

        Raises:
            RunningFault: TT607, if it has neither.
        """
        from transformers import AutoProcessor, AutoTokenizer

        try:
            return AutoProcessor.from_pretrained(self._source)
        except (OSError, ValueError, ImportError, KeyError):
            pass
        try:
            return AutoTokenizer.from_pretrained(self._source)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise RunningFault(
                "TT607",
                f"{self._source} has no tokenizer that can be loaded",
                why=first_line(error),
                fix="put the tokenizer's files beside its config, or give model.generate input_ids",
            ) from error

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def encode(self, messages: str | Messages, device: torch.device) -> dict[str, Any]:
        """Model inputs on `device`, `input_ids` of shape [1, tokens] among them.

        A text is one user message, where the model has a chat template.

        Raises:
            RunningFault: TT607, if there is no tokenizer, or the messages hold more than text and
                there is no processor.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not is_text(messages):
            encoded = self._with_parts(messages)
        elif getattr(self.tokenizer, "chat_template", None) is None:
            encoded = self.tokenizer(as_plain_text(messages), return_tensors="pt")
        else:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        kept = ("input_ids", "attention_mask") if is_text(messages) else tuple(encoded)
        return {name: encoded[name].to(device) for name in kept if name in encoded}

    def _with_parts(self, messages: Messages) -> Any:
        if self.processor is self.tokenizer:
            raise RunningFault(
                "TT607",
                f"the messages hold more than text, and {self._source} has no processor for it",
                fix="give model.generate its inputs yourself, or use a checkpoint with a processor",
            )
        return self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_tensors="pt",
            return_dict=True,
        )


def is_text(messages: Messages) -> bool:
    """Whether the contents are texts, or lists of parts that are; a call of a tool has none."""
    return all(
        isinstance(content, str) or all(part.get("type") == "text" for part in content)
        for content in map(_content, messages)
    )


def as_plain_text(messages: Messages) -> str:
    """Messages for a model without a chat template: their texts, a line each."""
    return "\n".join(
        content if isinstance(content, str) else "".join(part["text"] for part in content)
        for content in map(_content, messages)
    )


def _content(message: dict[str, Any]) -> str | list[dict[str, Any]]:
    return message.get("content") or ""
