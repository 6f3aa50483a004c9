"""What a merge writes, which is whole or absent: a merge that was stopped goes on."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
import trimtab
from merged import different, in_memory, loaded
from trimtab.errors import AdapterFault, MemoryFault
from trimtab.merge import merge

# What PEFT says while it makes the adapters and the references.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_no_adapter_touches_keeps_its_bytes(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", shards=3)
    adapter = tiny.adapter(base, targets=["model.layers.0.self_attn.q_proj"])
    done = merge(base, adapter, tmp_path / "out")
    changed = []
    for file in done.files:
        before, after = load_file(base / file), load_file(tmp_path / "out" / file)
        assert list(before) == list(after)
        changed += [key for key in before if not torch.equal(before[key], after[key])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]
    assert (done.tensors, done.total) == (1, 57)
    same = [
        one for one in done.files if (base / one).read_bytes() == (done.folder / one).read_bytes()
    ]
    assert len(same) == len(done.files) - 1


def test_the_other_files(tmp_path: Path) -> None:
    base = tiny.writable(tiny.checkpoint("llama", shards=2), tmp_path)
    (base / "LICENSE").write_text("terms")
    (base / "README.md").write_text("the base's")
    (base / "notes.bin").write_bytes(b"no")
    adapter = tiny.adapter(tiny.checkpoint("llama", shards=2))
    done = merge(base, [adapter], tmp_path / "out", weights=[0.5])
    index = "model.safetensors.index.json"
    kept = {one.name for one in base.iterdir()} - {"notes.bin"}
    assert {one.name for one in done.folder.iterdir()} == kept
    for name in kept - {"README.md", index, *done.files}:
        assert (done.folder / name).read_bytes() == (base / name).read_bytes()
    held = [json.loads((one / index).read_text()) for one in (base, done.folder)]
    assert held[0]["weight_map"] == held[1]["weight_map"]
    assert held[1]["metadata"]["total_size"] == done.nbytes
    card = (done.folder / "README.md").read_text()
    assert f"| `{adapter}` | 0.5 |" in card
    assert f"`{base}` with these PEFT adapters" in card
    assert f"trimtab {trimtab.__version__}" in card


def test_a_merge_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.checkpoint("llama", shards=3)
    adapter = tiny.adapter(base)
    out = tmp_path / "out"
    written: list[str] = []

    def stop(file: str) -> None:
        written.append(file)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base, adapter, out, progress=stop)
    assert not out.exists()
    first = tmp_path / "out.partial" / written[0]
    before = first.stat().st_mtime_ns
    rest: list[str] = []
    done = merge(base, adapter, out, progress=rest.append)
    assert [*written, *rest] == list(done.files)
    assert (out / written[0]).stat().st_mtime_ns == before
    assert not (tmp_path / "out.partial").exists()
    assert different(loaded(out), in_memory(base, adapter)) == []


def test_a_merge_that_was_killed_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.changes import Changes

    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base)
    out = tmp_path / "out"
    left = [10]

    def value(self: Changes, key: str) -> torch.Tensor | None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return original(self, key)

    original = Changes.value
    monkeypatch.setattr(Changes, "value", value)
    with pytest.raises(KeyboardInterrupt):
        merge(base, adapter, out)
    names = {one.name for one in (tmp_path / "out.partial").iterdir()}
    assert names == {"trimtab-merge.json", "trimtab.lock"}
    monkeypatch.undo()
    merge(base, adapter, out)
    assert different(loaded(out), in_memory(base, adapter)) == []


def test_another_merge_does_not_go_on(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", shards=2)

    def stop(file: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base, tiny.adapter(base), tmp_path / "out", progress=stop)
    for adapter, weight in ((tiny.adapter(base, seed=2), 1.0), (tiny.adapter(base), 0.5)):
        with pytest.raises(AdapterFault, match="is of another merge") as caught:
            merge(base, [adapter], tmp_path / "out", weights=[weight])
        assert caught.value.code == "TT318"


def test_a_folder_that_is_taken(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama")
    adapter = tiny.adapter(base)
    (tmp_path / "empty").mkdir()
    merge(base, adapter, tmp_path / "empty")
    with pytest.raises(AdapterFault, match="is there already and not empty") as caught:
        merge(base, adapter, tmp_path / "empty")
    assert caught.value.code == "TT318"
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine").write_text("")
    with pytest.raises(AdapterFault, match="no merge that can go on"):
        merge(base, adapter, tmp_path / "other")
    assert (tmp_path / "other.partial" / "mine").exists()


def test_two_at_a_time(tmp_path: Path) -> None:
    base = tiny.checkpoint("llama", shards=2)
    adapter = tiny.adapter(base)

    def again(file: str) -> None:
        with pytest.raises(AdapterFault, match="another process is writing"):
            merge(base, adapter, tmp_path / "out")

    merge(base, adapter, tmp_path / "out", progress=again)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trimtab.partial

    base = tiny.checkpoint("llama", shards=2)
    adapter = tiny.adapter(base)

    def full(file: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MemoryFault, match="are free") as caught:
        merge(base, adapter, tmp_path / "out", progress=full)
    assert caught.value.code == "TT403"
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 10})
        patch.setattr(trimtab.partial.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(MemoryFault, match="10 B are free"):
            merge(base, adapter, tmp_path / "out")
    merge(base, adapter, tmp_path / "out")


def test_one_shard_with_an_index(tmp_path: Path) -> None:
    base = tiny.writable(tiny.checkpoint("llama"), tmp_path)
    shard = "model-00001-of-00001.safetensors"
    (base / "model.safetensors").rename(base / shard)
    names = dict.fromkeys(load_file(base / shard), shard)
    index = {"metadata": {}, "weight_map": names}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = tiny.adapter(tiny.checkpoint("llama"))
    assert merge(base, adapter, tmp_path / "out").files == (shard,)
    assert different(loaded(tmp_path / "out"), in_memory(base, adapter)) == []
