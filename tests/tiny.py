"""Small tokenizers and chat templates for tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = (
    "The sun is a star. The moon goes round the earth.",
    "You are a helpful assistant. What is the capital of France? Paris is the capital.",
    "user assistant system tool: hello, hello world! 1 + 1 = 2, and 2 + 2 = 4.",
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""End-of-turn token, and a newline after it."""

CHATML_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML that also prints tools and tool calls."""

INST = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
)
"""No generation prompt, the end-of-sequence token after a space, no system turn."""

BOS = "{{ bos_token }}" + CHATML
"""ChatML behind a printed beginning-of-sequence token."""

NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Plain text, without any end-of-turn token."""

LAST_UNSTRIPPED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'] | trim }}{% endif %}{{ "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Strips every turn but the last: a prompt that ends with a space renders differently once it is
answered.
"""


@cache
def _bpe(special: tuple[str, ...]) -> str:
    """A trained byte-level BPE tokenizer, as JSON: all bytes, the merges of CORPUS, and the special
    tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(
    template: str | None = CHATML,
    *,
    adds_bos: bool = False,
    chatml_tokens: bool = True,
    bos: bool = True,
    eos: bool = True,
) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of at most 400 entries, with ``<s>``, ``</s>`` and ``<pad>``.

    adds_bos: it puts ``<s>`` before plain text by itself. chatml_tokens: ChatML's markers are
    special tokens, and ``<|im_end|>`` is the end-of-sequence token. bos, eos: whether it has such
    tokens at all.
    """
    markers = ("<|im_start|>", "<|im_end|>") if chatml_tokens else ()
    tokenizer = Tokenizer.from_str(_bpe(("<pad>", "<s>", "</s>", *markers)))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    names = {"pad_token": "<pad>"}
    if bos:
        names["bos_token"] = "<s>"
    if eos:
        names["eos_token"] = "<|im_end|>" if chatml_tokens else "</s>"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = template
    return wrapped


MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c\n]{1,40}\uff5c>|</?(?:think|tool_call|seed:[a-z_]+|sop)>|<(?:start|end)_of_turn>"
    r"|\[/?[A-Z_]{2,24}\]|\[gMASK\]|<SPECIAL_\d+>"
)
"""Markup of published chat templates that is one token of their models."""


def tokenizer_of(template: str, *, eos: str, stops: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """A tiny tokenizer with a published chat template, whose markup and ``stops`` are special
    tokens of it.
    """
    tokenizer = tiny_tokenizer(template)
    names = dict.fromkeys((*MARKER.findall(template), eos, *stops))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [n for n in names if n not in tokenizer.get_vocab()]}
    )
    tokenizer.eos_token = eos
    return tokenizer
