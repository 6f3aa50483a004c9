"""What other libraries say is kept off stdout, and is not said unless TRIMTAB_DEBUG is set."""

from __future__ import annotations

import contextlib
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


def engine() -> contextlib.redirect_stdout[TextIO]:
    """While inside, what is printed goes to stderr: stdout is for results alone."""
    return contextlib.redirect_stdout(sys.stderr)
