"""`trimtab chat`: messages and answers, the adapter switched in between."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from trimtab.cli import quiet
from trimtab.cli.options import Answering, spread


@spread(Answering)
def command(asked: Answering) -> int:
    """Talk with a model; /help lists the commands."""
    from trimtab.cli.session import opened
    from trimtab.cli.talk import Talk

    with opened(asked) as placed:
        talk = Talk(placed, asked.chosen(placed.adapters), asked.max_new_tokens, asked.json)
        if sys.stdin.isatty():
            _say(f"{placed.plan.model}; /help for commands, Ctrl-C stops an answer, Ctrl-D leaves")
            with _line_editing():
                talk.listen(_typed(talk))
            return 0
        talk.listen(quiet.text_of(line.rstrip("\r\n")) for line in sys.stdin)
        return 1 if talk.failed else 0


def _typed(talk: object) -> Iterator[str]:
    """Lines from the terminal, until Ctrl-D."""
    while True:
        try:
            yield _prompted(f"{talk}> ")
        except EOFError:
            _say("")
            return
        except KeyboardInterrupt:
            _say("\nCtrl-D or /quit leaves")


def _prompted(prompt: str) -> str:
    if sys.stdout.isatty():
        return quiet.text_of(input(prompt))
    # `input` would prompt on stdout, which goes to a file that is for answers.
    print(prompt, end="", file=sys.stderr, flush=True)
    return quiet.text_of(input())


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys and a history in `input`, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
