"""What other libraries say is kept off stdout, and is not said unless TRIMTAB_DEBUG is set."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

_LOGGERS = ("transformers", "peft", "accelerate", "bitsandbytes", "torch", "huggingface_hub")
SWITCHES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the environment, set where the user has not."""

if sys.platform == "linux":
    # Else torch's allocator holds up to a sixth more than it gives out. Two names: since torch 2.9
    # the second.
    for _name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        SWITCHES[_name] = "expandable_segments:True"


def debugging() -> bool:
    """Whether TRIMTAB_DEBUG asks for tracebacks and for what the libraries say."""
    return os.environ.get("TRIMTAB_DEBUG", "") not in ("", "0")


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """While inside, warnings, log lines and progress bars of other libraries do not show."""
    if debugging():
        yield
        return
    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        warnings.simplefilter("ignore")
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        for name, value in SWITCHES.items():
            if name not in os.environ:
                undo.callback(os.environ.pop, name, None)
                os.environ[name] = value
        yield


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """While inside, what a terminal or a file cannot hold is replaced, and what it is not sure to
    read comes as it is, for `text_of`."""
    with contextlib.ExitStack() as undo:
        for stream, errors in (
            (sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"),
        ):  # fmt: skip
            if isinstance(stream, io.TextIOWrapper):
                undo.callback(stream.reconfigure, errors=stream.errors)
                stream.reconfigure(errors=errors)
        yield


def text_of(read: str) -> str:
    """What was typed or read, as UTF-8 where the terminal's encoding did not say; what is none is
    replaced."""
    return read.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def engine() -> contextlib.redirect_stdout[TextIO]:
    """While inside, what is printed goes to stderr: stdout is for results alone."""
    return contextlib.redirect_stdout(sys.stderr)
