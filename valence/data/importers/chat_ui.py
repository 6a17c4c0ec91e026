"""Hugging Face's chat-ui: the Parquet export of the conversations whose users agreed to share.

It names neither raters nor models, and lists the messages of all branches of a conversation one
after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from valence.data.importers.exports import export_rows, votes_or_skipped
from valence.data.importers.fields import decode_json, objects_at, timestamp
from valence.data.importers.messages import assistant, turns_of, user_text
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote
from valence.data.sources import Row
from valence.data.values import as_number
from valence.types import content_id

SOURCE = "chat_ui"
CONTEXT_UPDATES = ("webSearch", "tool")
"""Types of a message's updates that gave the model text which the messages do not contain."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """A vote for each message with a score, and answers without one that a user message follows."""
    for row in export_rows(paths, "chat-ui", _is_row):
        if isinstance(row, Skipped):
            yield row
        else:
            yield from _conversation(row, options)


def _is_row(row: Mapping[str, Any]) -> bool:
    messages = decode_json(row.get("messages"))
    is_list = isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)
    return is_list and all("from" in message for message in messages)


def _conversation(row: Row, options: ReadOptions) -> Iterator[Vote | Skipped]:
    messages = decode_json(row.value["messages"])
    session = content_id(str(row.value.get("created_at")), messages[:1])
    rated = [index for index, message in enumerate(messages) if as_number(message.get("score"))]
    if options.includes_unlabelled:
        rated += [i for i in range(len(messages)) if i not in rated and _follow_up(messages, i)]
    if not rated:
        yield Skipped("no_vote", row.origin)
    for index in rated:
        yield from votes_or_skipped(_vote(row, messages, index, session, options), row.origin)


def _vote(
    row: Row, messages: list[Mapping[str, Any]], index: int, session: str, options: ReadOptions
) -> Iterator[Vote]:
    message = messages[index]
    if message["from"] != "assistant":
        raise UnusableVote("not_assistant", message["from"])
    first = index
    while first and messages[first - 1]["from"] == "assistant":
        first -= 1  # regenerated completions follow each other
    roles = [earlier["from"] for earlier in messages[:first] if earlier["from"] != "system"]
    if any(role == after for role, after in pairwise(roles)):
        raise UnusableVote("shape_unknown", "a conversation with branches")
    for earlier in (*messages[:first], message):
        updates = (update.get("type") for update in objects_at(earlier, "updates"))
        if earlier.get("webSearch") or any(kind in CONTEXT_UPDATES for kind in updates):
            raise UnusableVote("context", "webSearch or tool")
    keeps = options.keeps_reasoning
    score = as_number(message.get("score"))
    yield Vote(
        source=SOURCE,
        id=f"{session}/{index}" if score else f"{session}/{index}/follow_up",
        updated_at=timestamp(row.value.get("updated_at")),
        prompt=turns_of(_opening(messages[:first])),
        completion=assistant(message.get("content"), keeps_reasoning=keeps),
        message=str(index),
        parent=str(first),
        label=score > 0 if score else None,
        follow_up=_follow_up(messages, index),
        session=session,
        origin=row.origin,
    )


def _follow_up(messages: list[Mapping[str, Any]], index: int) -> str:
    """What the user wrote after an answer; "" if it is one of several, or if the user's message is:
    their branches are not known.
    """
    roles = [message["from"] for message in messages]
    is_only = roles[index] == "assistant" and "assistant" not in roles[index - 1 : index]
    is_last = roles[index + 1 : index + 2] != ["user"] or roles[index + 2 : index + 3] == ["user"]
    return user_text(messages[index + 1].get("content")) if is_only and not is_last else ""


def _opening(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The turns without an empty system prompt, which every conversation begins with."""
    is_empty = messages and messages[0]["from"] == "system" and not messages[0].get("content")
    opening = messages[1:] if is_empty else messages
    return [{"role": m["from"], "content": m.get("content")} for m in opening]
