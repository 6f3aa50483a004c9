"""The script of a case, which is both what is run and what is handed out.

It needs the stock stack alone, works in a temporary folder, and prints objects in JSON: for each
answer its tokens, its first logits and where the parameters are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trimtab.repro.cases import STORED, Case, Subject, is_folder, words

TOKENS = 8
"""Tokens of an answer."""

WIDTH = 96
"""Characters of a line, where they are ours."""

_TINY = """\
torch.manual_seed(0)
config = {model_class}.config_class(**CONFIG)
model = {model_class}(config).to({dtype})
{tied}model.save_pretrained("model")
"""

_TIED = """\
# Head and table are one: with a large one each token predicts itself.
model.get_input_embeddings().weight.data.mul_(0.1)
"""

_TINY_ADAPTER = """\
model = get_peft_model(model, get_peft_config(ADAPTER))
for weight in model.parameters():
    if weight.requires_grad:
        torch.nn.init.normal_(weight, std=0.1)
model.save_pretrained("adapter", save_embedding_layers=False)
"""

_COPY = """\
# PEFT may rewrite a base that is on the disk: a copy.
shutil.copytree({source}, "model")
"""

_WATCH = """\
def stamps():
    return sorted((one.name, one.stat().st_mtime_ns) for one in Path("model").iterdir())


before = stamps()
atexit.register(lambda: print(json.dumps({"rewritten": stamps() != before})))
"""

_ANSWER = """\
def answer(model, **options):
    ids = torch.arange(8, 20)[None].to({here})
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens={tokens},
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    where = Counter(f"{{type(one).__name__}} {{one.device}}" for one in model.parameters())
    told = {{"tokens": out.sequences[0, ids.shape[1] :].tolist(), "parameters": where}}
    print(json.dumps({{**told, "logits": out.logits[0][0, :8].tolist()}}), flush=True)
"""

_PLAIN_KERNELS = """\
for module in model.modules():  # bitsandbytes repacks 4-bit weights in place on some CPUs
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False
"""

_TRIMTAB = """\
with trimtab.load(
    {model},
    {{"adapter": {adapter}}},
    quant="{quant}",
    dtype="{dtype}",
    context=64,
    disk={disk},
    device_map=MAP,
) as placed:
    answer(placed.model, cache_implementation="dynamic")
    rests = {{one.tier: one.measured for one in placed.report().tiers}}
    print(json.dumps({{"rests": rests}}))
"""


def script(subject: Subject, case: Case, quant: str) -> str:
    """The text of a case's script.

    Example:
        >>> print(script(subject, Case.ADAPTER, "nf4-dq"))  # doctest: +SKIP
    """
    return _Script(subject, case, quant).text()


class _Script:
    def __init__(self, subject: Subject, case: Case, quant: str) -> None:
        self.subject = subject
        self.case = case
        self.quant = quant
        self.split = case in (Case.SPLIT, Case.ADAPTER, Case.SAME_MAP)
        self.adapts = case is not Case.SPLIT
        self.copied = self.split and subject.on_disk
        self.dtype = f"torch.{subject.dtype}"
        here = subject.tiny is not None
        self.model = '"model"' if here or self.copied else "MODEL"
        self.adapter = '"adapter"' if here else "ADAPTER"

    def text(self) -> str:
        folders = " ".join(re.findall(r"^(\w+) = os.path", self._constants(), re.MULTILINE))
        use = f" Run it as: python {self.case.value}.py {folders}" if folders else ""
        parts = [
            f'"""{self.case.title}; {words(self.quant)}.\n\nMade by `trimtab repro`.{use}\n"""\n',
            self._imports(),
            self._constants(),
            "work = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)\n"
            "os.chdir(work.name)\n" + self._materials(),
            *([_WATCH] if self._watches() else ()),
            _ANSWER.format(here=literal(self.subject.here), tokens=TOKENS),
            *self._body(),
        ]
        text = "\n".join(parts)
        # Two blank lines around a function, as everybody writes them.
        return re.sub(r"\n+(def .*(?:\n    .*)+\n)\n*", r"\n\n\n\1\n\n", text)

    def _watches(self) -> bool:
        return self.copied and self.adapts

    def _imports(self) -> str:
        subject, tiny = self.subject, self.subject.tiny
        plain = {"json", "os", "tempfile"}
        plain |= {"atexit"} if self._watches() else set()
        plain |= {"shutil"} if self.copied and not tiny else set()
        plain |= {"sys"} if "sys.argv" in self._constants() else set()
        lines = [f"import {one}" for one in sorted(plain)] + ["from collections import Counter"]
        lines += ["from pathlib import Path"] if self._watches() else []
        lines += ["", "import torch"]
        if self.copied and not tiny and not is_folder(subject.model):
            lines.append("from huggingface_hub import snapshot_download")
        names = ["PeftModel"] if self.case in (Case.WHOLE, Case.ADAPTER, Case.SAME_MAP) else []
        names += ["get_peft_config", "get_peft_model"] if tiny and self.adapts else []
        lines += [f"from peft import {', '.join(names)}"] if names else []
        classes = [] if self.case is Case.TRIMTAB and not tiny else [subject.model_class]
        if self._quantizes() and self.case is not Case.TRIMTAB:
            classes.append("BitsAndBytesConfig")
        lines += [f"from transformers import {', '.join(sorted(classes))}"] if classes else []
        lines += ["", "import trimtab"] if self.case is Case.TRIMTAB else []
        return "\n".join(lines) + "\n"

    def _constants(self) -> str:
        subject, made = self.subject, ""
        if subject.tiny:
            made += _assigned("CONFIG", subject.tiny.config)
            made += _assigned("ADAPTER", subject.tiny.adapter) if self.adapts else ""
        else:
            given = iter(range(1, 3))
            for name, value in (("MODEL", subject.model), ("ADAPTER", subject.adapter)):
                if name == "ADAPTER" and not self.adapts:
                    continue
                said = f"os.path.abspath(sys.argv[{next(given)}])" if is_folder(value) else value
                made += f"{name} = {said if is_folder(value) else literal(said)}\n"
        if self.case is not Case.WHOLE:
            made += _assigned("MAP", subject.device_map)
        return made

    def _materials(self) -> str:
        subject = self.subject
        if subject.tiny:
            made = "\n" + _TINY.format(
                model_class=subject.model_class,
                dtype=self.dtype,
                tied=_TIED if subject.tiny.tied else "",
            )
            return made + _TINY_ADAPTER if self.adapts else made
        if not self.copied:
            return ""
        source = "MODEL" if is_folder(subject.model) else "snapshot_download(MODEL)"
        return _COPY.format(source=source)

    def _quantizes(self) -> bool:
        return self.quant not in ("none", STORED)

    def _body(self) -> list[str]:
        if self.case is Case.TRIMTAB:
            return [self._trimtab()]
        lines = self._base()
        if self.quant not in ("none", "int8") and self.subject.here == "cpu":
            lines += _PLAIN_KERNELS
        if self.case in (Case.WHOLE, Case.SPLIT):
            lines += "answer(model)\n"
        if self.adapts:
            further = ", device_map=MAP" if self.case is Case.SAME_MAP else ""
            further += ', offload_folder="again"' if self.copied else ""
            lines += f"model = PeftModel.from_pretrained(model, {self.adapter}{further})\n"
            lines += "answer(model)\n"
        return [lines]

    def _base(self) -> str:
        where = "MAP" if self.split else f'{{"": {literal(self.subject.here)}}}'
        lines = [self.model, f"dtype={self.dtype}", f"device_map={where}"]
        lines += ['offload_folder="offload"'] if self.copied else []
        if self._quantizes():
            fields = ["load_in_8bit=True"] if self.quant == "int8" else self._four_bit()
            if self.split:
                # Else transformers refuses a map with `cpu` or `disk` for a quantized model.
                fields.append("llm_int8_enable_fp32_cpu_offload=True")
            inner = "".join(f"        {one},\n" for one in fields)
            lines.append(f"quantization_config=BitsAndBytesConfig(\n{inner}    )")
        inner = "".join(f"    {one},\n" for one in lines)
        return f"model = {self.subject.model_class}.from_pretrained(\n{inner})\n"

    def _four_bit(self) -> list[str]:
        return [
            "load_in_4bit=True",
            f'bnb_4bit_quant_type="{self.quant.removesuffix("-dq")}"',
            f"bnb_4bit_use_double_quant={self.quant.endswith('-dq')}",
            f"bnb_4bit_compute_dtype={self.dtype}",
        ]

    def _trimtab(self) -> str:
        return _TRIMTAB.format(
            model=self.model,
            adapter=self.adapter,
            quant="auto" if self.quant == STORED else self.quant,
            dtype=self.subject.dtype,
            disk='"1TiB"' if self.subject.on_disk else None,
        )


def literal(value: Any, indent: int = 0, before: int = 0) -> str:
    """A value as Python, in lines of at most `WIDTH` characters, the first after `before` others.

    Example:
        >>> literal({"a": ["b", None]})
        '{"a": ["b", None]}'
    """
    if isinstance(value, Mapping):
        items = [(f"{literal(key)}: ", one) for key, one in value.items()]
    elif isinstance(value, list | tuple):
        items = [("", one) for one in value]
    else:
        return json.dumps(value) if isinstance(value, str) else repr(value)
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    line = opening + ", ".join(name + literal(one) for name, one in items) + closing
    if indent + before + len(line) < WIDTH and "\n" not in line:
        return line
    space = " " * (indent + 4)
    inner = "".join(f"{space}{name}{literal(one, indent + 4, len(name))},\n" for name, one in items)
    return f"{opening}\n{inner}{' ' * indent}{closing}"


def _assigned(name: str, value: Any) -> str:
    return f"{name} = {literal(value, before=len(name) + 3)}\n"
