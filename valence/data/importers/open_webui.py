"""Open WebUI: exported feedback with snapshots of the chats, and exported chats.

Feedback without a snapshot is joined with exported chats. Where one of several answers to a prompt
was rated, the vote compares it with the others, if their texts are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import object_at, objects_at, text_list, timestamp
from valence.data.importers.messages import assistant, branch, system_turn, turns_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote, Winner
from valence.data.sources import Row
from valence.data.values import as_number, shown
from valence.types import Message, Origin

SOURCE = "open_webui"


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of feedback exports, then those of chat exports that are in none of the former."""
    feedback: list[Row] = []
    chats: dict[str, _Chat] = {}
    origins: dict[str, Origin] = {}
    for row in export_rows(paths, "Open WebUI", lambda row: _is_feedback(row) or _is_chat(row)):
        if isinstance(row, Skipped):
            yield row
        elif _is_feedback(row.value):
            feedback.append(row)
        else:
            chat = _chat(row.value)
            chats[chat.id], origins[chat.id] = chat, row.origin
    ratings = [_rating_of_feedback(row, chats) for row in feedback]
    by_message: dict[tuple[str, str, str], _Rating] = {}
    for rating in sorted(ratings, key=lambda rating: rating.updated_at):
        by_message[rating.rater, rating.session, rating.message] = rating
    for rating in ratings:
        yield from votes_or_skipped(_votes(rating, by_message, options), rating.origin)
    rated = {(rating.session, rating.message) for rating in ratings}
    for chat in chats.values():
        for message in chat.messages.values():
            if isinstance(message.get("annotation"), Mapping):
                rating = _rating_of_annotation(message, chat, origins[chat.id])
                if (rating.session, rating.message) not in rated:
                    yield from votes_or_skipped(_votes(rating, {}, options), rating.origin)


def _is_feedback(row: Columns) -> bool:
    return isinstance(row.get("data"), Mapping) and "chat" not in row


def _is_chat(row: Columns) -> bool:
    return isinstance(row.get("chat"), Mapping)


@dataclass(frozen=True, slots=True)
class _Chat:
    id: str
    user: str
    system: object
    messages: Mapping[str, Mapping[str, Any]]


def _chat(record: Columns) -> _Chat:
    body = object_at(record, "chat")
    tree = object_at(object_at(body, "history"), "messages")
    messages = {name: object_at(tree, name) for name in tree}
    if not messages:
        messages = {str(message.get("id")): message for message in objects_at(body, "messages")}
    params = object_at(body, "params")
    name, user = str(record.get("id") or ""), str(record.get("user_id") or "")
    return _Chat(name, user, params.get("system"), messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rating:
    """A rating of one message, from feedback or from an annotation."""

    id: str
    rater: str
    updated_at: float
    session: str
    message: str
    value: object
    is_comparison: bool
    data: Mapping[str, Any]
    chat: _Chat | None
    origin: Origin

    @property
    def sign(self) -> int:
        """1 for thumbs up, -1 for thumbs down, 0 for a draw."""
        number = as_number(self.value)
        if number not in (-1, 0, 1):
            raise UnusableVote("no_vote", "" if self.value is None else shown(self.value))
        return int(number)


def _rating_of_feedback(row: Row, chats: Mapping[str, _Chat]) -> _Rating:
    data, meta = object_at(row.value, "data"), object_at(row.value, "meta")
    snapshot = object_at(object_at(row.value, "snapshot"), "chat")
    session = str(meta.get("chat_id") or snapshot.get("id") or "")
    return _Rating(
        id=str(row.value.get("id") or ""),
        rater=str(row.value.get("user_id") or ""),
        updated_at=timestamp(row.value.get("updated_at") or row.value.get("created_at")),
        session=session,
        message=str(meta.get("message_id") or ""),
        value=data.get("rating"),
        is_comparison=bool(meta.get("arena") or data.get("sibling_model_ids")),
        data=data,
        chat=_chat(snapshot) if snapshot else chats.get(session),
        origin=row.origin,
    )


def _rating_of_annotation(message: Mapping[str, Any], chat: _Chat, origin: Origin) -> _Rating:
    annotation = object_at(message, "annotation")
    name = str(message.get("id") or "")
    return _Rating(
        id=str(message.get("feedbackId") or f"{chat.id}/{name}"),
        rater=chat.user,
        updated_at=timestamp(message.get("timestamp")),
        session=chat.id,
        message=name,
        value=annotation.get("rating"),
        is_comparison=bool(message.get("arena")),
        data=annotation,
        chat=chat,
        origin=origin,
    )


def _votes(
    rating: _Rating, by_message: Mapping[tuple[str, str, str], _Rating], options: ReadOptions
) -> Iterator[Vote]:
    sign = rating.sign
    if rating.chat is None:
        raise UnusableVote("no_conversation", rating.session)
    messages = rating.chat.messages
    path = branch(messages, rating.message, "parentId")
    rated = path[-1]
    keeps = options.keeps_reasoning
    if any(message.get("files") for message in path):
        raise UnusableVote("image", "files")
    prompt = turns_of(path[:-1])
    if not any(turn["role"] == "system" for turn in prompt):
        prompt = (*system_turn(rating.chat.system), *prompt)
    details = object_at(rating.data, "details")
    fields: dict[str, Any] = {
        "source": SOURCE,
        "id": rating.id,
        "updated_at": rating.updated_at,
        "rater": rating.rater,
        "prompt": prompt,
        "completion": _completion(rated, keeps),
        "message": rating.message,
        "parent": str(rated.get("parentId") or ""),
        "comment": str(rating.data.get("comment") or ""),
        "tags": (*text_list(rating.data.get("reason")), *text_list(rating.data.get("tags"))),
        "model": str(rating.data.get("model_id") or _model(rated)),
        "session": rating.session,
        "info": {} if details.get("rating") is None else {"rating": details["rating"]},
        "origin": rating.origin,
    }
    others = _siblings(rated, messages, keeps) if rating.is_comparison else {}
    compared = False
    for name, completion in others.items():
        other_rating = by_message.get((rating.rater, rating.session, name))
        winner = _winner(sign, other_rating.sign if other_rating else None, len(others))
        if winner is not None:
            compared = True
            yield Vote(
                **fields,
                other=completion,
                other_message=name,
                other_model=_model(messages[name]),
                winner=winner,
            )
    if not compared:
        if sign == 0:
            raise UnusableVote("no_vote", "a draw without the other answers")
        yield Vote(**fields, label=sign > 0)


def _winner(sign: int, other_sign: int | None, num_others: int) -> Winner | None:
    """The better of two answers. other_sign: how the same rater rated the other one.

    None where one of several others is better, and nobody knows which.
    """
    if other_sign is not None and other_sign != sign:
        return "this" if sign > other_sign else "other"
    if other_sign == -1:
        return "both_bad"
    if sign == 0 or other_sign is not None:
        return "tie"
    if sign > 0:
        return "this"
    return "other" if num_others == 1 else None


def _siblings(
    rated: Mapping[str, Any], messages: Mapping[str, Mapping[str, Any]], keeps_reasoning: bool
) -> dict[str, Message]:
    """The usable answers to the same turn, by the ids of their messages."""
    siblings: dict[str, Message] = {}
    for name, message in messages.items():
        is_sibling = message.get("parentId") == rated.get("parentId") and message is not rated
        if is_sibling and not message.get("files"):
            try:
                siblings[name] = _completion(message, keeps_reasoning)
            except UnusableVote:
                continue  # it is not what the vote is about
    return siblings


def _completion(message: Mapping[str, Any], keeps_reasoning: bool) -> Message:
    if message.get("role") != "assistant":
        raise UnusableVote("not_assistant", message.get("role"))
    if message.get("error"):
        raise UnusableVote("failed", shown(message["error"]))
    if message.get("done") is False:
        raise UnusableVote("unfinished")
    return assistant(message.get("content"), keeps_reasoning=keeps_reasoning)


def _model(message: Mapping[str, Any]) -> str:
    return str(message.get("selectedModelId") or message.get("model") or "")
