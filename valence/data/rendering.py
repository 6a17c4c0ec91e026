"""Describe how rows become text and where completions end."""

from __future__ import annotations

import json
from collections.abc import Iterator

from valence.data.encode import Encoder


def describe_rendering(encoder: Encoder, chat_template: str | None) -> Iterator[str]:
    """Describe how plain-text prompts are rendered, the chat template, and the end tokens.

    chat_template: the setting ``data.chat_template``.
    """
    if encoder.as_chat:
        yield (
            "plain-text prompts become one user message of the chat template (data.as_chat: "
            "false to train on raw text)"
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
