"""LibreChat: the collections ``messages`` and ``conversations``, as ``mongoexport`` writes them.

All messages of a conversation are needed, also those without feedback. The conversations hold the
system prompts, and may be left out where there are none.

LibreChat writes ``feedback: null`` when a vote is withdrawn (api/server/routes/messages.js). A
message without that field never had one, and an empty cell of a CSV file can be either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import text_list, timestamp, word_label
from valence.data.importers.messages import (
    branch,
    completion_of,
    follow_ups,
    system_turn,
    turns_of,
)
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote
from valence.data.values import shown
from valence.types import Message, Origin

SOURCE = "librechat"
ROOT = "00000000-0000-0000-0000-000000000000"
"""Parent of the first message of a conversation."""
AGENT_PARTS = ("agent_update",)
"""Parts about the work of an agent, which the text of its answer does not need."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """A vote for each message with feedback, then the answers without a vote that a user message
    follows.
    """
    conversations: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    rated: list[tuple[Origin, dict[str, Any]]] = []
    unrated: list[tuple[Origin, dict[str, Any]]] = []
    systems: dict[str, object] = {}
    for row in export_rows(paths, "LibreChat", lambda row: "conversationId" in row):
        if isinstance(row, Skipped):
            yield row
            continue
        message = {name: _plain(value) for name, value in row.value.items()}
        session = str(message["conversationId"])
        if "messageId" not in message:
            systems[session] = message.get("promptPrefix")
            continue
        if message.get("parentMessageId") == ROOT:
            message["parentMessageId"] = None
        conversations[session][str(message["messageId"])] = message
        if message.get("feedback"):
            rated.append((row.origin, message))
        elif not message.get("isCreatedByUser"):
            unrated.append((row.origin, message))
        if not message.get("feedback") and _is_withdrawn(message, row.origin):
            yield Skipped(
                "withdrawn",
                row.origin,
                vote_id=str(message["messageId"]),
                updated_at=timestamp(message.get("updatedAt")),
            )
    texts = {session: _follow_ups(messages) for session, messages in conversations.items()}
    for origin, message in [*rated, *(unrated if options.includes_unlabelled else [])]:
        session, name = str(message["conversationId"]), str(message["messageId"])
        follow_up = texts[session].get(name, "")
        if message.get("feedback") or follow_up:
            system = systems.get(session)
            votes = _vote(message, conversations[session], system, options, origin, follow_up)
            yield from votes_or_skipped(votes, origin, name if message.get("feedback") else "")


def _follow_ups(messages: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    questions = (item for item in messages.values() if item.get("isCreatedByUser"))
    return follow_ups(questions, "parentMessageId", "createdAt", "updatedAt")


def _is_withdrawn(message: Columns, origin: Origin) -> bool:
    is_table = not {".csv", ".tsv"}.isdisjoint(Path(origin.path).suffixes)
    is_null = "feedback" in message and message["feedback"] is None
    return is_null and not is_table and not message.get("isCreatedByUser")


def _plain(value: Any) -> Any:
    """A value of MongoDB's extended JSON, without the names of types."""
    if isinstance(value, Mapping):
        if len(value) == 1 and next(iter(value)).startswith("$"):
            return _plain(next(iter(value.values())))
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _vote(
    message: Columns,
    messages: Mapping[str, Mapping[str, Any]],
    system: object,
    options: ReadOptions,
    origin: Origin,
    follow_up: str,
) -> Iterator[Vote]:
    feedback = message.get("feedback") or {}
    if not isinstance(feedback, Mapping):
        feedback = {"rating": feedback}
    label = word_label(feedback.get("rating"), options.labels)
    if label is None and feedback:
        raise UnusableVote("no_vote", shown(feedback.get("rating")))
    name = str(message["messageId"])
    if message.get("isCreatedByUser"):
        raise UnusableVote("not_assistant", "user")
    if message.get("error"):
        raise UnusableVote("failed")
    if message.get("unfinished") or message.get("finish_reason") in ("length", "max_tokens"):
        raise UnusableVote("unfinished", message.get("finish_reason") or "")
    path = branch(messages, name, "parentMessageId")
    keeps = options.keeps_reasoning
    turns = [_turn(m) for m in path[:-1]]
    yield Vote(
        source=SOURCE,
        id=name if feedback else f"{name}/follow_up",
        updated_at=timestamp(message.get("updatedAt") or message.get("createdAt")),
        rater=str(message.get("user") or ""),
        prompt=(*system_turn(system), *turns_of(turns)),
        completion=completion_of(_turn(message), keeps_reasoning=keeps),
        message=name,
        parent=str(message.get("parentMessageId") or ""),
        label=label,
        comment=str(feedback.get("text") or ""),
        tags=_tags(feedback),
        follow_up=follow_up,
        model=str(message.get("model") or ""),
        session=str(message["conversationId"]),
        origin=origin,
    )


def _turn(message: Columns) -> Message:
    """A message as OpenAI writes it, without the work of agents."""
    if message.get("files"):
        raise UnusableVote("image", "files")
    role = "user" if message.get("isCreatedByUser") else "assistant"
    content = message.get("content") or message.get("text")
    if isinstance(content, list):
        if any(isinstance(part, Mapping) and part.get("type") == "tool_call" for part in content):
            raise UnusableVote("context", "tool_call")
        content = [part for part in content if not _is_agent_part(part)]
    return {"role": role, "content": content}


def _is_agent_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in AGENT_PARTS


def _tags(feedback: Mapping[str, Any]) -> tuple[str, ...]:
    """The tag of today's versions, a name or an object with a key, or the list of older ones."""
    tag = feedback.get("tag")
    tag = tag.get("key") if isinstance(tag, Mapping) else tag
    return (*text_list(tag), *text_list(feedback.get("tags")))
