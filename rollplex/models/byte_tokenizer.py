"""A byte-level tokenizer and a chat template in Qwen's format, for models without a trained tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKEN_IDS = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# Qwen's chat format. Unlike the published template it adds no default system message: at one token per byte the
# prompt would be three times as long.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


INTERNVL = {
    "<|vision_start|>": "<img>", "<|vision_end|>": "</img>",
    "<|image_pad|>": "<IMG_CONTEXT>", "<|video_pad|>": "<video>",
}  # fmt: skip
LLAVA_ONEVISION = {"<|image_pad|>": "<image>", "<|video_pad|>": "<video>"}
"""Names of special tokens in other families; their ids stay."""

_IMAGE, _VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
QWEN3_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(_VIDEO, "<|video_pad|>")
LLAVA_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(_IMAGE, "<image>").replace(_VIDEO, "<video>")
INTERNVL_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(_IMAGE, "<IMG_CONTEXT>\\n").replace(_VIDEO, "<video>\\n")
"""Media by one token where the family's processor adds what stands around it."""


def byte_tokenizer(names: Mapping[str, str] | None = None, attributes: Mapping[str, str] | None = None) -> Any:
    """A byte-level tokenizer: token b is byte b, 256.. are `SPECIAL_TOKENS`. Any string round-trips.

    names: special tokens to call otherwise. attributes: what a family's processor looks for at its tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level pre-tokenizer shows printable bytes as themselves and the others as characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(b if b in printable else 256 + hidden.index(b)): b for b in range(256)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = [(names or {}).get(token, token) for token in SPECIAL_TOKENS]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[t for t in special if t not in ("<|im_end|>", "<|endoftext|>")],
        **({"model_specific_special_tokens": dict(attributes)} if attributes else {}),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )
