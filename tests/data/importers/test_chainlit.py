"""The tables of Chainlit, as JSON, CSV and SQLite."""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import REAL, compact, only_vote, read_all, write_json
from tests.errors import raises_error
from valence.data.importers.chainlit import read
from valence.data.importers.records import ReadOptions, Vote
from valence.types import Origin

PROMPT = "u: Capital of France?"
COLUMNS = {
    "feedbacks": ("id", "forId", "threadId", "value", "comment"),
    "steps": ("id", "threadId", "parentId", "type", "input", "output", "createdAt", "isError"),
    "threads": ("id", "userId", "userIdentifier"),
}


def step(id: str, kind: str, output: str, second: int, parent: str | None = None) -> dict[str, Any]:
    return {
        "id": id,
        "threadId": "t1",
        "parentId": parent,
        "type": kind,
        "input": "",
        "output": output,
        "createdAt": f"2026-01-02T03:04:{second:02}.000000Z",
        "isError": False,
    }


STEPS = [
    step("s0", "assistant_message", "Welcome!", 0),
    step("s1", "user_message", "Capital of France?", 1),
    step("run1", "run", "", 2, "s1"),
    step("tool1", "tool", "", 3, "run1"),
    step("s2", "assistant_message", "Paris", 4, "run1"),
    step("s3", "user_message", "And Spain?", 5),
    step("run2", "run", "", 6, "s3"),
    step("s4", "assistant_message", "Searching", 7, "run2"),
    step("s5", "assistant_message", "Madrid", 8, "run2"),
]
THREAD = {"id": "t1", "userId": "u1", "userIdentifier": "ann@example.org"}
LATER = f"{PROMPT} | a: Paris | u: And Spain?"


def feedback(target: str, value: Any = 1, **extra: Any) -> dict[str, Any]:
    return {"id": "f1", "forId": target, "threadId": "t1", "value": value, **extra}


def tables(*votes: dict[str, Any], **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """The three tables. changes: of the step s2."""
    steps = [item | changes if item["id"] == "s2" else item for item in STEPS]
    return {"feedbacks": list(votes), "steps": steps, "threads": [THREAD]}


def write_all(folder: Path, rows: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    return [write_json(folder / f"{name}.json", table) for name, table in rows.items()]


def write_csv(folder: Path, rows: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    for name, table in rows.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[name])
            writer.writeheader()
            writer.writerows(table)
    return [str(folder / f"{name}.csv") for name in rows]


def write_sqlite(folder: Path, rows: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    path = folder / "chainlit.db"
    with closing(sqlite3.connect(path)) as database:
        for name, table in rows.items():
            names = ", ".join(f'"{column}"' for column in COLUMNS[name])
            marks = ", ".join("?" for _ in COLUMNS[name])
            database.execute(f"create table {name} ({names})")
            cells = [[row.get(column) for column in COLUMNS[name]] for row in table]
            database.executemany(f"insert into {name} values ({marks})", cells)
        database.commit()
    return [str(path)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(tables(feedback("s2")), (PROMPT, "Paris", True), id="message"),
        pytest.param(tables(feedback("run1", 0)), (PROMPT, "Paris", False), id="run"),
        pytest.param(
            tables(feedback("run2")), (LATER, "Searching\n\nMadrid", True), id="several-messages"
        ),
        pytest.param(tables(feedback("s1")), "not_assistant", id="user"),
        pytest.param(tables(feedback("tool1")), "not_assistant", id="tool"),
        pytest.param(tables(feedback("s9")), "no_conversation", id="step-missing"),
        pytest.param(tables(feedback("s2", None)), "no_vote", id="no-value"),
        pytest.param(tables(feedback("s2"), isError=True), "failed", id="failed"),
        pytest.param(tables(feedback("s2"), output=""), "empty", id="empty"),
        pytest.param(tables(feedback("s0")), "no_prompt", id="greeting"),
        pytest.param(tables(feedback("run1"), type="tool"), "message_missing", id="run-is-empty"),
    ],
)
@pytest.mark.parametrize("write", [write_all, write_csv, write_sqlite])
def test_one_vote(
    tmp_path: Path, write: Any, rows: dict[str, list[dict[str, Any]]], expected: object
) -> None:
    assert read_all(read, *write(tmp_path, rows)) == [expected]


@pytest.mark.parametrize("kind", ["tool", "retrieval"])
@pytest.mark.parametrize("target", ["s2", "run1", "s5"])
def test_an_answer_from_a_tool_is_skipped(tmp_path: Path, kind: str, target: str) -> None:
    """Also if the tool was called for an earlier answer: the prompt does not have its result."""
    rows = tables(feedback(target))
    result = {"type": kind, "output": "Paris has 2 million people"}
    rows["steps"] = [row | result if row["id"] == "tool1" else row for row in rows["steps"]]
    assert read_all(read, *write_all(tmp_path, rows)) == ["context"]


def test_all_fields_of_feedback_are_in_the_vote(tmp_path: Path) -> None:
    paths = write_all(tmp_path, tables(feedback("run1", 0, comment="wrong")))
    vote = only_vote(read, *paths)
    assert (vote.id, vote.rater, vote.session, vote.message) == ("f1", "u1", "t1", "s2")
    assert (vote.comment, vote.origin) == ("wrong", Origin(paths[0], 1))
    assert "ann@example.org" not in repr(vote)


def test_rows_of_a_database_name_their_table(tmp_path: Path) -> None:
    (path,) = write_sqlite(tmp_path, tables(feedback("s2")))
    assert only_vote(read, path).origin == Origin(f"{path}#feedbacks", 1)


def test_the_tables_that_chainlit_wrote() -> None:
    """Votes that were given in a browser. Chainlit deletes those that are withdrawn."""
    tables = ("feedbacks", "steps", "threads")
    paths = [str(REAL / f"chainlit_{name}.json") for name in tables]
    votes = [vote for vote in read(paths, ReadOptions()) if isinstance(vote, Vote)]
    spain = f"{PROMPT} | a: Reply 7 | u: Please look up Spain"
    peru = f"{spain} | a: Searching\n\nReply 8 | u: And Italy? | a: Reply 9 | u: And Peru?"
    assert [(*compact(vote), vote.comment) for vote in votes] == [
        (PROMPT, "Reply 7", False, "clear"),
        (spain, "Searching\n\nReply 8", False, "wrong"),
        (peru, "Reply 10", True, ""),
    ]
    assert {(vote.rater, vote.session) for vote in votes} == {
        ("76690027-810c-46aa-a1ba-cd632c34ec63", "88f1dd66-d8c7-4369-8799-1764b0870ca4")
    }
    assert "ann@example.org" not in repr(votes)


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chainlit.db"
    path.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    with raises_error("file-damaged", where=str(path)):
        read_all(read, str(path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "rows.json", [{"prompt": "x"}]))


SUN = step("s6", "user_message", "Is it sunny?", 9)


def test_the_users_next_message_is_the_follow_up(tmp_path: Path) -> None:
    """Steps of runs and tools are no messages; of several messages of a run, the last counts."""
    rows = tables(feedback("run1"))
    rows["steps"].append(SUN)
    files = write_all(tmp_path, rows)
    assert only_vote(read, *files).follow_up == "And Spain?"
    records = list(read(files, ReadOptions(includes_unlabelled=True)))
    votes = [record for record in records if isinstance(record, Vote)]
    assert [(v.completion["content"], v.label, v.follow_up) for v in votes] == [
        ("Paris", True, "And Spain?"),
        ("Searching\n\nMadrid", None, "Is it sunny?"),
    ]
    # the greeting answers nothing
    assert [record.reason for record in records if not isinstance(record, Vote)] == ["no_prompt"]
