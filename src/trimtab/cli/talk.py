"""A conversation: its messages, the adapter that answers, and what a slash begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trimtab.cli.answer import encode, generate, room, stream_for
from trimtab.cli.options import BASE, adapter_named
from trimtab.cli.result import console, print_json
from trimtab.cli.verdict import tell

if TYPE_CHECKING:
    from trimtab.placement import Placement

HELP = """\
/adapter NAME   answer with that adapter from now on; base: with none (also /use)
/adapters       the adapters that are loaded
/plan           where each part of the model lives
/report         planned against measured memory
/reset          forget the conversation
/quit           leave (also Ctrl-D)"""


class Talk:
    """Takes lines, answers on stdout; notes and errors go to stderr.

    An answer that was stopped stays in the conversation as far as it came.
    """

    def __init__(
        self,
        placed: Placement,
        adapter: str | None,
        max_new_tokens: int | None = None,
        as_json: bool = False,
    ) -> None:
        self.adapter = adapter
        self.messages: list[dict[str, Any]] = []
        self.failed = False
        self._placed = placed
        self._max_new_tokens = max_new_tokens
        self._as_json = as_json
        self._commands: dict[str, Callable[[str], None]] = {
            "/adapter": self._choose,
            "/use": self._choose,
            "/adapters": self._adapters,
            "/plan": self._plan,
            "/report": self._report,
            "/reset": self._reset,
            "/help": self._help,
        }

    def __str__(self) -> str:
        return self.adapter or BASE

    def listen(self, lines: Iterable[str]) -> None:
        """Takes lines until they end or one of them is /quit."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if not text:
                continue
            try:
                self.take(text)
            except BrokenPipeError:
                raise
            except Exception as error:
                # Whatever it is, the conversation is worth more than an end.
                self.failed = True
                tell(error, as_json=self._as_json)

    def take(self, text: str) -> None:
        """A message, or a command.

        Raises:
            TrimtabError: what it says; the conversation is as it was.
        """
        name, _, rest = text.partition(" ")
        if name in self._commands:
            self._commands[name](rest.strip())
        elif name.startswith("/"):
            self.failed = True
            print(f"there is no {name}; /help lists the commands", file=sys.stderr)
        else:
            self._answer(text)

    def _answer(self, text: str) -> None:
        out = sys.stdout

        def write(fresh: str) -> None:
            if not self._as_json:
                out.write(fresh)
                out.flush()

        stream = stream_for(self._placed, write)
        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = encode(self._placed, messages)
        stopped = False
        try:
            generate(
                self._placed,
                inputs,
                stream,
                adapter=self.adapter,
                max_new_tokens=room(self._placed, inputs, self._max_new_tokens),
            )
        except KeyboardInterrupt:
            stopped = True
        finally:
            if not self._as_json and stream.tokens:
                print(flush=True)
        if stopped:
            print("stopped", file=sys.stderr)
        if stream.text:
            self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        if self._as_json:
            print_json(
                {
                    "text": stream.text,
                    "tokens": stream.tokens,
                    "adapter": self.adapter,
                    "stopped": stopped,
                }
            )

    def _choose(self, name: str) -> None:
        if name:
            self.adapter = adapter_named(name, self._placed.adapters)
        print(f"{self} answers", file=sys.stderr)

    def _adapters(self, _: str) -> None:
        if self._as_json:
            print_json({"adapters": list(self._placed.adapters), "active": self.adapter})
            return
        for name in (BASE, *self._placed.adapters):
            mark = "*" if name == str(self) else " "
            changed = self._placed.applied.get(name)
            print(f"{mark} {name}" + (f"  {len(changed.modules)} modules" if changed else ""))

    def _plan(self, _: str) -> None:
        from trimtab.cli.picture import draw

        if self._as_json:
            print_json(self._placed.plan.to_dict())
        else:
            draw(self._placed.plan, console())

    def _report(self, _: str) -> None:
        from trimtab.cli.measured import measured

        report = self._placed.report()
        if self._as_json:
            print_json({"report": report.to_dict()})
        else:
            console().print(measured(report))

    def _reset(self, _: str) -> None:
        self.messages = []
        print("forgotten", file=sys.stderr)

    def _help(self, _: str) -> None:
        print(HELP, file=sys.stderr)
