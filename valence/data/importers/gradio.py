"""Gradio: the ``log.csv`` that ``ChatInterface(flagging_mode="manual")`` writes.

Its header names five columns, and its rows have four: the conversation, the position of the rated
message, the vote, and the time. The log names no rater, so a later vote on the same conversation
replaces an earlier one. A message has one vote at a time: a custom flag takes the place of a thumb.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from valence.data.importers.exports import not_an_export
from valence.data.importers.fields import decode_json, timestamp, undo_csv_protection, word_label
from valence.data.importers.messages import (
    assistant,
    check_prompt,
    follow_up,
    merge_turns,
    text_of,
    turns_of,
)
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote
from valence.data.sources import check_is_file
from valence.errors import UserError
from valence.types import Message, Origin, content_id

SOURCE = "gradio"
HEADER = ["conversation", "index", "value"]
TOOL_TITLE = re.compile(r"tool|search|retriev|source", re.IGNORECASE)
"""Titles of steps that gave the model text which the messages do not contain."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of log files. Votes that were withdrawn or replaced later are left out."""
    events: list[tuple[str, float, Vote | Skipped]] = []
    for path in paths:
        for origin, cells in _records(path):
            try:
                events.append(_event(cells, options, origin))
            except UnusableVote as error:
                skipped = Skipped(error.reason, origin, error.example)
                events.append(("", 0.0, skipped))
    last: dict[str, tuple[float, Vote | Skipped]] = {}
    for target, time, event in sorted(events, key=lambda event: event[1]):
        last[target] = time, event
    for target, _, event in events:
        time, last_event = last[target]
        is_about_thumb = isinstance(event, Vote) or event.reason == "withdrawn"
        if target and is_about_thumb and not isinstance(last_event, Vote):
            event = Skipped("withdrawn", event.origin, vote_id=target, updated_at=time)
        yield event


def _records(path: str) -> Iterator[tuple[Origin, list[str]]]:
    """The records after the header, each with its line."""
    csv.field_size_limit(2**31 - 1)  # the default is less than a long conversation
    start = 1
    check_is_file(path, Path(path))
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            records = csv.reader(file, strict=True)
            header = next(records, [])
            if header[:3] != HEADER:
                raise not_an_export("Gradio's chat interface", Origin(path, 1), header)
            start = records.line_num + 1
            for cells in records:
                if cells:
                    yield Origin(path, start), cells
                start = records.line_num + 1
    except OSError as error:
        raise UserError(
            f"the file cannot be read ({error.strerror or error})",
            code="file-not-readable",
            where=path,
            fix="check the path and its permissions",
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"the record cannot be read: {error}",
            code="csv-syntax",
            where=f"{path}:{start}",
            fix="copy the log from the server again, as UTF-8 text",
        ) from error


def _event(
    cells: list[str], options: ReadOptions, origin: Origin
) -> tuple[str, float, Vote | Skipped]:
    """What a vote is about, its time, and the vote."""
    if len(cells) not in (4, 5):
        raise UnusableVote("shape_unknown", f"{len(cells)} cells")
    conversation = decode_json(undo_csv_protection(cells[0]))
    feedback = undo_csv_protection(cells[3] if len(cells) == 5 and cells[3] else cells[2])
    time = timestamp(cells[-1])
    position = [int(digits) for digits in re.findall(r"-?\d+", cells[1])]
    if not isinstance(conversation, list) or len(position) not in (1, 2):
        raise UnusableVote("shape_unknown", f"conversation at index {cells[1]}")
    if all(isinstance(turn, Mapping) for turn in conversation):
        prompt, completion, later = _from_messages(conversation, position[0], options)
    else:
        prompt, completion, later = _from_pairs(conversation, position, options)
    target = content_id([dict(turn) for turn in prompt], dict(completion), position)
    if not feedback:
        return target, time, Skipped("withdrawn", origin)
    label = word_label(feedback, options.labels)
    if label is None:
        return target, time, Skipped("no_vote", origin, feedback)
    vote = Vote(
        source=SOURCE,
        id=target,
        updated_at=time,
        prompt=prompt,
        completion=completion,
        label=label,
        follow_up=follow_up(later),
        origin=origin,
    )
    check_prompt(vote.prompt)
    is_custom = feedback not in ("Like", "Dislike")
    return target, time, replace(vote, tags=(feedback,)) if is_custom else vote


def _from_messages(
    messages: list[Mapping[str, Any]], index: int, options: ReadOptions
) -> tuple[tuple[Message, ...], Message, Sequence[Mapping[str, Any]]]:
    """Prompt and completion at an index, and the turns after it.

    The completion is all of the assistant's messages in a row, because the chat shows them with one
    pair of thumbs, and logs the index of the first.
    """
    if not 0 <= index < len(messages):
        raise UnusableVote("message_missing", f"index {index} of {len(messages)}")
    if messages[index].get("role") != "assistant":
        raise UnusableVote("not_assistant", messages[index].get("role"))
    start, end = index, index + 1
    while start and messages[start - 1].get("role") == "assistant":
        start -= 1
    while end < len(messages) and messages[end].get("role") == "assistant":
        end += 1
    for message in messages[:end]:
        if _is_thought(message) and TOOL_TITLE.search(str(message["metadata"]["title"])):
            raise UnusableVote("context", message["metadata"]["title"])
    keeps = options.keeps_reasoning
    before, rated = (
        [message for message in part if keeps or not _is_thought(message)]
        for part in (messages[:start], messages[start:end])
    )
    texts = [text_of(message.get("content"), keeps_reasoning=keeps) for message in rated]
    prompt = merge_turns(turns_of(before))
    completion = assistant("\n\n".join(texts), keeps_reasoning=keeps)
    return tuple(prompt), completion, messages[end:]


def _is_thought(message: Mapping[str, Any]) -> bool:
    """Whether a message is shown as a step on the way, such as the use of a tool."""
    metadata = message.get("metadata")
    return isinstance(metadata, Mapping) and bool(metadata.get("title"))


def _from_pairs(
    pairs: list[Any], position: list[int], options: ReadOptions
) -> tuple[tuple[Message, ...], Message, Sequence[Mapping[str, Any]]]:
    """Prompt, completion and later turns of a list of [user's, assistant's] texts."""
    row, side = position if len(position) == 2 else (position[0], 1)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UnusableVote("shape_unknown", "conversation")
    if not 0 <= row < len(pairs):
        raise UnusableVote("message_missing", f"index {row} of {len(pairs)}")
    if side != 1:
        raise UnusableVote("not_assistant", "user")
    keeps = options.keeps_reasoning
    turns: list[dict[str, Any]] = []
    for user, bot in pairs[: row + 1]:
        turns += [{"role": "user", "content": _cell(user)}] if user is not None else []
        turns += [{"role": "assistant", "content": _cell(bot)}] if bot is not None else []
    if pairs[row][1] is None:
        raise UnusableVote("unfinished")
    completion = assistant(turns[-1]["content"], keeps_reasoning=keeps)
    next_texts = [user for user, _ in pairs[row + 1 : row + 2] if isinstance(user, str)]
    later = [{"role": "user", "content": text} for text in next_texts]
    return turns_of(turns[:-1]), completion, later


def _cell(content: object) -> str:
    """The text of one side of a pair; files are lists or objects."""
    if not isinstance(content, str):
        raise UnusableVote("image", f"content is a {type(content).__name__}")
    return content
