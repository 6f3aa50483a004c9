"""The page of TT201."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT201",
    seen="""
        A key of the device map matches no module, parameter or buffer of the model. The error
        names the nearest real names.
        """,
    why="""
        Maps travel between models and classes, whose modules have different names: Gemma 4 has
        `model.embed_vision` where other models have `model.multi_modal_projector`. Keys are
        compared by whole components: `model.layers.1` is not part of `model.layers.10`. Keys
        with the prefix of a PEFT model (`base_model.model.`), or with one first component too
        many or too few, are understood as they are meant.
        """,
    versions="""
        All. The stock stack warns about such a key at best. A map whose keys are all wrong and
        that names one device, such as `{"transformer": 0}` for a Llama, is not checked there at
        all: the model loads on the CPU without a word.
        """,
    fix="""
        Replace the key by one of the names in the error. `trimtab check MODEL --device-map
        map.json` lists all wrong keys at once, and with `--fix` prints a map without them.
        """,
    said=(r"The following device_map keys do not match any submodules in the model",),
    library="trimtab",
    not_helping="""
        Adding a key `""` for the rest: the wrong key stays wrong, and its module goes where the
        rest goes.
        """,
)
