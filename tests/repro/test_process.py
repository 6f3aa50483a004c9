"""Scripts in processes of their own: what they print, how they end, what is left of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from trimtab.repro.process import Ran, run

CHILD = """\
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"child": child.pid}), flush=True)
"""


def ran(text: str, limit: float = 60, arguments: tuple[str, ...] = ()) -> Ran:
    return run([sys.executable], text, "one.py", arguments, limit)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    """A killed process may take a moment until its parent has seen it."""
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_what_it_prints() -> None:
    done = ran('print("noise"); print(\'{"a": 1}\'); print("{no"); print(\'{"b": NaN}\')')
    assert done.status == 0
    assert done.told[0] == {"a": 1}
    assert list(done.told[1]) == ["b"]
    assert len(done.told) == 2


def test_how_it_fails() -> None:
    done = ran("import sys; print({}['x'])")
    assert done.status == 1
    assert done.stderr.endswith("KeyError: 'x'\n")
    assert "one.py" in done.stderr


def test_it_is_stopped_with_all_that_it_started() -> None:
    done = ran(CHILD + "time.sleep(600)", limit=3)
    assert done.status is None
    assert gone(done.told[0]["child"])


def test_what_it_leaves_running_is_stopped_too() -> None:
    if sys.platform == "win32":
        pytest.skip("an orphan is not found there")
    done = ran(CHILD)
    assert done.status == 0
    assert gone(done.told[0]["child"])


def test_it_works_in_a_folder_of_its_own_that_is_removed() -> None:
    code = (
        "import json, os, sys, tempfile\n"
        "open('left', 'w').close()\n"
        "os.makedirs(os.path.join(tempfile.gettempdir(), 'left-too'))\n"
        "print(json.dumps({'here': os.getcwd(), 'args': sys.argv[1:]}))"
    )
    done = ran(code, arguments=("one", "two"))
    assert done.told[0]["args"] == ["one", "two"]
    here = Path(done.told[0]["here"])
    assert here != Path.cwd()
    assert not here.exists()


def test_its_environment() -> None:
    code = "import json, os; print(json.dumps({'x': os.environ.get('X'), 'y': os.environ['Y']}))"
    own = {name: one for name, one in os.environ.items() if name != "X"}
    done = run([sys.executable], code, "one.py", [], 60, {**own, "Y": "2"})
    assert done.told == ({"x": None, "y": "2"},)
