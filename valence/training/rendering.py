"""How rows become text and where answers end, in words: for `check`, `inspect` and the start of
training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from valence.config.schema import Data
from valence.data.encode import Encoder


def describe_rendering(encoder: Encoder, data: Data) -> Iterator[str]:
    """A line about prompts of plain text, one about the chat template, and one about the tokens
    that end an answer.
    """
    if encoder.as_chat:
        yield (
            "plain-text prompts become one user message of the chat template (data.as_chat: "
            "false to train on raw text)"
        )
    else:
        yield "plain-text prompts stay raw text, without a chat template"
    yield f"chat template: {_template(encoder, data)}"
    names = [f"{encoder.tokenizer.convert_ids_to_tokens(i)} ({i})" for i in encoder.end_ids]
    yield f"answers end at {', '.join(names) or 'their maximum length: there is no end token'}"


def _template(encoder: Encoder, data: Data) -> str:
    if not encoder.template.exists:
        return "none"
    source = {None: "the tokenizer's own", "chatml": "chatml"}.get(
        data.chat_template, "from a file (data.chat_template)"
    )
    kwargs = encoder.template.kwargs
    return f"{source}, with {json.dumps(kwargs, ensure_ascii=False)}" if kwargs else source


def in_short(value: object) -> object:
    """A setting's value as a table shows it: of a text of several lines, such as a chat template,
    only its size.
    """
    if isinstance(value, str) and "\n" in value.strip():
        return f"(text of {len(value.splitlines())} lines)"
    return value
