"""Floors of the packages, as the project's metadata has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.diagnosis.versions import FLOORS, QUANTIZERS, check_versions, installed

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_floors_are_those_of_the_project() -> None:
    text = PROJECT.read_text(encoding="utf-8")
    for package, floor in {**FLOORS, **QUANTIZERS}.items():
        assert set(re.findall(rf'"{package}>=([\d.]+)"', text)) == {floor}


def test_what_is_installed_here_will_do() -> None:
    assert check_versions() == []
    assert installed("no-such-package-at-all") is None


@pytest.mark.parametrize("version", ["5.1.0", "5.1.0.dev0", "5.10", "6.0.0rc1", "5.1.0+local"])
def test_new_enough(version: str) -> None:
    assert check_versions("llama", {"transformers": version}.get) == [
        *check_versions("llama", {"transformers": "99"}.get)
    ]


@pytest.mark.parametrize("version", ["5.0.9", "4.57.1", "5"])
def test_too_old(version: str) -> None:
    have = {"transformers": version, "peft": "0.18.1", "accelerate": "1.12.0"}
    (one,) = check_versions("llama", have.get)
    assert one.code == "TT102"
    assert one.what == f"transformers {version} is installed, and trimtab needs at least 5.1.0"


def test_a_model_may_need_more() -> None:
    have = {"transformers": "5.4.0", "peft": "0.18.1", "accelerate": "1.12.0"}
    assert check_versions("llama", have.get) == []
    (one,) = check_versions("gemma4", have.get)
    assert one.what == "transformers 5.4.0 is installed, and a gemma4 model needs at least 5.5.0"


def test_a_missing_package_is_named_but_not_an_optional_one() -> None:
    found = check_versions("llama", {"transformers": "5.1.0", "accelerate": "1.12.0"}.get)
    assert [(one.code, one.what) for one in found] == [
        ("TT101", "the package peft is not installed")
    ]
