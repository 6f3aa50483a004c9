"""A folder that grows beside its place, and takes it when it is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from trimtab.errors import AdapterFault, MemoryFault
from trimtab.partial import RECORD, Partial, disk_faults


def finished(partial: Partial, name: str, content: str = "x") -> None:
    (partial.path / name).write_text(content)
    partial.finish(name)


def refused(out: Path, job: str = "job") -> str:
    with pytest.raises(AdapterFault) as caught:
        Partial(out, job)
    assert caught.value.code == "TT318"
    return caught.value.what


def test_it_takes_its_place_with_what_was_finished_and_nothing_else(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "out", "job")
    finished(partial, "a", "abc")
    assert not (tmp_path / "out").exists()
    partial.take_place()
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["a"]
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    partial = Partial(tmp_path / "out", "job")
    finished(partial, "a")
    partial.take_place()
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["a"]


def test_the_same_job_goes_on(tmp_path: Path) -> None:
    first = Partial(tmp_path / "out", "job")
    finished(first, "whole", "abc")
    (first.path / "begun").write_text("a")
    first.close()
    second = Partial(tmp_path / "out", "job")
    assert second.has("whole")
    assert not second.has("begun")
    (second.path / "whole").write_text("ab")  # shorter than it was
    assert not second.has("whole")
    second.close()


def test_another_job_does_not(tmp_path: Path) -> None:
    Partial(tmp_path / "out", "job").close()
    assert "out.partial is of another merge" in refused(tmp_path / "out", "other")


def test_two_at_a_time(tmp_path: Path) -> None:
    first = Partial(tmp_path / "out", "job")
    assert "another process is writing" in refused(tmp_path / "out")
    first.close()
    Partial(tmp_path / "out", "job").close()


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_a_place_that_is_taken(tmp_path: Path, taken: str) -> None:
    out = tmp_path / "out"
    if taken == "file":
        out.write_text("x")
    else:
        out.mkdir()
        (out / "x").write_text("x")
    assert str(out) in refused(out)
    assert not out.with_name("out.partial").exists()


def test_a_place_that_was_taken_meanwhile(tmp_path: Path) -> None:
    partial = Partial(tmp_path / "out", "job")
    finished(partial, "a")
    (tmp_path / "out").write_text("somebody else's")
    with pytest.raises(AdapterFault, match="TT318"):
        partial.take_place()
    assert (tmp_path / "out").read_text() == "somebody else's"
    assert partial.has("a")
    partial.close()


@pytest.mark.parametrize("record", [None, "", "[]", '{"job": "job"}'])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, record: str | None) -> None:
    folder = tmp_path / "out.partial"
    folder.mkdir()
    (folder / "theirs").write_text("x")
    if record is not None:
        (folder / RECORD).write_text(record)
    refused(tmp_path / "out")
    assert (folder / "theirs").read_text() == "x"


def test_a_folder_that_was_made_and_no_more_goes_on(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    partial = Partial(tmp_path / "out", "job")
    assert json.loads((partial.path / RECORD).read_text())["finished"] == {}
    partial.close()


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(MemoryFault) as caught, disk_faults(tmp_path / "new" / "out", free * 2):
        pytest.fail("it began")
    assert caught.value.code == "TT403"
    assert caught.value.parts["needed"] == free * 2


@pytest.mark.parametrize("resumes", [False, True])
def test_what_is_finished_is_kept_where_it_is(tmp_path: Path, resumes: bool) -> None:
    free = shutil.disk_usage(tmp_path).free
    with (
        pytest.raises(MemoryFault) as caught,
        disk_faults(tmp_path / "new", free * 2, resumes=resumes),
    ):
        pytest.fail("it began")
    assert ("what is finished is kept" in caught.value.fix) == resumes


@pytest.mark.parametrize(("number", "fault"), [("ENOSPC", MemoryFault), ("EACCES", OSError)])
def test_a_disk_that_fills(tmp_path: Path, number: str, fault: type[Exception]) -> None:
    with pytest.raises(fault), disk_faults(tmp_path, 1):
        raise OSError(getattr(errno, number), "it is said")


@pytest.mark.skipif(os.name != "posix", reason="only there a file that is open can be removed")
def test_nobody_can_take_the_folder_before_it_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = Partial(tmp_path / "out", "job")
    finished(partial, "one")
    own, seen = Partial.close, []

    def close(self: Partial) -> None:
        seen.append((self.path / "trimtab.lock").exists())
        own(self)

    monkeypatch.setattr(Partial, "close", close)
    partial.take_place()
    assert seen == [False]
