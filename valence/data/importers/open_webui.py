"""Open WebUI: exported feedback with snapshots of the chats, and exported chats.

Feedback without a snapshot is joined with exported chats. A thumb on one of several answers to a
prompt also compares it with those that the rater gave no thumb, if their texts are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import object_at, objects_at, text_list, timestamp
from valence.data.importers.messages import (
    assistant,
    branch,
    follow_ups,
    strip_reasoning,
    system_turn,
    text_of,
    turns_of,
)
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote, Winner
from valence.data.sources import Row
from valence.data.values import as_number, shown
from valence.types import Message, Origin

SOURCE = "open_webui"
OUTPUT_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
"""Parts of an answer that become turns."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of feedback exports, then those of chat exports that are in none of the former, and
    then answers without a vote that a user message follows, or that were edited.
    """
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
    snapshots: dict[str, tuple[_Chat, Origin]] = {}
    for rating in sorted(ratings, key=lambda rating: rating.updated_at):
        by_message[rating.rater, rating.session, rating.message] = rating
        if rating.chat is not None:
            snapshots[rating.session] = rating.chat, rating.origin
    newest = snapshots | {name: (chat, origins[name]) for name, chat in chats.items()}
    texts = {name: _follow_ups(chat) for name, (chat, _) in newest.items()}
    for rating in ratings:
        follow_up = texts.get(rating.session, {}).get(rating.message, "")
        votes = _votes(rating, by_message, options, follow_up)
        yield from votes_or_skipped(votes, rating.origin, rating.id)
    rated = {(rating.session, rating.message) for rating in ratings}
    ids = {rating.id for rating in ratings}
    for chat in chats.values():
        copies = _copies(chat.messages)
        for name, message in chat.messages.items():
            if isinstance(message.get("annotation"), Mapping) and name not in copies:
                rating = _rating_of_annotation(message, chat, origins[chat.id])
                if (rating.session, rating.message) not in rated and rating.id not in ids:
                    votes = _votes(rating, {}, options, texts[chat.id].get(name, ""))
                    yield from votes_or_skipped(votes, rating.origin)
    if options.includes_unlabelled:
        rated = {(rating.session, rating.message) for rating in ratings if rating.sign is not None}
        yield from _unrated_votes(newest, rated, options)


def _unrated_votes(
    chats: Mapping[str, tuple[_Chat, Origin]], rated: set[tuple[str, str]], options: ReadOptions
) -> Iterator[Vote | Skipped]:
    """The edits of answers without a rating as corrections, or else the user's next messages."""
    for session, (chat, origin) in chats.items():
        copies, texts = _copies(chat.messages), _follow_ups(chat)
        for name, message in chat.messages.items():
            rating = as_number(object_at(message, "annotation").get("rating"))
            is_rated = rating is not None or (session, name) in rated or name in copies
            if message.get("role") == "assistant" and not is_rated:
                votes = _unrated(session, chat, name, texts.get(name, ""), options, origin)
                yield from votes_or_skipped(votes, origin)


def _follow_ups(chat: _Chat) -> dict[str, str]:
    questions = (item for item in chat.messages.values() if item.get("role") == "user")
    return follow_ups(questions, "parentId", "timestamp")


def _copies(messages: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The ids of messages that "Save as copy" made of another one, with its rating: those with the
    ``feedbackId`` of an earlier message.
    """
    by_feedback: dict[str, list[str]] = {}
    for name, message in messages.items():
        if message.get("feedbackId"):
            by_feedback.setdefault(str(message["feedbackId"]), []).append(name)
    return {
        name
        for names in by_feedback.values()
        for name in sorted(names, key=lambda name: timestamp(messages[name].get("timestamp")))[1:]
    }


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
    is_snapshot: bool = False
    """Whether the chat is as it was when the message was rated."""
    later: _Chat | None = None
    """The chat as it was exported, in which the message may have been edited since."""
    origin: Origin

    @property
    def sign(self) -> int | None:
        """1 for thumbs up, -1 for thumbs down, 0 for a draw; None for anything else."""
        number = as_number(self.value)
        return int(number) if number in (-1, 0, 1) else None


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
        is_snapshot=bool(snapshot),
        later=chats.get(session),
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
    rating: _Rating,
    by_message: Mapping[tuple[str, str, str], _Rating],
    options: ReadOptions,
    follow_up: str,
) -> Iterator[Vote]:
    sign = rating.sign
    if sign is None:
        raise UnusableVote("no_vote", "" if rating.value is None else shown(rating.value))
    if rating.chat is None:
        raise UnusableVote("no_conversation", rating.session)
    messages = rating.chat.messages
    path = branch(messages, rating.message, "parentId")
    text = _rated_text(rating, path[-1])
    rated = text.rated
    keeps = options.keeps_reasoning
    prompt, completion = _exchange(rating.chat, path, rated, keeps)
    details = object_at(rating.data, "details")
    fields: dict[str, Any] = {
        "source": SOURCE,
        "id": rating.id,
        "updated_at": rating.updated_at,
        "rater": rating.rater,
        "prompt": prompt,
        "completion": completion,
        "message": rating.message,
        "parent": str(rated.get("parentId") or ""),
        "comment": str(rating.data.get("comment") or ""),
        "tags": text_list(rating.data.get("reason")),
        "topics": text_list(rating.data.get("tags")),  # of the chat, which a model writes
        "model": str(rating.data.get("model_id") or _model(rated)),
        "session": rating.session,
        "info": {} if details.get("rating") is None else {"rating": details["rating"]},
        "origin": rating.origin,
    }
    if sign and (text.is_certain or sign < 0):  # nobody edits an answer to dislike the result
        # the user may have read the edited text before going on
        is_shown = text.edit is None or rated is not text.original
        yield Vote(**fields, label=sign > 0, follow_up=follow_up if is_shown else "")
    if text.edit is not None:
        _, original = _answer(text.original, keeps)
        yield Vote(**{**fields, "completion": original}, correction=text.edit)
        if not text.is_certain:
            return
    others = _siblings(rated, messages, keeps) if rating.is_comparison else {}
    compared = False
    for name, completion in others.items():
        other_rating = by_message.get((rating.rater, rating.session, name))
        winner = _winner(
            sign,
            other_rating.sign if other_rating else None,
            is_choice=len(others) == 1 and _is_side_by_side(rated, messages[name]),
        )
        if winner is not None:
            compared = True
            yield Vote(
                **fields,
                other=completion,
                other_message=name,
                other_model=_model(messages[name]),
                winner=winner,
            )
    if not sign and not compared:
        raise UnusableVote("no_vote", "a draw without the other answers")


def _exchange(
    chat: _Chat, path: list[Mapping[str, Any]], answer: Mapping[str, Any], keeps_reasoning: bool
) -> tuple[tuple[Message, ...], Message]:
    """The prompt and the completion. path: the messages that lead to the answer, and itself."""
    if any(message.get("files") for message in path):
        raise UnusableVote("image", "files")
    if any(message.get("sources") or message.get("citations") for message in path):
        raise UnusableVote("context", "sources")  # of a web search or of documents
    earlier, completion = _answer(answer, keeps_reasoning)
    turns = [turn for message in path[:-1] for turn in _turns(message)]
    prompt = turns_of([*turns, *earlier])
    if not any(turn["role"] == "system" for turn in prompt):
        prompt = (*system_turn(chat.system), *prompt)
    return prompt, completion


def _unrated(
    session: str, chat: _Chat, name: str, follow_up: str, options: ReadOptions, origin: Origin
) -> Iterator[Vote]:
    message = chat.messages[name]
    edit = _edit(message)
    if edit is None and not follow_up:
        return
    original = message if edit is None else {**message, "content": message["originalContent"]}
    path = branch(chat.messages, name, "parentId")
    prompt, completion = _exchange(chat, path, original, options.keeps_reasoning)
    yield Vote(
        source=SOURCE,
        id=f"{session}/{name}/{'follow_up' if edit is None else 'correction'}",
        updated_at=timestamp(message.get("timestamp")),
        rater=chat.user,
        prompt=prompt,
        completion=completion,
        message=name,
        parent=str(message.get("parentId") or ""),
        correction=edit,
        follow_up=follow_up if edit is None else "",
        model=_model(message),
        session=session,
        origin=origin,
    )


@dataclass(frozen=True, slots=True)
class _RatedText:
    """An answer that may have been edited in place.

    rated, original: the message with the text that the vote is about, and with that of the model.
    edit: the user's text, or None. is_certain: False where thumbs up may be about either text.
    """

    rated: Mapping[str, Any]
    original: Mapping[str, Any]
    edit: str | None = None
    is_certain: bool = True


def _rated_text(rating: _Rating, message: Mapping[str, Any]) -> _RatedText:
    """A snapshot has the text that was rated. Without one, it is not known whether the vote or the
    edit came first.
    """
    edit = _edit(message)
    if edit is not None:
        original = {**message, "content": message["originalContent"]}
        # its output is that of the model
        rated = {**message, "output": []} if rating.is_snapshot else original
        return _RatedText(rated, original, edit, rating.is_snapshot)
    later = rating.later.messages.get(rating.message) if rating.later else None
    return _RatedText(message, message, _edit(later) if later else None)


def _edit(message: Mapping[str, Any]) -> str | None:
    """The text of an answer that a user edited in place; None if it was not edited, or if it calls
    tools, whose texts cannot be told apart.
    """
    original, content = message.get("originalContent"), message.get("content")
    if not isinstance(original, str) or not isinstance(content, str):
        return None
    is_edited = original.strip() and content.strip() and original.strip() != content.strip()
    has_calls = any(item.get("type") == "function_call" for item in objects_at(message, "output"))
    return strip_reasoning(content) if is_edited and not has_calls else None


def _winner(sign: int, other_sign: int | None, *, is_choice: bool) -> Winner | None:
    """The better of two answers; None where the rating does not say which.

    other_sign: how the same rater rated the other one. Two thumbs are two votes, of which
    ``make_rows`` makes a pair. is_choice: there was a choice between these two, so that a thumb
    down prefers the other one. It does not prefer an earlier answer that the rater regenerated.
    """
    if other_sign is not None:
        if sign and other_sign:
            return None
        return "tie" if sign == other_sign else "this" if sign > other_sign else "other"
    if sign > 0:
        return "this"
    if sign == 0:
        return "tie"
    return "other" if is_choice else None


def _is_side_by_side(rated: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two answers were shown at once, as those of several models are."""
    return _model(rated) != _model(other) or rated.get("modelIdx") != other.get("modelIdx")


def _siblings(
    rated: Mapping[str, Any], messages: Mapping[str, Mapping[str, Any]], keeps_reasoning: bool
) -> dict[str, Message]:
    """The usable answers to the same turn, by the ids of their messages.

    Answers that were written after other calls of tools cannot be compared.
    """
    rated_earlier, _ = _answer(rated, keeps_reasoning)
    siblings: dict[str, Message] = {}
    copies = _copies(messages)
    for name, message in messages.items():
        is_sibling = message.get("parentId") == rated.get("parentId") and name != rated.get("id")
        if is_sibling and name not in copies and not message.get("files"):
            try:
                if _edit(message) is not None:
                    message = {**message, "content": message["originalContent"]}
                earlier, completion = _answer(message, keeps_reasoning)
            except UnusableVote:
                continue  # it is not what the vote is about
            if earlier == rated_earlier:
                siblings[name] = completion
    return siblings


def _answer(
    message: Mapping[str, Any], keeps_reasoning: bool
) -> tuple[list[Mapping[str, Any]], Message]:
    """The turns of an answer before its last one, which call tools, and the completion."""
    if message.get("role") != "assistant":
        raise UnusableVote("not_assistant", message.get("role"))
    if message.get("error"):
        raise UnusableVote("failed", shown(message["error"]))
    if message.get("done") is False:
        raise UnusableVote("unfinished")
    *earlier, last = _turns(message)
    if last["role"] != "assistant":
        raise UnusableVote("empty")
    return earlier, assistant(last.get("content"), keeps_reasoning=keeps_reasoning)


def _turns(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns that a message stands for.

    Version 0.12 keeps an answer's texts, reasoning, calls of tools and their results apart in
    ``output``, and only the joined texts in ``content``.
    """
    items = objects_at(message, "output")
    is_known = all(item.get("type") in OUTPUT_ITEMS for item in items)
    if message.get("role") != "assistant" or not items or not is_known:
        return [message]
    results = {
        str(item.get("call_id")): text_of(item.get("output"), keeps_reasoning=True)
        for item in items
        if item["type"] == "function_call_output"
    }
    turns: list[Mapping[str, Any]] = []
    parts: list[Mapping[str, Any]] = []
    calls: list[Mapping[str, Any]] = []
    for item in items:
        kind, call_id = item["type"], str(item.get("call_id"))
        if kind == "message":
            parts += objects_at(item, "content")
        elif kind == "reasoning":
            thought = text_of(item.get("summary") or item.get("content"), keeps_reasoning=True)
            parts.append({"type": "reasoning", "text": thought})
        elif kind == "function_call" and call_id in results:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind == "function_call_output" and calls:
            turns.append({"role": "assistant", "content": parts, "tool_calls": calls})
            for call in calls:
                name = str(call["id"])
                turns.append({"role": "tool", "tool_call_id": name, "content": results[name]})
            parts, calls = [], []
    if parts:
        turns.append({"role": "assistant", "content": parts})
    return turns or [message]


def _model(message: Mapping[str, Any]) -> str:
    return str(message.get("selectedModelId") or message.get("model") or "")
