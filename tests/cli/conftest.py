"""What several commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny


@pytest.fixture
def base() -> Path:
    return tiny.checkpoint("llama")
