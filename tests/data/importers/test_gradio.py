"""The log of Gradio's chat interface."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import REAL, only_vote, read_all
from tests.errors import raises_error
from valence.data.importers.gradio import read
from valence.data.importers.records import ReadOptions, Vote
from valence.data.importers.rows import import_votes, latest_votes

HEADER = ["conversation", "index", "value", "flag", "timestamp"]
TIME = "2026-11-25 03:44:03.142565"


def turn(role: str, *parts: Any, title: str | None = None) -> dict[str, Any]:
    content = [{"text": part, "type": "text"} if isinstance(part, str) else part for part in parts]
    return {
        "role": role,
        "metadata": title and {"title": title},
        "content": content,
        "options": None,
    }


CHAT = [
    turn("user", "Capital of France?"),
    turn("assistant", "Paris."),
    turn("user", "And Spain?"),
    turn("assistant", "Searching", title="Thinking"),
    turn("assistant", "Madrid."),
]
TOOL = [*CHAT[:3], turn("assistant", "Madrid, capital", title="Used tool search"), CHAT[4]]
PAIRS = [["Capital of France?", "Paris."], ["And Spain?", "Madrid."]]
FIRST = ("u: Capital of France?", "Paris.")
SECOND = ("u: Capital of France? | a: Paris. | u: And Spain?", "Madrid.")


def log(path: Path, *rows: list[Any], header: list[str] = HEADER) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def record(conversation: object, index: object, value: str, time: str = TIME) -> list[Any]:
    return [json.dumps(conversation), index, value, time]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(record(CHAT, 1, "Like"), (*FIRST, True), id="later-turns-are-cut"),
        pytest.param(record(CHAT, 1, "Dislike"), (*FIRST, False), id="dislike"),
        pytest.param(record(CHAT, 3, "Like"), (*SECOND, True), id="index-of-first-in-a-row"),
        pytest.param(record(CHAT, 4, "Like"), (*SECOND, True), id="index-of-last-in-a-row"),
        pytest.param(
            record([CHAT[0], CHAT[1], CHAT[4]], 2, "Like"),
            ("u: Capital of France?", "Paris.\n\nMadrid.", True),
            id="two-messages-in-a-row",
        ),
        pytest.param(record(PAIRS, "[1, 1]", "Like"), (*SECOND, True), id="pairs"),
        pytest.param(record(PAIRS, "(0, 1)", "Like"), (*FIRST, True), id="pairs-tuple"),
        pytest.param(record(PAIRS, "[0, 0]", "Like"), "not_assistant", id="pairs-user"),
        pytest.param(record(PAIRS, "[2, 1]", "Like"), "message_missing", id="pairs-missing"),
        pytest.param(record([["Hi", None]], "[0, 1]", "Like"), "unfinished", id="pairs-null"),
        pytest.param(
            record([[None, "Hello"], ["Hi", "Yes?"]], "[1, 1]", "Like"),
            ("a: Hello | u: Hi", "Yes?", True),
            id="pairs-greeting",
        ),
        pytest.param(
            record([[["/cat.png"], "A cat"]], "[0, 1]", "Like"), "image", id="pairs-image"
        ),
        pytest.param(
            record([turn("user", "Who?", {"type": "file", "file": {}}), CHAT[1]], 1, "Like"),
            "image",
            id="image",
        ),
        pytest.param(
            record(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
                1,
                "Like",
            ),
            ("u: Hi", "Yo", True),
            id="content-is-text",
        ),
        pytest.param(record(CHAT[1:], 0, "Like"), "no_prompt", id="greeting"),
        pytest.param(record(CHAT, 0, "Like"), "not_assistant", id="user"),
        pytest.param(record(CHAT, 5, "Like"), "message_missing", id="missing"),
        pytest.param(record([CHAT[0], turn("assistant", "")], 1, "Like"), "empty", id="empty"),
        pytest.param(record(CHAT[:4], 3, "Like"), "empty", id="thoughts-alone"),
        pytest.param(record(TOOL, 3, "Like"), "context", id="tool"),
        pytest.param(record(TOOL, 1, "Like"), (*FIRST, True), id="tool-of-a-later-answer"),
        pytest.param(record(CHAT, 1, ""), "withdrawn", id="withdrawn"),
        pytest.param(record(CHAT, 1, "Spam"), "no_vote", id="custom-flag"),
        pytest.param(["[]", 1, "Like"], "shape_unknown", id="three-cells"),
        pytest.param(["no JSON", 1, "Like", TIME], "shape_unknown", id="conversation-is-no-json"),
        pytest.param(
            [f"'{json.dumps(CHAT)} ,=", 1, "Like", TIME], "shape_unknown", id="damaged-json"
        ),
        pytest.param(
            [json.dumps(CHAT), 1, "Paris.", "Dislike", TIME], (*FIRST, False), id="five-cells"
        ),
    ],
)
def test_one_row(tmp_path: Path, row: list[Any], expected: object) -> None:
    assert read_all(read, log(tmp_path / "log.csv", row)) == [expected]


def test_the_time_is_read_from_the_fourth_column(tmp_path: Path) -> None:
    vote = only_vote(read, log(tmp_path / "log.csv", record(CHAT, 1, "Like")))
    assert (vote.updated_at, vote.rater, vote.tags) == (1795578243.142565, "", ())


def test_custom_flags_have_the_meaning_of_the_users_mapping(tmp_path: Path) -> None:
    path = log(tmp_path / "log.csv", record(CHAT, 1, "'=Bad"))
    vote = only_vote(read, path, options=ReadOptions(labels={"=Bad": False}))
    assert (vote.label, vote.tags) == (False, ("=Bad",))


def test_votes_on_the_same_conversation_replace_each_other(tmp_path: Path) -> None:
    later = "2026-11-25 04:00:00.000000"
    path = log(
        tmp_path / "log.csv",
        record(CHAT[:2], 1, "Like"),
        record(CHAT, 1, "Dislike", later),
        record(CHAT, 3, "Like"),
    )
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    first, second, third = (vote.key for vote in votes)
    assert first == second != third


def test_a_withdrawn_vote_counts_no_more(tmp_path: Path) -> None:
    times = [f"2026-11-25 0{hour}:00:00" for hour in range(3)]
    path = log(
        tmp_path / "log.csv",
        record(CHAT, 1, "Like", times[0]),
        record(CHAT, 1, "", times[1]),
        record(CHAT, 3, "", times[0]),
        record(CHAT, 3, "Like", times[1]),
    )
    assert read_all(read, path) == ["withdrawn", "withdrawn", "withdrawn", (*SECOND, True)]


def test_a_custom_flag_replaces_a_thumb(tmp_path: Path) -> None:
    times = [f"2026-11-25 0{hour}:00:00" for hour in range(4)]
    path = log(
        tmp_path / "log.csv",
        record(CHAT, 1, "Like", times[0]),
        record(CHAT, 1, "Spam", times[1]),
        record(CHAT, 3, "Spam", times[2]),
        record(CHAT, 3, "Like", times[3]),
    )
    assert read_all(read, path) == ["withdrawn", "no_vote", "no_vote", (*SECOND, True)]
    options = ReadOptions(labels={"Spam": False})
    votes = [vote for vote in read([path], options) if isinstance(vote, Vote)]
    assert [vote.label for vote in latest_votes(votes)] == [False, True]


def test_thoughts_are_kept_on_request(tmp_path: Path) -> None:
    path = log(tmp_path / "log.csv", record(CHAT, 3, "Like"))
    vote = only_vote(read, path, options=ReadOptions(keeps_reasoning=True))
    assert vote.completion["content"] == "Searching\n\nMadrid."


FRANCE = ("u: Capital of France?", "The capital is Paris.")
SPAIN = (f"{FRANCE[0]} | a: {FRANCE[1]} | u: And Spain?", "Madrid,-the capital.")


def test_the_log_that_gradio_wrote() -> None:
    """Thumbs that were pressed in a browser. Gradio writes each custom flag twice."""
    path = str(REAL / "gradio_6.31.0.csv")
    spain = ["withdrawn"] * 3 + ["no_vote"] * 2
    italy = ["withdrawn", "withdrawn"]
    assert read_all(read, path) == [
        (*FRANCE, True),
        (*FRANCE, False),
        *spain,
        *italy,
        (*FRANCE, False),
        "withdrawn",
        "no_vote",
        "no_vote",
    ]
    imported = import_votes(read([path], ReadOptions()))
    assert [(row["completion"], row["label"]) for row in imported.rows["thumbs"]] == [
        (FRANCE[1], False)
    ]
    assert imported.num_replaced == 2


def test_gradios_flags_have_the_meaning_of_the_users_mapping() -> None:
    options = ReadOptions(labels={"Spam": False, "=Bad": False})
    imported = import_votes(read([str(REAL / "gradio_6.31.0.csv")], options))
    assert [
        (row["prompt"][-1]["content"], row["completion"], row["label"], row["info"].get("tags"))
        for row in imported.rows["thumbs"]
    ] == [
        ("And Spain?", SPAIN[1], False, ["Spam"]),
        ("Capital of France?", FRANCE[1], False, None),
        ("=SUM(A1), and Italy?", "Reply 4, to =SUM(A1), and Italy?", False, ["=Bad"]),
    ]


def test_other_csv_files_are_refused(tmp_path: Path) -> None:
    path = log(tmp_path / "dataset1.csv", ["a", "b"], header=["input", "output"])
    with raises_error("import-not-an-export", where=path):
        read_all(read, path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(",".join(HEADER) + '\n"a"b,1,Like,now\n', encoding="utf-8")
    with raises_error("csv-syntax", where=f"{path}:2"):
        read_all(read, str(path))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(record(CHAT, 1, "Like"), "And Spain?", id="next-message"),
        pytest.param(record(CHAT, 4, "Like"), "", id="last-message"),
        pytest.param(record(PAIRS, "(0, 1)", "Like"), "And Spain?", id="pairs"),
        pytest.param(record([PAIRS[0], [["/a.png"], "A"]], "(0, 1)", "Like"), "", id="pairs-image"),
        pytest.param(
            record([*CHAT[:2], turn("user", {"type": "file", "file": {}})], 1, "Like"),
            "",
            id="image-alone",
        ),
        pytest.param(
            record([*CHAT[:2], turn("user", "And Spain?"), turn("user", "Please")], 1, "Like"),
            "And Spain?\n\nPlease",
            id="several",
        ),
    ],
)
def test_the_users_next_message_is_the_follow_up(
    tmp_path: Path, row: list[Any], expected: str
) -> None:
    assert only_vote(read, log(tmp_path / "log.csv", row)).follow_up == expected
