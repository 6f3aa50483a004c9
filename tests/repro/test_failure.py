"""What is read out of a failure."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from trimtab.repro.failure import owner, read_failure

LIBRARY = sysconfig.get_path("purelib")
META = "NotImplementedError: Cannot copy out of meta tensor; no data!"


def frame(file: str, function: str) -> str:
    return f'  File "{file}", line 3, in {function}\n    code()\n    ^^^^^^\n'


def traceback(*frames: str, last: str = META) -> str:
    return "Traceback (most recent call last):\n" + "".join(frames) + last + "\n"


TEXT = traceback(
    frame("split-adapter.py", "<module>"),
    frame(f"{LIBRARY}/peft/peft_model.py", "load_adapter"),
    frame(f"{LIBRARY}/accelerate/big_modeling.py", "dispatch_model"),
    *[frame(f"{LIBRARY}/torch/nn/modules/module.py", "_apply")] * 5,
    frame(f"{LIBRARY}/torch/nn/modules/module.py", "convert"),
)


def test_a_known_failure() -> None:
    found = read_failure(f"a warning\n{TEXT}", {}, lambda package: None)
    assert found is not None
    assert (found.exception, found.message) == (
        "NotImplementedError",
        "Cannot copy out of meta tensor; no data!",
    )
    assert found.code == "TT212"
    assert found.library == "peft"
    assert found.why.startswith("accelerate keeps an offloaded weight elsewhere")


def test_the_innermost_frames_without_folders_and_repetitions() -> None:
    found = read_failure(TEXT, {}, lambda package: None)
    assert found is not None
    lines = [one for one in found.trace.splitlines() if one.startswith("  File")]
    assert lines == [
        '  File "split-adapter.py", line 3, in <module>',
        '  File "site-packages/peft/peft_model.py", line 3, in load_adapter',
        '  File "site-packages/accelerate/big_modeling.py", line 3, in dispatch_model',
        '  File "site-packages/torch/nn/modules/module.py", line 3, in _apply',
        '  File "site-packages/torch/nn/modules/module.py", line 3, in convert',
    ]
    assert found.trace.startswith("Traceback (most recent call last):\n  ...\n")
    assert found.trace.endswith(META)


def test_an_unknown_failure_is_likely_that_of_the_innermost_library() -> None:
    text = traceback(
        frame("whole.py", "<module>"),
        frame(f"{LIBRARY}/transformers/strange.py", "f"),
        last="ValueError: never seen",
    )
    found = read_failure(text, {}, lambda package: None)
    assert found is not None
    assert found.code == ""
    assert found.library == "transformers"
    assert found.why == "The innermost frame lies there, in transformers/strange.py:f."


def test_nothing_tells_of_this_machine() -> None:
    home = Path.home()
    text = traceback(
        frame("/tmp/trimtab-repro-ab12/split.py", "<module>"),
        frame(f"{sys.prefix}/lib/thing.py", "f"),
        last=f"OSError: {home}/secret and /models/mine/config.json and /home/somebody/x",
    )
    found = read_failure(text, {"/models/mine": "MODEL"}, lambda package: None)
    assert found is not None
    assert found.message == "~/secret and MODEL/config.json and /home/***/x"
    assert '"split.py"' in found.trace
    assert sys.prefix not in found.trace


def test_the_cause_of_an_exception_is_read_with_it() -> None:
    text = (
        "Traceback (most recent call last):\n  File \"old.py\", line 1, in f\nKeyError: 'old'\n\n"
        + traceback(frame(f"{LIBRARY}/torch/a.py", "f"))
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + traceback(frame("split.py", "<module>"), last="RuntimeError: later")
    )
    found = read_failure(text, {}, lambda package: None)
    assert found is not None
    assert found.exception == "RuntimeError"
    assert "later" in found.trace
    assert "old.py" not in found.trace


def test_long_messages_are_cut() -> None:
    found = read_failure(traceback(last="ValueError: " + "x" * 5000), {}, lambda package: None)
    assert found is not None
    assert len(found.message) < 320
    assert len(found.trace) < 500


def test_no_traceback() -> None:
    assert read_failure("Killed\n", {}, lambda package: None) is None


def test_owners() -> None:
    assert owner("TT221")[0] == "peft"
    assert owner("") == ("", "")
