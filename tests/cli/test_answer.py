"""`trimtab.cli.answer`: text as it comes."""

from __future__ import annotations

import torch

from trimtab.cli.answer import Stream

PIECES = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: b""}


def streamed(*tokens: int) -> tuple[Stream, list[str]]:
    written: list[str] = []

    def decode(ids: list[int]) -> str:
        return b"".join(PIECES[one] for one in ids).decode(errors="replace")

    stream = Stream(decode, written.append)
    stream.put(torch.tensor([[7, 7, 7]]))
    for one in tokens:
        stream.put(torch.tensor([one]))
    return stream, written


def test_the_prompt_is_not_written() -> None:
    stream, written = streamed()
    stream.end()
    assert (stream.tokens, stream.text, written) == ([], "", [])


def test_a_character_waits_for_its_bytes() -> None:
    stream, written = streamed(1, 2, 3, 4, 5)
    stream.end()
    assert written == ["a", "é", " b"]
    assert (stream.text, stream.tokens) == ("aé b", [1, 2, 3, 4, 5])


def test_a_character_that_never_comes_whole() -> None:
    stream, written = streamed(1, 2)
    assert stream.text == "a"
    stream.end()
    assert "".join(written) == stream.text == "a\N{REPLACEMENT CHARACTER}"
