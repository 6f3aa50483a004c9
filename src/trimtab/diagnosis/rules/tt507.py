"""The page of TT507."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule

RULE = Rule(
    code="TT507",
    seen="""
        Tensors of a base checkpoint have names that begin with `base_model.model.`, and the
        stock stack fails with a `KeyError` or finds no weights. The file was right once.
        """,
    why="""
        `PeftModel.from_pretrained` on a base whose layers are offloaded to the disk renames the
        offloaded tensors and writes the adapter's among them. Where the base was named by a
        relative path (`./my-model`), it writes that over the base's own `model.safetensors`,
        also when the call succeeds. Named by an absolute path, it leaves a copy in a tree of
        folders under the current one.
        """,
    versions="""
        Seen with transformers 5.24 and peft 0.21.2. trimtab never writes to a base.
        """,
    fix="""
        Restore the file from its source: `hf download --force-download OWNER/NAME`, or a
        backup. If there is none, the base's tensors are still in it, under new names; this
        writes them to a new file:

        ```python
        from safetensors.torch import load_file, save_file

        names = load_file("my-model/model.safetensors")
        base = {name: one for name, one in names.items() if ".lora_" not in name}
        renamed = {
            name.removeprefix("base_model.model.").replace(".base_layer.", "."): one.contiguous()
            for name, one in base.items()
        }
        save_file(renamed, "restored.safetensors", metadata={"format": "pt"})
        ```

        For a model in shards, do this with each shard that was rewritten. Run `trimtab check`
        on the result before you use it.
        """,
    library="peft",
    not_helping="""
        Loading it with `strict=False`: no name matches.
        """,
)
