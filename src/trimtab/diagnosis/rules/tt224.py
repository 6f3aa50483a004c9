"""The page of TT224."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT224",
    seen="""
        A model with layers on the disk is called in a process that was forked after the model was
        loaded: a worker of a web server that loads before it forks, or of `multiprocessing`.
        """,
    why="""
        Threads read the layers from the disk, and a fork copies only the thread that forks. Without
        this error the call would wait for ever.
        """,
    versions="""
        All. What is all in memory may be called in a forked process, where no GPU runs.
        """,
    fix="""
        Load the model in the process that uses it, after the fork; one placement for all requests
        needs the memory once.
        """,
    library="the program",
    not_helping="""
        Closing the placement in the forked process and going on: it belongs to the parent, whose
        files stay.
        """,
)
