"""The page of TT306."""

from __future__ import annotations

from trimtab.diagnosis.rule import Rule
from trimtab.diagnosis.sign import Sign

RULE = Rule(
    code="TT306",
    seen="""
        A tensor of the adapter has another shape than the model needs. The error has both.
        """,
    why="""
        For a table or a head: the adapter was trained after tokens were added, and the
        vocabulary was resized. For other modules: the adapter belongs to a model of another
        size, or the config's rank is not that of the file.
        """,
    versions="""
        All. Stock, the same is `size mismatch for base_model.model...` in a long
        `RuntimeError`.
        """,
    fix="""
        For a resized vocabulary: load the base in 16 bits, load the tokenizer that was saved
        with the adapter, `model.resize_token_embeddings(len(tokenizer))`, save the model, and
        use that as the base. Otherwise: use the base that the adapter was trained on.
        """,
    library="the adapter",
    not_helping="""
        `ignore_mismatched_sizes`: the tensors are left at random values. Resizing a model that
        is quantized or placed already.
        """,
    references=("huggingface/peft#2415",),
    signs=(
        Sign(r"size mismatch for base_model\.model\.(?!.*\.hada_)", ("RuntimeError",)),
        Sign(
            r"You set `ignore_mismatched_sizes` to `False`",
            ("RuntimeError",),
            through=r"^transformers/integrations/peft\.py:",
            alone=False,
        ),
    ),
)
