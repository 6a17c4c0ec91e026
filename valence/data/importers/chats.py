"""Logs of chats without votes: conversations in the shapes that rows of data files have.

Each answer that a user message follows gives a row. Nothing else in a log says how good an answer
is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from valence.data import values
from valence.data.format_table import TURNS
from valence.data.importers.exports import export_rows, votes_or_skipped
from valence.data.importers.fields import decode_json, first_value, timestamp, value_at
from valence.data.importers.messages import (
    completion_of,
    follow_up,
    prompt_turns,
    system_turn,
    tools_of,
    turns_of,
)
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote
from valence.data.sources import Row
from valence.errors import UserError
from valence.types import Message, content_id

SOURCE = "chats"
COLUMNS = (*TURNS.split("|"), "conversations", "text")
"""Columns that hold a conversation."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """A record for each answer that a user message follows."""
    path = options.paths.get("prompt")
    columns = (path,) if path else COLUMNS
    for row in export_rows(paths, "chats", lambda row: bool(_conversation(row, columns))):
        if isinstance(row, Skipped):
            yield row
            continue
        turns = _conversation(row.value, columns)
        indices = [
            i for i in range(len(turns)) if _is_answer(turns[i]) and follow_up(turns[i + 1 :])
        ]
        if not indices:
            yield Skipped("no_vote", row.origin)
        for index in indices:
            yield from votes_or_skipped(_vote(row, turns, index, options), row.origin)


def _conversation(row: Mapping[str, Any], columns: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """The turns in a row, with ``role`` and ``content``; none if there is no conversation."""
    value = next((v for name in columns if (v := decode_json(value_at(row, name)))), None)
    if isinstance(value, Mapping):
        value = value.get("messages")
    if isinstance(value, str):
        turns, start = values.transcript(value)
        return [*turns, {"role": "assistant", "content": value[start:].strip()}] if turns else []
    if not isinstance(value, list):
        return []
    turns = (turn for turn in values.as_turns(value) if isinstance(turn, Mapping))
    return [*chain.from_iterable(map(_named, turns))]


def _named(turn: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """A turn with the names ``role`` and ``content``, or the turns of a round."""
    dialect = values.dialect_of(turn)
    if dialect is None:
        try:
            return _messages(turn)
        except UnusableVote:
            return [turn]
    role, content = turn[dialect.role], turn[dialect.content]
    others = {k: v for k, v in turn.items() if k not in (dialect.role, dialect.content)}
    return [{"role": dialect.roles.get(str(role), role), "content": content, **others}]


def _is_answer(turn: Mapping[str, Any]) -> bool:
    return turn.get("role") == "assistant" and turn.get("weight") != 0


def _vote(
    row: Row, turns: list[Mapping[str, Any]], index: int, options: ReadOptions
) -> Iterator[Vote]:
    system = system_turn(first_value(row.value, "system", "system_prompt"))
    earlier = tuple(chain.from_iterable(map(_messages, turns[:index])))
    if any(turn["role"] == "system" for turn in earlier):
        system = ()
    prompt = prompt_turns((*system, *earlier))
    completion = completion_of(_messages(turns[index])[-1], keeps_reasoning=options.keeps_reasoning)
    text = follow_up(turns[index + 1 :])
    session = content_id([dict(turn) for turn in prompt], dict(completion), text)
    yield Vote(
        source=SOURCE,
        id=session,
        updated_at=timestamp(first_value(row.value, "updated_at", "timestamp", "created_at")),
        rater=str(first_value(row.value, "user_id", "user") or ""),
        prompt=prompt,
        tools=tools_of(row.value),
        completion=completion,
        follow_up=text,
        model=str(row.value.get("model") or ""),
        session=session,
        origin=row.origin,
    )


def _messages(turn: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a turn, as data files or tools write it."""
    try:
        messages = values.turns([turn], "messages", values.SHAREGPT)
    except UserError:
        return turns_of([turn])
    return tuple(
        {name: value for name, value in message.items() if name != "weight"}
        | {"content": message["content"] or ""}
        for message in messages
    )
