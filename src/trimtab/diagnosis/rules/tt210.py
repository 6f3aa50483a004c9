"""The page of TT210."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT210",
    seen="""
        A note of `trimtab check` or of a plan: a key of the map is read as another name, or a
        part rests elsewhere than the map says.
        """,
    why="""
        None of this is an error:

        - Keys with PEFT's prefix, or with one first component too many or too few, are read as
          the name that they can only mean.
        - Parameters of one dimension (norms, biases) stay on the device that runs: they are
          some kilobytes, and adapters read and train them.
        - A table that is tied to the head stays too: the head reads all of it for each token.
          There is one copy of it.
        - A table that is mapped to the disk rests in RAM when a GPU runs: a GPU reads rows from
          RAM, not from a file.
        - A unit whose parts are mapped to RAM and to the disk rests on the disk, since it moves
          as one.
        """,
    versions="""
        All.
        """,
    fix="""
        Nothing needs to be done. To see the result, `trimtab plan MODEL --device-map map.json`.
        """,
    library="trimtab",
)
