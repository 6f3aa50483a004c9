"""The page of TT403."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT403",
    seen="""
        The disk ran full while the files of the disk tier were made, or a merged checkpoint.
        """,
    why="""
        Each unit that rests on the disk has a file of its exact size, whose blocks are taken at
        once, so that a full disk is found before loading goes on. By default the files lie in
        the system's folder for temporary files, which may be small or in RAM.
        """,
    versions="""
        All.
        """,
    fix="""
        Free space, or name a folder on another disk (`disk_folder`, or the environment variable
        `TMPDIR`). What was written is removed; of a merge, whole files are kept, and the same
        command goes on with the next.
        """,
    library="the machine",
    not_helping="""
        A larger `--disk`: it is a limit, not a reservation.
        """,
)
