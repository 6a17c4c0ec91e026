"""Text and turns of a conversation, as feedback tools write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from valence.data.importers.fields import decode_json
from valence.data.importers.records import SkipReason
from valence.data.values import ROLES, TEXT_PARTS
from valence.types import Message

UI_BLOCK = re.compile(
    r'<details\b[^>]*\btype="(?:reasoning|tool_calls)"[^>]*>.*?(?:</details>\s*|\Z)', re.DOTALL
)
"""Blocks that Open WebUI writes into messages."""
THINK_BLOCK = re.compile(r"^[ \t]*<think>.*?(?:</think>\s*|\Z)", re.DOTALL | re.MULTILINE)
THINK_END = re.compile(r"\A(?:(?!<think>).)*?^[ \t]*</think>[ \t]*(?:\n\s*|\Z)", re.DOTALL | re.M)
"""Reasoning whose opening tag was part of the prompt."""
THOUGHT_PARTS = ("think", "thinking", "reasoning", "reasoningContent")
TOOL_PARTS = ("tool_call", "agent_update")
"""Parts that LibreChat writes about the work of an agent."""
FILE_PART = re.compile(r"image|file|video|audio|document", re.IGNORECASE)


class UnusableVote(Exception):
    """Something in an export gives no vote. reason, example: of its ``Skipped``."""

    def __init__(self, reason: SkipReason, example: object = "") -> None:
        super().__init__(reason)
        self.reason: SkipReason = reason
        self.example = str(example)[:80]


# Text


def text_of(content: object, *, keeps_reasoning: bool = False) -> str:
    """The text of a message: its content is text or a list of parts, of which text is joined.

    Blocks of reasoning and of tool calls are left out, unless ``keeps_reasoning``.
    Raises UnusableVote for images, files and unknown parts.
    """
    if content is None:
        return ""
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, list):
        parts = (part_text(part, keeps_reasoning=keeps_reasoning) for part in content)
        content = "\n".join(text for text in parts if text)
    if not isinstance(content, str):
        raise UnusableVote("shape_unknown", f"content is {content!r}")
    return content if keeps_reasoning else strip_reasoning(content)


def strip_reasoning(text: str) -> str:
    """The text without blocks of reasoning and of tool calls."""
    stripped = THINK_BLOCK.sub("", UI_BLOCK.sub("", text))
    stripped = THINK_END.sub("", stripped)
    return text if stripped == text else stripped.strip()


def part_text(part: object, *, keeps_reasoning: bool) -> str:
    """The text of one part of a message's content."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UnusableVote("shape_unknown", f"content part is {part!r}")
    kind = str(part.get("type") or next((name for name in part if part[name] is not None), ""))
    if kind in TEXT_PARTS:
        text = part.get("text")
        text = text.get("value") if isinstance(text, Mapping) else text
        if isinstance(text, str):
            return text
    if kind in THOUGHT_PARTS:
        thought = part.get(kind) or part.get("text")
        is_kept = keeps_reasoning and isinstance(thought, str)
        return f"<think>\n{thought}\n</think>\n" if is_kept else ""
    if kind in TOOL_PARTS:
        return ""
    if kind == "error":
        raise UnusableVote("failed", "content part of type error")
    if FILE_PART.search(kind) or kind in ("path", "component"):
        raise UnusableVote("image", f"content part of type {kind}")
    raise UnusableVote("shape_unknown", f"content part of type {kind}")


# Turns


def assistant(content: object, *, keeps_reasoning: bool = False) -> Message:
    """A completion. Raises UnusableVote when it is empty."""
    text = text_of(content, keeps_reasoning=keeps_reasoning)
    if not text.strip():
        raise UnusableVote("empty")
    return {"role": "assistant", "content": text}


def turns_of(
    messages: Iterable[object], *, role: str = "role", keeps_reasoning: bool = False
) -> tuple[Message, ...]:
    """Chat turns with the roles that chat templates know. role: the key of a turn's role.

    Reasoning is left out of the assistant's turns, unless ``keeps_reasoning``. Tool calls and their
    results are kept. Raises UnusableVote for turns in an unknown form, and for empty ones.
    """
    turns: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise UnusableVote("shape_unknown", f"turn is {message!r}")
        known_role = ROLES.get(str(message.get(role)))
        if known_role is None:
            raise UnusableVote("shape_unknown", f"role {message.get(role)}")
        keeps = keeps_reasoning or known_role != "assistant"
        content = text_of(message.get("content"), keeps_reasoning=keeps)
        extra = {
            name: message[name]
            for name in ("tool_calls", "tool_call_id", "name")
            if message.get(name)
        }
        if not content.strip() and known_role != "tool" and "tool_calls" not in extra:
            raise UnusableVote("shape_unknown", f"an earlier {known_role} turn is empty")
        turns.append({"role": known_role, "content": content, **extra})
    return tuple(turns)


def merge_turns(turns: Iterable[Message]) -> list[Message]:
    """The turns, in which messages of the assistant that follow each other are one."""
    merged: list[Message] = []
    for turn in turns:
        if merged and turn["role"] == merged[-1]["role"] == "assistant":
            text = f"{merged[-1]['content']}\n\n{turn['content']}"
            merged[-1] = {**merged[-1], "content": text}
        else:
            merged.append(turn)
    return merged


def prompt_of(value: object, *, keeps_reasoning: bool = False) -> tuple[Message, ...]:
    """The turns of a prompt that is text, a list of turns, or an object with ``messages``."""
    value = decode_json(value)
    if isinstance(value, Mapping) and "messages" in value:
        value = value["messages"]
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, list) and value:
        return turns_of(cast(list[object], value), keeps_reasoning=keeps_reasoning)
    raise UnusableVote("no_prompt")


def system_turn(text: object) -> tuple[Message, ...]:
    """The system prompt as a turn; none where it is empty."""
    return ({"role": "system", "content": text},) if isinstance(text, str) and text.strip() else ()


def branch(
    messages: Mapping[str, Mapping[str, Any]], message: str, parent_field: str
) -> list[Mapping[str, Any]]:
    """The messages that lead to one, from the root of a conversation's tree, and itself.

    Raises UnusableVote when one of them is missing.
    """
    if not message:
        raise UnusableVote("message_missing")
    path: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    while message:
        if message not in messages or message in seen:
            raise UnusableVote("no_conversation" if path else "message_missing", message)
        seen.add(message)
        path.append(messages[message])
        message = str(messages[message].get(parent_field) or "")
    return path[::-1]
