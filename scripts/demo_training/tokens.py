"""A word-level tokenizer with Gemma 4's special tokens and a chat template."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from demo_training.sums import words

# The order gives the ids; the first four are Gemma's.
# fmt: off
SPECIAL = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>",
    "<|audio>", "<|audio|>", "<audio|>", "<|video|>",
]
# fmt: on
ID = {token: number for number, token in enumerate(SPECIAL)}
VOCABULARY = 256

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + ' ' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{{- part['text'] if part['type'] == 'text' else '<|' + part['type'] + '|>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model' -}}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for a word; what follows a hyphen is a token of its own, as in `vingt` `-deux`."""
    starts, tails = words()
    entries = [*SPECIAL, *(f"▁{word}" for word in ["user", "model", "system", *starts]), *tails]
    vocabulary = {token: number for number, token in enumerate(entries)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            # English tens end in "ty" and French ones do not: "forty-two" is read as "forty two".
            normalizers.Replace(Regex(r"(?<=ty)-"), " "),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split("-", "merged_with_next")]
    )
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(SPECIAL)
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ID["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
