"""Chainlit: the tables ``feedbacks``, ``steps`` and ``threads`` as JSON or CSV, or in SQLite.

Recent versions store feedback on the run that answers a user's message, not on the message that was
rated. The rated message is the last one of the run.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from valence.data.importers.exports import Columns, export_rows, votes_or_skipped
from valence.data.importers.fields import is_blank, thumb_label, timestamp
from valence.data.importers.messages import assistant, follow_up, merge_turns, turns_of
from valence.data.importers.records import ReadOptions, Skipped, UnusableVote, Vote
from valence.data.sources import Row
from valence.data.values import shown
from valence.errors import UserError
from valence.types import Origin

SOURCE = "chainlit"
SQLITE = b"SQLite format 3\0"
ROLES = {"user_message": "user", "assistant_message": "assistant"}
CONTEXT_STEPS = ("tool", "retrieval")
"""Types of steps that gave the model text which the messages do not contain."""


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """A vote for each feedback, then the answers without one that a user message follows."""
    feedback: list[Row] = []
    threads: dict[str, list[Columns]] = defaultdict(list)
    steps: dict[str, Columns] = {}
    origins: dict[str, Origin] = {}
    users: dict[str, str] = {}
    for path in paths:
        is_database = _is_database(path)
        rows = _database(path) if is_database else export_rows([path], "Chainlit", _is_row)
        for row in rows:
            if isinstance(row, Skipped):
                yield row
            elif "forId" in row.value:
                feedback.append(row)
            elif "output" in row.value:
                steps[str(row.value.get("id"))] = row.value
                origins[str(row.value.get("id"))] = row.origin
                threads[str(row.value.get("threadId"))].append(row.value)
            else:
                name = row.value.get("userId") or row.value.get("userIdentifier")
                users[str(row.value.get("id"))] = str(name or "")
    for thread in threads.values():
        thread.sort(key=lambda step: timestamp(step.get("createdAt")))
    rated: set[str] = set()
    for row in feedback:
        for vote in votes_or_skipped(_vote(row, steps, threads, users, options), row.origin):
            rated |= {vote.message} if isinstance(vote, Vote) else set()
            yield vote
    if options.includes_unlabelled:
        for name, step in steps.items():
            if name not in rated and step.get("type") == "assistant_message":
                votes = _unrated(step, threads, users, options, origins[name])
                yield from votes_or_skipped(votes, origins[name])


def _is_row(row: Columns) -> bool:
    """Whether a row is of one of the three tables."""
    is_step = "threadId" in row and "type" in row and "output" in row
    is_thread = "userId" in row or "userIdentifier" in row
    return ("forId" in row and "value" in row) or is_step or is_thread


def _is_database(path: str) -> bool:
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False  # read_rows says what is wrong


def _database(path: str) -> Iterator[Row]:
    """The rows of the three tables. The database is opened for reading only."""
    uri = f"{Path(path).expanduser().absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.row_factory = sqlite3.Row
            query = "select name from sqlite_master where type = 'table'"
            tables = {name for (name,) in database.execute(query)}
            for table in ("feedbacks", "steps", "threads"):
                if table not in tables:
                    continue
                for number, row in enumerate(database.execute(f'select * from "{table}"'), 1):
                    yield Row(dict(row), Origin(f"{path}#{table}", number))
    except sqlite3.Error as error:
        raise UserError(
            f"the database cannot be read ({error})",
            code="file-damaged",
            where=path,
            fix="copy the database again while the app is stopped",
        ) from error


def _vote(
    row: Row,
    steps: Mapping[str, Columns],
    threads: Mapping[str, list[Columns]],
    users: Mapping[str, str],
    options: ReadOptions,
) -> Iterator[Vote]:
    label = thumb_label(row.value.get("value"), options.labels)
    if label is None:
        raise UnusableVote("no_vote", shown(row.value.get("value")))
    target = str(row.value.get("forId"))
    if target not in steps:
        raise UnusableVote("no_conversation", target)
    step = steps[target]
    session = str(step.get("threadId"))
    thread = threads[session]
    if step.get("type") == "run":
        step = _last_message(target, thread)
    if step.get("type") != "assistant_message":
        raise UnusableVote("not_assistant", step.get("type"))
    yield Vote(
        source=SOURCE,
        id=str(row.value.get("id") or target),
        rater=users.get(session, ""),
        updated_at=timestamp(row.value.get("updatedAt") or row.value.get("createdAt")),
        message=str(step.get("id")),
        label=label,
        comment=str(row.value.get("comment") or ""),
        follow_up=_follow_up(step, thread),
        session=session,
        origin=row.origin,
        **_exchange(step, thread, options),
    )


def _unrated(
    step: Columns,
    threads: Mapping[str, list[Columns]],
    users: Mapping[str, str],
    options: ReadOptions,
    origin: Origin,
) -> Iterator[Vote]:
    """The user's next message after an answer without a vote."""
    session = str(step.get("threadId"))
    text = _follow_up(step, threads[session])
    if text:
        yield Vote(
            source=SOURCE,
            id=f"{step.get('id')}/follow_up",
            rater=users.get(session, ""),
            updated_at=timestamp(step.get("createdAt")),
            message=str(step.get("id")),
            follow_up=text,
            session=session,
            origin=origin,
            **_exchange(step, threads[session], options),
        )


def _follow_up(step: Columns, thread: list[Columns]) -> str:
    """What the user wrote after an answer. Steps of runs and tools are no messages."""
    later = thread[thread.index(step) + 1 :]
    return follow_up(_message_turn(s) for s in later if str(s.get("type")) in ROLES)


def _message_turn(step: Columns) -> dict[str, Any]:
    return {"role": ROLES[str(step["type"])], "content": step.get("output") or step.get("input")}


def _exchange(step: Columns, thread: list[Columns], options: ReadOptions) -> dict[str, Any]:
    """The prompt and the completion of an answer."""
    if _is_error(step):
        raise UnusableVote("failed")
    earlier = thread[: thread.index(step)]
    if any(s.get("type") in CONTEXT_STEPS and not is_blank(s.get("output")) for s in earlier):
        raise UnusableVote("context", "a step of a tool or of retrieval")
    keeps = options.keeps_reasoning
    turns = [_message_turn(s) for s in earlier if str(s.get("type")) in ROLES and not _is_error(s)]
    while turns and turns[0]["role"] == "assistant":
        del turns[0]  # greetings, which the app writes
    completion = assistant(step.get("output"), keeps_reasoning=keeps)
    # a run may send several messages, of which the last one shows the thumbs
    *prompt, completion = merge_turns((*turns_of(turns), completion))
    return {"prompt": tuple(prompt), "completion": completion}


def _last_message(run: str, thread: list[Columns]) -> Columns:
    """The assistant's last message in a run, also within steps of the run."""
    inside = {run}
    last: Columns | None = None
    for step in thread:
        if str(step.get("parentId")) in inside:
            inside.add(str(step.get("id")))
            if step.get("type") == "assistant_message":
                last = step
    if last is None:
        raise UnusableVote("message_missing", "a run without a message")
    return last


def _is_error(step: Columns) -> bool:
    return step.get("isError") in (True, 1, "1", "true", "True", "t")
