"""Describe how rows are understood, how they become text, and where completions end."""

from __future__ import annotations

import json
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from valence.data.encode import Encoder
from valence.data.load import Loaded
from valence.types import Chat, Ids

PARTS = (
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "completions",
    "scores",
    "label",
    "score",
    "feedback",
)
"""Parts of an example that show how its row was read."""
MAX_LETTERS = 60


def describe_first_rows(loaded: Loaded, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Describe what the first row of each file was read as. tokenizer: for rows of token ids."""
    for file in loaded.files:
        rows = zip(loaded.sources, loaded.examples, strict=True)
        example = next((example for source, example in rows if source == file.path), None)
        parts = {name: getattr(example, name, None) for name in (*PARTS, "attributes")}
        described = (
            f"{name}: {_shorten(v, tokenizer)}"
            for name, v in parts.items()
            if v not in (None, {}, "")
        )
        if example is not None:
            yield f"first row of {file.path}\n  " + "\n  ".join(described)


def _shorten(part: object, tokenizer: PreTrainedTokenizerBase) -> str:
    """A part of an example on one line; of a chat, its last message."""
    if isinstance(part, tuple):
        return ", ".join(_shorten(item, tokenizer) for item in part)
    if isinstance(part, Ids):
        part = part.readable or str(tokenizer.decode(list(part.ids)))
    if isinstance(part, Chat):
        message = part.messages[-1]
        text = f"{message['role']}: {message.get('content') or message.get('tool_calls')}"
    else:
        text = ("up" if part else "down") if isinstance(part, bool) else str(part)
    text = " ".join(text.split())
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."


def describe_rendering(encoder: Encoder, chat_template: str | None) -> Iterator[str]:
    """Describe how plain-text prompts are rendered, the chat template, and the end tokens.

    chat_template: the setting ``data.chat_template``.
    """
    if encoder.as_chat:
        yield (
            "plain-text prompts become one user message of the chat template, transcripts its "
            "turns (data.as_chat: false to train on raw text)"
        )
    else:
        yield "plain-text prompts stay raw text, without a chat template"
    yield f"chat template: {_describe_template(encoder, chat_template)}"
    names = [f"{encoder.tokenizer.convert_ids_to_tokens(i)} ({i})" for i in encoder.end_ids]
    yield f"answers end at {', '.join(names) or 'their maximum length: there is no end token'}"


def _describe_template(encoder: Encoder, chat_template: str | None) -> str:
    if not encoder.template.exists:
        return "none"
    source = {None: "the tokenizer's own", "chatml": "chatml"}.get(
        chat_template, "from a file (data.chat_template)"
    )
    kwargs = encoder.template.kwargs
    return f"{source}, with {json.dumps(kwargs, ensure_ascii=False)}" if kwargs else source
