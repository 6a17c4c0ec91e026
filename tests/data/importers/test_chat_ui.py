"""The Parquet export of Hugging Face's chat-ui."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.importers.votes import only_vote, read_all, write_json
from tests.errors import raises_error
from valence.data.importers.chat_ui import read
from valence.data.importers.records import ReadOptions, Vote
from valence.data.importers.rows import make_rows

PROMPT = "u: Hi"
TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def turn(role: str, content: str, score: int | None = None) -> dict[str, Any]:
    return {"from": role, "content": content, "score": score}


HI = turn("user", "Hi")


def write_parquet(path: Path, *conversations: list[dict[str, Any]]) -> str:
    """The columns and types of the export."""
    message = pa.struct([("from", pa.string()), ("content", pa.string()), ("score", pa.int8())])
    time = pa.timestamp("ms")
    columns = {
        "title": pa.array(["A title"] * len(conversations)),
        "created_at": pa.array([TIME.replace(tzinfo=None)] * len(conversations), time),
        "updated_at": pa.array([TIME.replace(tzinfo=None)] * len(conversations), time),
        "messages": pa.array(list(conversations), pa.list_(message)),
    }
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([HI, turn("assistant", "Yo", 1)], [(PROMPT, "Yo", True)], id="up"),
        pytest.param([HI, turn("assistant", "Yo", -1)], [(PROMPT, "Yo", False)], id="down"),
        pytest.param([HI, turn("assistant", "Yo")], ["no_vote"], id="no-score"),
        pytest.param([HI, turn("assistant", "Yo", 0)], ["no_vote"], id="zero"),
        pytest.param(
            [HI, turn("assistant", "Yo", 1), turn("user", "Bye"), turn("assistant", "Bye")],
            [(PROMPT, "Yo", True)],
            id="later-turns-are-cut",
        ),
        pytest.param(
            [turn("system", "Be kind."), HI, turn("assistant", "Yo", 1)],
            [(f"s: Be kind. | {PROMPT}", "Yo", True)],
            id="system",
        ),
        pytest.param(
            [turn("system", ""), HI, turn("assistant", "Yo", 1)],
            [(PROMPT, "Yo", True)],
            id="empty-system",
        ),
        pytest.param([HI | {"score": 1}], ["not_assistant"], id="user"),
        pytest.param([HI, turn("assistant", "", 1)], ["empty"], id="empty"),
        pytest.param([turn("assistant", "Yo", 1)], ["no_prompt"], id="no-prompt"),
        pytest.param(
            [HI, turn("assistant", "Yo"), turn("assistant", "Hello", 1)],
            [(PROMPT, "Hello", True)],
            id="regenerated",
        ),
        pytest.param(
            [HI, turn("user", "Hello"), turn("assistant", "Yo", 1)],
            ["shape_unknown"],
            id="edited-question",
        ),
        pytest.param(
            [HI, turn("assistant", "A"), turn("assistant", "B"), HI, turn("assistant", "C", 1)],
            ["shape_unknown"],
            id="branches-before",
        ),
    ],
)
def test_one_conversation(
    tmp_path: Path, messages: list[dict[str, Any]], expected: list[Any]
) -> None:
    assert read_all(read, write_parquet(tmp_path / "chats.parquet", messages)) == expected


def test_times_are_utc_and_the_title_is_not_kept(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "chats.parquet", [HI, turn("assistant", "Yo", 1)])
    vote = only_vote(read, path)
    assert (vote.updated_at, vote.rater) == (TIME.timestamp(), "")
    assert "A title" not in repr(vote)


def test_regenerated_answers_with_opposite_thumbs_give_a_pair(tmp_path: Path) -> None:
    conversation = [HI, turn("assistant", "Yo", -1), turn("assistant", "Hello", 1)]
    path = write_parquet(tmp_path / "chats.parquet", conversation)
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    (pair,) = make_rows(votes).rows["pairs"]
    assert (pair["chosen"], pair["rejected"]) == ("Hello", "Yo")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "rows.json", [{"messages": [{"role": "user"}]}]))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"updates": [{"type": "tool", "subtype": "call"}]}, "context"),
        ({"webSearch": {"contextSources": []}}, "context"),
        ({"updates": [{"type": "status"}], "webSearch": None}, (PROMPT, "Yo", True)),
    ],
)
def test_answers_from_tools_and_searches_are_skipped(
    tmp_path: Path, extra: dict[str, Any], expected: object
) -> None:
    """The messages of the database have more columns than those of an export."""
    row = {"messages": [HI, turn("assistant", "Yo", 1) | extra]}
    assert read_all(read, write_json(tmp_path / "chats.json", [row])) == [expected]


YO, BYE = turn("assistant", "Yo"), turn("user", "Bye")


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param([HI, turn("assistant", "Yo", 1), BYE], [("Yo", True, "Bye")], id="rated"),
        pytest.param([HI, YO, BYE, YO], [("Yo", None, "Bye")], id="unrated"),
        pytest.param([HI, YO], ["no_vote"], id="last-message"),
        pytest.param([HI, YO, turn("user", " ")], ["no_vote"], id="blank"),
        pytest.param([HI, YO, turn("assistant", "Hello"), BYE], ["no_vote"], id="regenerated"),
        pytest.param([HI, YO, BYE, turn("user", "Ciao")], ["no_vote"], id="edited-message"),
        pytest.param([YO, BYE], ["no_prompt"], id="greeting"),
    ],
)
def test_the_next_message_is_the_follow_up_where_no_other_branch_is(
    tmp_path: Path, turns: list[dict[str, Any]], expected: list[Any]
) -> None:
    path = write_parquet(tmp_path / "chats.parquet", turns)
    records = read([path], ReadOptions(includes_unlabelled=True))
    assert [
        (r.completion["content"], r.label, r.follow_up) if isinstance(r, Vote) else r.reason
        for r in records
    ] == expected
