"""The state of a machine: built by hand, and this one's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trimtab.diagnosis import doctor
from trimtab.diagnosis.doctor import Health, examine, mask

GiB = 1 << 30
NEW = {
    "torch": "2.13.0+cu130",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
}
CARD = "NVIDIA GeForce RTX 3060, 12288, 11000, 580.10, 4, 16\n"


def machine(
    versions: Mapping[str, str] = NEW,
    smi: str | None = CARD,
    cuda: str = "13.0",
    probe: str | None = '{"RAM": "9.9 GB/s"}\n',
    libraries: tuple[str, ...] = ("libbitsandbytes_cuda130.so",),
    measure: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Health:
    def ask(arguments: list[str]) -> str | None:
        if arguments[0] == sys.executable:
            return probe
        if len(arguments) == 1:
            return f"| NVIDIA-SMI 580.10   CUDA Version: {cuda}  |"
        return smi

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_bitsandbytes_libraries", lambda: libraries)
        return examine(measure, versions.get, ask, environment or {})


def told(health: Health) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in health.findings]


def test_a_machine_that_is_right() -> None:
    health = machine()
    assert health.findings == ()
    assert health.system["CUDA of the driver"] == "13.0"
    (gpu,) = health.gpus
    assert (gpu["memory.total"], gpu["memory.free"]) == (12 * GiB, 11000 << 20)
    text = health.markdown()
    assert (
        "| GPU 0 | NVIDIA GeForce RTX 3060, 10.74 GiB of 12.00 GiB free, PCIe 4 x16, driver 580.10"
        in text
    )
    assert "| peft | 0.21.2 |" in text
    assert "| triton | not installed |" in text
    assert text.endswith("Nothing was found that is known to be bad.")


def test_known_faults_of_versions_are_notes() -> None:
    old = {**NEW, "peft": "0.18.1", "accelerate": "1.12.0", "transformers": "5.5.4"}
    assert told(machine(old)) == [("TT216", "note"), ("TT217", "note"), ("TT512", "note")]
    (_, peft, _) = machine(old).findings
    assert peft.what.startswith("peft 0.18.1 has a known fault without trimtab: PEFT's plan fails")
    assert peft.fix == 'pip install -U "peft>=0.19"'


def test_missing_and_old_packages() -> None:
    lacking = {"transformers": "4.57.0", "accelerate": "1.15.0"}
    assert told(machine(lacking)) == [("TT102", "error"), ("TT101", "error")]


@pytest.mark.parametrize(
    ("version", "cuda", "library", "codes"),
    [
        ("2.13.0+cpu", "13.0", "libbitsandbytes_cuda130.so", ["TT103"]),
        ("2.13.0+cu130", "12.4", "libbitsandbytes_cuda130.so", ["TT103"]),
        ("2.13.0+cu130", "13.0", "libbitsandbytes_cuda128.so", ["TT106"]),
        ("2.13.0+cu126", "13.0", "libbitsandbytes_cuda128.so", []),
        ("2.13.0", "13.0", "libbitsandbytes_cuda128.so", []),
    ],
)
def test_versions_of_cuda(version: str, cuda: str, library: str, codes: list[str]) -> None:
    health = machine({**NEW, "torch": version}, cuda=cuda, libraries=(library,))
    assert [code for code, _ in told(health)] == codes


@pytest.mark.parametrize("smi", [None, "failed: no driver", "odd, line\n"])
def test_without_a_gpu(smi: str | None) -> None:
    health = machine({**NEW, "torch": "2.13.0+cpu"}, smi=smi)
    assert (health.gpus, health.findings) == ((), ())
    assert "| GPU | none that the driver tells of |" in health.markdown()


def test_what_torch_tells() -> None:
    assert machine(measure=True).measured == {"RAM": "9.9 GB/s"}
    assert "| RAM | 9.9 GB/s |" in machine(measure=True).markdown()


@pytest.mark.parametrize(
    ("probe", "what"),
    [
        (None, "torch does not work: it took too long"),
        (
            f"failed: Traceback\nImportError: {Path.home()}/x/libcudart.so.13: cannot open",
            "torch does not work: ImportError: ~/x/libcudart.so.13: cannot open",
        ),
    ],
)
def test_a_torch_that_is_broken(probe: str | None, what: str) -> None:
    health = machine(measure=True, probe=probe)
    assert [(one.code, one.what) for one in health.findings] == [("TT106", what)]


def test_variables_are_masked(tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--a--b").mkdir(parents=True)
    health = machine(
        environment={
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "hf_abcdefghijkl",
            "HF_ENDPOINT": "https://me:secret@mirror",
            "HOME": "/elsewhere",
        }
    )
    assert health.variables["HF_TOKEN"] == "set"
    assert health.variables["HF_ENDPOINT"] == "https://***@mirror"
    assert "HOME" not in health.variables
    assert ": 1 models, " in health.folders["hub cache"]
    assert "secret" not in health.markdown()


def test_rewritten_checkpoints_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, in the tree that is left of an absolute path, and in the hub's cache."""
    names = {"base_model.model.model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}
    files = ("here/base/model.safetensors", "here/home/me/x/y/model-00001-of-00002.safetensors")
    files += ("hub/models--a--b/snapshots/abc/model.safetensors",)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        safetensors.torch.save_file(names, tmp_path / name)
    # Adapters have such names by right; what is damaged otherwise is not looked at.
    safetensors.torch.save_file(names, tmp_path / "here/base/adapter_model.safetensors")
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "here/model.safetensors")
    (tmp_path / "here/home/model.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "here")
    found = machine(environment={"HF_HOME": str(tmp_path)}).findings
    assert [(one.code, one.severity, one.confidence) for one in found] == [
        ("TT507", "error", "likely")
    ] * 3
    assert found[0].what == (
        "tensors of base/model.safetensors have names that begin with 'base_model.model.'"
    )
    assert found[2].what.split()[2] == str(tmp_path / files[2])
    monkeypatch.setattr(doctor, "FOLDERS", 2)
    found = machine(environment={"HF_HOME": str(tmp_path)}).findings
    assert [one.what.split()[2] for one in found] == ["base/model.safetensors"]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"{Path.home()}/models", "~/models"),
        ("/home/jane/models and /Users/jane", "/home/***/models and /Users/***"),
        (r"C:\Users\Jane\x", r"C:\Users\***\x"),
        ("token=hf_abcdefghijkl.", "token=hf_***."),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_masks(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_this_machine() -> None:
    health = examine()
    assert health.versions["transformers"]
    assert "CPU" in health.markdown() or "GPU" in health.markdown()
