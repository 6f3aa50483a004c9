"""What torch tells of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def test_it_prints_a_line_of_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.diagnosis.probe"],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["torch"] == f"{torch.__version__}, CUDA {torch.version.cuda}"
    assert told["RAM"].endswith(" GB/s")
    assert told["disk, writing"].endswith(" GB/s")
