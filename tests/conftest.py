"""What holds for every test: no network, few threads, quiet libraries, the markers' meaning."""

from __future__ import annotations

import os

# Before any import of the libraries, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import fetch_smollm2  # of scripts/
from trimtab.disk import DiskFolder

torch.set_num_threads(1)  # same order of sums on every machine, and the tensors are tiny
transformers.utils.logging.disable_progress_bar()
# One line a matmul on a CPU, thousands in all.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    needs = {"gpu": "CUDA", "gpus": "a second GPU", "real": "the SmolLM2 checkpoint"}
    for marker, what in needs.items():
        parser.addoption(
            f"--require-{marker}",
            action="store_true",
            help=f"tests marked {marker} fail, instead of being skipped, where {what} is missing",
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        _miss(item, "gpu", "needs CUDA")
    if item.get_closest_marker("gpus") and torch.cuda.device_count() < 2:
        _miss(item, "gpus", "needs two GPUs")
    if item.get_closest_marker("real") and not fetch_smollm2.is_complete(_smollm2()):
        _miss(item, "real", "needs a checkpoint: python scripts/fetch_smollm2.py")


def _miss(item: pytest.Item, marker: str, why: str) -> None:
    if item.config.getoption(f"--require-{marker}"):
        pytest.fail(f"{why} (--require-{marker} was given)", pytrace=False)
    pytest.skip(why)


def _smollm2() -> Path:
    return Path(fetch_smollm2.default_folder())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, for tests marked `real`; not to be changed."""
    return _smollm2()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DiskFolder]:
    """A folder for slabs; closed in the end."""
    made = DiskFolder(tmp_path / "disk")
    yield made
    made.close()
