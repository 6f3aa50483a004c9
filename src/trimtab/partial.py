"""A folder that grows beside its place, and takes it when it is whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trimtab.disk import take_lock
from trimtab.errors import AdapterFault, MemoryFault, TrimtabError
from trimtab.memory import format_size

RECORD: Final = "trimtab-merge.json"
"""What is finished so far, and of which job; gone when the folder takes its place."""

_LOCK: Final = "trimtab.lock"


class Partial:
    """`DIR.partial`: files are finished one by one; a later call of the same job goes on.

    Args:
        out: where the folder is to be in the end; must not exist, or be empty.
        job: what the files are a function of.

    Raises:
        AdapterFault: TT318, something is there already.
    """

    kind = "merge"
    others = "another base, other adapters, weights or versions"

    def __init__(self, out: Path, job: str) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.partial")
        self._job = job
        self.finished: dict[str, int] = {}
        self.refuse_taken(out)
        if self.path.exists():
            self._go_on()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.path / _LOCK)
        except OSError as error:
            raise self.taken(
                f"{self.path} cannot be written: {error.strerror}", "name another folder"
            ) from error
        if self._lock is None:
            raise self.taken(f"another process is writing {self.path}", "wait for it")
        self._record()

    def has(self, name: str) -> bool:
        """Whether a file was finished, and is as long as it was then."""
        file = self.path / name
        return (
            name in self.finished and file.is_file() and file.stat().st_size == self.finished[name]
        )

    def finish(self, name: str) -> None:
        """Notes that a file is whole."""
        self.finished[name] = (self.path / name).stat().st_size
        self._record()

    def close(self) -> None:
        """Lets another process go on; what is finished stays."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def take_place(self) -> None:
        """The folder becomes `out`, all of it at once."""
        self.refuse_taken(self.out)
        if os.name == "posix":
            # While it is held: another process of the same job could take the folder.
            (self.path / _LOCK).unlink()
            self.close()
        else:
            self.close()
            (self.path / _LOCK).unlink()
        (self.path / RECORD).unlink()
        if self.out.exists():
            self.out.rmdir()
        self.path.rename(self.out)

    def _go_on(self) -> None:
        try:
            found = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
            job, finished = found["job"], dict(found["finished"])
        except (OSError, ValueError, KeyError, TypeError):
            if self.path.is_dir() and {one.name for one in self.path.iterdir()} <= {_LOCK}:
                return
            raise self.taken(
                f"{self.path} is there already, and no {self.kind} that can go on",
                "delete it, or write to another folder",
            ) from None
        if job != self._job:
            raise self.taken(
                f"{self.path} is of another {self.kind}: of {self.others}",
                "delete it, or write to another folder",
            )
        self.finished = {str(name): int(size) for name, size in finished.items()}

    def _record(self) -> None:
        fresh = self.path / f"{RECORD}.growing"
        fresh.write_text(json.dumps({"job": self._job, "finished": self.finished}), "utf-8")
        os.replace(fresh, self.path / RECORD)

    @classmethod
    def refuse_taken(cls, out: Path) -> None:
        """Raises if something is where the folder is to be in the end."""
        if out.is_dir() and not any(out.iterdir()):
            return
        if out.exists():
            raise cls.taken(
                f"{out} is there already" + (" and not empty" if out.is_dir() else ", and a file"),
                "name a folder that does not exist",
            )

    @staticmethod
    def taken(what: str, fix: str) -> TrimtabError:
        """The error that something is there already."""
        return AdapterFault("TT318", what, why="nothing is overwritten", fix=fix)


@contextlib.contextmanager
def disk_faults(folder: Path, needed: int, *, resumes: bool = False) -> Iterator[None]:
    """Says beforehand, and if it happens, that the disk is too small for `needed` bytes.

    Args:
        resumes: the same command goes on with what is not finished.

    Raises:
        MemoryFault: TT403.
    """
    near = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(near).free
    if free < needed:
        raise _full(folder, needed, free, resumes)
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise
        raise _full(folder, needed, shutil.disk_usage(near).free, resumes) from error


def _full(folder: Path, needed: int, free: int, resumes: bool) -> MemoryFault:
    kept = "; what is finished is kept and not written again" if resumes else ""
    return MemoryFault(
        "TT403",
        f"writing {folder} needs {format_size(needed)} more, and {format_size(free)} are free",
        fix=f"free space, or write to another disk{kept}",
        needed=needed,
        free=free,
    )
