"""One answer of a placed model, written as it comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.cli import quiet
from trimtab.errors import RunningFault

if TYPE_CHECKING:
    from trimtab.placement import Placement

LONGEST = 200
"""Tokens of an answer, if nobody says how many."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of a character whose bytes have not all come."""


@dataclass
class Stream:
    """What transformers' `generate` hands each token to; `write` gets the text that is new.

    The whole answer is decoded each time, since the text of a token depends on its neighbours.
    """

    decode: Callable[[list[int]], str]
    write: Callable[[str], None]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    _prompt_seen: bool = False

    def put(self, value: Any) -> None:
        """Gets the prompt first, then each token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.tokens += [int(one) for one in value.reshape(-1)]
        said = self.decode(self.tokens)
        if said.startswith(self.text) and not said.endswith(UNFINISHED):
            self._advance(said)

    def end(self) -> None:
        said = self.decode(self.tokens)
        if said.startswith(self.text):
            self._advance(said)
        self.text = said

    def _advance(self, said: str) -> None:
        fresh, self.text = said[len(self.text) :], said
        if fresh:
            self.write(fresh)


def stream_for(placed: Placement, write: Callable[[str], None] = lambda text: None) -> Stream:
    tokenizer = placed.tokenizer
    return Stream(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), write)


def encode(
    placed: Placement, messages: str | list[dict[str, Any]], raw: bool = False
) -> dict[str, Any]:
    """Model inputs of a text or of messages; `raw`: of the text as it is, no chat template."""
    if not raw:
        return placed.encode(messages)
    encoded = placed.tokenizer(messages, return_tensors="pt")
    kept = ("input_ids", "attention_mask")
    return {key: value.to(placed.device) for key, value in encoded.items() if key in kept}


def room(placed: Placement, inputs: dict[str, Any], wished: int | None) -> int:
    """Tokens that an answer may have: those wished for (200), or what is left of the context.

    Raises:
        RunningFault: TT606, nothing is left.
    """
    prompt, context = int(inputs["input_ids"].shape[-1]), placed.plan.context
    if prompt >= context:
        raise RunningFault(
            "TT606",
            f"the prompt has {prompt} tokens, and {context} are planned for",
            fix="plan for more (--context); in a conversation, /reset forgets it",
        )
    return min(wished or LONGEST, context - prompt)


def generate(
    placed: Placement,
    inputs: dict[str, Any],
    stream: Stream,
    *,
    adapter: str | None,
    max_new_tokens: int,
    **options: Any,
) -> None:
    """Generates into `stream`, which has what came so far also when this is interrupted."""
    placed.check_length(inputs["input_ids"], max_new_tokens)
    with quiet.engine(), placed.running() as ran, placed.using(adapter) as model:
        model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=stream, **options)
        ran.tokens = len(stream.tokens)
