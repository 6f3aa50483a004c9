"""The page of TT223."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT223",
    seen="""
        A note of `trimtab check`. Without trimtab: with a key such as `model.layers.1`, the layers
        10 to 19 are put where layer 1 is, too; there is no error, or one of those of TT213.
        """,
    why="""
        The loader of transformers takes each key of a map for the beginning of a parameter's name,
        and of all keys that fit the one with most components, then the longest. `model.layers.1` is
        the beginning of `model.layers.10.mlp`, and has more components than `model` or `""`.
        accelerate, which puts the hooks on afterwards, and trimtab take keys by whole components.
        """,
    versions="""
        transformers 5.1 to 5.24. In a map that names every layer it does not show: the longer key
        wins.
        """,
    fix="""
        With trimtab nothing needs to be done. For use without it, a key for each layer: `trimtab
        check MODEL --device-map map.json --fix` writes such a map.
        """,
    library="transformers",
    not_helping="""
        A dot at the end of the key: it then matches no module in accelerate.
        """,
    foreign=True,
)
