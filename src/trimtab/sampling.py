"""transformers' loop of greedy decoding and sampling, with the host a token ahead of the device.

transformers asks the device after each token whether to stop, and prepares the next token when it
has the answer: meanwhile the link and the device wait. Here the answer is read a token later.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab import foreign_generate


def sample(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    streamer: Any = None,
    **inputs: Any,
) -> torch.Tensor:
    """The prompt and its answer, [batch, tokens]: a `custom_generate` of transformers' `generate`.

    The tokens are those of transformers' own loop, and of the next one that draws from the same
    generator. A token more is computed and dropped where a sequence ends before its longest length.

    Args:
        model: a decoder whose cache is among `inputs`.
        input_ids: the prompt, [batch, tokens].
        streamer: gets each token when it is known that it stays.
    """
    batch = input_ids.shape[0]
    unfinished = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
    ends = any(hasattr(one, "eos_token_id") for one in stopping_criteria)
    pad = foreign_generate.pad_token(generation_config) if ends else None
    longest = stopping_criteria.max_length
    told = Told(
        batch,
        input_ids.device,
        ahead=may_lag(stopping_criteria, logits_processor),
        streamer=streamer,
    )
    output = foreign_generate.prefill(model, input_ids, generation_config, inputs)
    with foreign_generate.decoding(model):
        while True:
            inputs = foreign_generate.longer_inputs(model, output, inputs)
            logits = output.logits[:, -1].to(copy=True, dtype=torch.float32)
            del output  # a prompt's logits are large
            scores = logits_processor(input_ids, logits)
            drawn = RandomState(scores.device) if generation_config.do_sample else None
            tokens = chosen(scores, generation_config.do_sample)
            if pad is not None:
                tokens = torch.where(unfinished, tokens, pad.to(tokens.device))
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            unfinished = unfinished & ~stopping_criteria(input_ids, None)
            dropped = told.token(tokens, unfinished)
            if dropped or told.all_finished or input_ids.shape[1] == longest:
                break
            output = model(
                **foreign_generate.step_inputs(model, input_ids, inputs), return_dict=True
            )
    told.end(dropped)
    if dropped and drawn is not None:
        drawn.restore()
    return input_ids[:, :-1] if dropped else input_ids


def chosen(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """A token for each row of scores, [batch, vocabulary]."""
    if do_sample:
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    return scores.argmax(dim=-1)


class RandomState:
    """Of the generator that tokens are drawn with, before the next draw."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()

    def restore(self) -> None:
        """As if it had not been drawn."""
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state, self._device)
        else:
            torch.set_rng_state(self._state)


def may_lag(stopping_criteria: Any, logits_processors: Any) -> bool:
    """Whether nothing is changed by asking both a token too often: they are stateless.

    A caller's own processor may keep count, and one that allows certain tokens may know none after
    the last.
    """
    from transformers import (
        EosTokenCriteria,
        MaxLengthCriteria,
        PrefixConstrainedLogitsProcessor,
    )

    return all(
        type(one) in (EosTokenCriteria, MaxLengthCriteria) for one in stopping_criteria
    ) and all(
        type(one).__module__.startswith("transformers.")
        and type(one) is not PrefixConstrainedLogitsProcessor
        for one in logits_processors
    )


class Told:
    """What the host knows of the tokens: with `ahead`, of all but the last.

    `all_finished` says that no sequence goes on after the last token that it knows.
    """

    def __init__(self, batch: int, device: torch.device, *, ahead: bool, streamer: Any) -> None:
        self._cuda = device.type == "cuda"
        self._ahead = ahead
        self._streamer = streamer
        self._notes = [
            torch.zeros(1 + batch, dtype=torch.long, device="cpu", pin_memory=self._cuda)
            for _ in range(2)
        ]
        self._noted: list[torch.cuda.Event | None] = [None, None]
        self._count = 0
        self.all_finished = False

    def token(self, tokens: torch.Tensor, unfinished: torch.Tensor) -> bool:
        """Notes a token for each row; True if the one before was the last, so this is none."""
        note = torch.cat([unfinished.any()[None], tokens])
        at = self._count % 2
        self._notes[at].copy_(note, non_blocking=True)
        if self._cuda:
            self._noted[at] = done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(tokens.device))
        self._count += 1
        if not self._ahead:
            self._read(at)
        elif self._count > 1:
            self._read(1 - at)
        return self._ahead and self.all_finished

    def end(self, dropped: bool) -> None:
        """Nothing comes any more; `dropped`: the last token is none."""
        if self._ahead and not dropped:
            self._read((self._count - 1) % 2)
        if self._streamer is not None:
            self._streamer.end()

    def _read(self, at: int) -> None:
        done = self._noted[at]
        if done is not None:
            done.synchronize()
        self.all_finished = not self._notes[at][0]
        if self._streamer is not None:
            self._streamer.put(self._notes[at][1:].clone())
