"""KeyboardInterrupt at each line in turn, as Ctrl-C may come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any


class InterruptAtLine:
    """A tracer that raises at the nth line that the files named run."""

    def __init__(self, files: Collection[str | None], at: int) -> None:
        self._files, self._left, self.where = files, at, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(files: Collection[str | None], at: int, work: Callable[[], object]) -> str | None:
    """Where the work was interrupted, or None if it ended before."""
    tracer, before = InterruptAtLine(files, at), sys.gettrace()
    sys.settrace(tracer)
    try:
        work()
    except KeyboardInterrupt:
        return tracer.where
    finally:
        sys.settrace(before)
    return None


def at_each_line(files: Collection[str | None], work: Callable[[], object]) -> Iterator[str]:
    """Does the work again and again, interrupted a line later each time, and yields where."""
    for at in range(1, 5000):
        where = interrupted(files, at, work)
        if where is None:
            return
        yield where
    raise AssertionError("the work never ended")
