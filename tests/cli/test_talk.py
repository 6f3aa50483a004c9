"""`trimtab chat`: a scripted conversation, the adapter switched in between, answers stopped."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from trimtab.api import load
from trimtab.cli import chat, main
from trimtab.cli.answer import Stream
from trimtab.cli.talk import HELP, Talk
from trimtab.placement import Placement

TOKENS = 6
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def base() -> Path:
    return tiny.checkpoint("llama")


@pytest.fixture
def open_placed(base: Path) -> Iterator[Callable[[], Placement]]:
    """Makes placements with most layers streamed from the disk; they are closed at the end."""
    from trimtab.errors import DoesNotFit

    opened = []

    def make() -> Placement:
        options: dict[str, Any] = {"quant": "nf4", "context": 256, "disk": "1GiB"}
        adapters = {"sql": tiny.adapter(base)}
        with pytest.raises(DoesNotFit) as caught:
            load(base, adapters, cpu=1, **options)
        placed = load(base, adapters, cpu=caught.value.parts["smallest"], **options)
        opened.append(placed)
        return placed

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def scripted(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Chat:
    """Runs `trimtab chat` on lines of stdin; the exit code, stdout and stderr."""

    def run(lines: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        adapter = f"sql={tiny.adapter(base)}"
        asked = ["chat", str(base), "--adapter", adapter, "--context", "256", "--quant", "nf4"]
        status = main([*asked, "--max-new-tokens", str(TOKENS), *options])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def turns(*texts: str) -> list[dict[str, Any]]:
    """Messages, the user's and the model's in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def test_answers_keep_the_history(scripted: Chat, open_placed: Callable[[], Placement]) -> None:
    status, out, err = scripted("hello\n\nmore\n")
    assert (status, err) == (0, "")
    placed = open_placed()
    first = placed.generate(turns("hello"), adapter="sql", max_new_tokens=TOKENS)
    second = placed.generate(turns("hello", first, "more"), adapter="sql", max_new_tokens=TOKENS)
    assert out == f"{first}\n{second}\n"


def test_the_adapter_is_switched(scripted: Chat, open_placed: Callable[[], Placement]) -> None:
    lines = "/adapter base\nhello\n/reset\n/use sql\nhello\n"
    status, out, err = scripted(lines)
    placed = open_placed()
    answers = [
        placed.generate("hello", adapter=name, max_new_tokens=TOKENS) for name in (None, "sql")
    ]
    assert answers[0] != answers[1]
    assert (status, out) == (0, "".join(f"{one}\n" for one in answers))
    assert err == "base answers\nforgotten\nsql answers\n"


def test_each_message_is_an_object(scripted: Chat) -> None:
    lines = "hello\n/adapters\n/adapter base\nhello\n/plan\n/report\n/adapter nope\n"
    status, out, err = scripted(lines, "--json")
    first, adapters, second, plan, report, error = map(json.loads, out.splitlines())
    assert (status, err.splitlines()[0]) == (1, "base answers")
    assert list(first) == ["schema_version", "text", "tokens", "adapter", "stopped"]
    assert (first["adapter"], second["adapter"], first["stopped"]) == ("sql", None, False)
    assert len(first["tokens"]) == TOKENS
    assert adapters == {"schema_version": 1, "adapters": ["sql"], "active": "sql"}
    assert {"units", "totals"} <= set(plan)
    assert report["report"]["adapters"]["sql"]["modules"] == 42
    assert error["error"]["code"] == "TT311"


def test_commands_for_people(scripted: Chat) -> None:
    status, out, err = scripted("/adapters\n/report\n/plan\n/help\n/what\n/quit\nhello\n")
    assert status == 1
    assert out.startswith("  base\n* sql  42 modules\n")
    assert "adapter sql" in out
    assert "in running order" in out
    assert err == f"{HELP}\nthere is no /what; /help lists the commands\n"


def test_an_answer_fits_what_is_left_of_the_context(scripted: Chat) -> None:
    lines = "a\n/nothing\n" + "x" * 300 + "\n/reset\nb\n"
    status, out, _ = scripted(lines, "--max-new-tokens", "1000", "--json")
    first, error, second = map(json.loads, out.splitlines())
    assert len(first["tokens"]) <= 256
    assert (status, error["error"]["code"]) == (1, "TT606")
    assert "/reset" in error["error"]["fix"]
    assert second["tokens"]


def test_ctrl_c_stops_the_answer_and_not_the_program(
    open_placed: Callable[[], Placement],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = Stream.put

    def interrupted(self: Stream, value: Any) -> None:
        put(self, value)
        if len(self.tokens) == 3:
            raise KeyboardInterrupt

    talk = Talk(open_placed(), "sql", TOKENS)
    with monkeypatch.context() as patched:
        patched.setattr(Stream, "put", interrupted)
        talk.take("hello")
    said = capsys.readouterr()
    part = talk.messages[1]["content"]
    assert (said.out, said.err) == (f"{part}\n", "stopped\n")
    talk.take("more")
    fresh = open_placed().generate(
        turns("hello", part, "more"), adapter="sql", max_new_tokens=TOKENS
    )
    assert capsys.readouterr().out == f"{fresh}\n"
    assert fresh.startswith(talk.messages[-1]["content"])


def test_ctrl_c_inside_a_layer(
    open_placed: Callable[[], Placement],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed = open_placed()
    talk = Talk(placed, "sql", TOKENS)
    layer = placed.model.get_submodule("base_model.model.model.layers.3.mlp")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(interrupt)
    talk.take("hello")
    handle.remove()
    assert talk.messages == []
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "stopped\n")
    talk.take("hello")
    fresh = open_placed().generate("hello", adapter="sql", max_new_tokens=TOKENS)
    assert capsys.readouterr().out == f"{fresh}\n"


def test_an_error_does_not_end_the_conversation(
    open_placed: Callable[[], Placement],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed = open_placed()
    talk = Talk(placed, None, TOKENS)

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("once")

    with monkeypatch.context() as patched:
        patched.setattr(placed, "encode", fails)
        talk.listen(["hello"])
    talk.listen(["hello"])
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "error: unexpected: ZeroDivisionError: once"
    assert said.out == placed.generate("hello", adapter=None, max_new_tokens=TOKENS) + "\n"


def test_ctrl_c_at_the_prompt_and_ctrl_d(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: Iterator[str | type[BaseException]] = iter(["one", KeyboardInterrupt, "two", EOFError])

    def asked(prompt: str = "") -> str:
        given = next(typed)
        if isinstance(given, str):
            return given
        raise given

    monkeypatch.setattr("builtins.input", asked)
    assert list(chat._typed("sql")) == ["one", "two"]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "sql> sql> \nCtrl-D or /quit leaves\nsql> sql> \n"
