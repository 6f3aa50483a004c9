"""Makes tests/diagnosis/tracebacks on the installed stack: `python scripts/make_tracebacks.py`.

Each situation is run in a process and a folder of its own, and what Python prints of its failure is
kept, with the paths of this machine replaced. Run it once in each of the stacks that are tested. A
situation that does not fail on the installed versions leaves no file. `seen`: what the rules were
written with. `held_out`: what they were not. `unrelated`: what must match nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # a process that was forked has no threads
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
PROJECT = Path(__file__).resolve().parent.parent
TARGET = PROJECT / "tests" / "diagnosis" / "tracebacks"
sys.path.insert(0, str(PROJECT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402

import tiny  # noqa: E402
from labelled_situations import HELD_OUT, SEEN  # noqa: E402
from other_models import add_models  # noqa: E402
from unrelated_situations import UNRELATED  # noqa: E402

AS_ON_A_GPU = re.compile(r"  File .*, in as_on_a_gpu\n(    .*\n)*")
"""The frame of a situation that raises what torch's own code raises on a GPU."""


def main() -> None:
    """Replaces the files of the installed stack; `names` on the command line are all by default."""
    torch.set_num_threads(1)
    add_models()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    older = version < (5, 10)
    names = sys.argv[1:]
    for folder, situations in (("seen", SEEN), ("held_out", HELD_OUT)):
        for name, one in situations.items():
            code = one.oldest if version < (5, 2) else one.older if older else one.code
            label = f"{code}-{name}"
            _keep(folder, label, one.run, names)
    for name, run in ({} if older else UNRELATED).items():
        _keep("unrelated", name, run, names)


def _keep(folder: str, name: str, run: Callable[[], object], names: list[str]) -> None:
    if names and not any(one in name for one in names):
        return
    told = _failure(run)
    if "this transformers has no Gemma 4" in told or "cannot import name 'Gemma4" in told:
        told = ""
    told = AS_ON_A_GPU.sub("", told)
    print(f"{folder}/{name}: {told.strip().splitlines()[-1][:100] if told else 'no failure'}")
    file = TARGET / folder / f"{name}-{transformers.__version__}.txt"
    file.unlink(missing_ok=True)
    if told:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(told, encoding="utf-8")


def _failure(run: Callable[[], object]) -> str:
    """What Python prints of the failure, from a process of its own; empty if there is none."""
    reading, writing = os.pipe()
    folder = Path(tempfile.mkdtemp())
    if not (child := os.fork()):
        os.chdir(folder)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                run()
                told = ""
            except BaseException as error:
                own = error.__traceback__
                told = "".join(
                    traceback.format_exception(error.with_traceback(own and own.tb_next))
                )
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    shutil.rmtree(folder)
    return _anonymous(told, folder)


def _anonymous(text: str, folder: Path) -> str:
    places = {
        str(folder.resolve()): "/home/user/work",
        str(PROJECT / "scripts" / "failing_situations.py"): "/home/user/work/run.py",
        str(PROJECT / "scripts" / "further_situations.py"): "/home/user/work/run.py",
        str(PROJECT / "scripts" / "gpu_situations.py"): "/home/user/work/run.py",
        str(PROJECT / "scripts" / "unrelated_situations.py"): "/home/user/work/run.py",
        str(PROJECT): "/home/user/work",
        str(tiny.checkpoint("llama").parent): "/home/user/models",
        sysconfig.get_path("purelib"): "/home/user/venv/lib/python3.11/site-packages",
        sysconfig.get_path("stdlib"): "/usr/lib/python3.11",
        sys.prefix: "/home/user/venv",
    }
    for here, there in places.items():
        text = text.replace(here, there)
    return text


if __name__ == "__main__":
    main()
