"""Votes that were withdrawn in the tool after an import: the next import drops their rows."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.test_pull import EXPORT, Mock, mock
from tests.errors import raises_error
from tests.jobs.chat_log import NAME, chat_log, entry, write_export
from valence.apps.feedback.import_rows import ImportSummary, import_feedback, print_summary
from valence.options import ImportOptions
from valence.terminal import Terminal

__all__ = ["chat_log", "mock"]

pytestmark = pytest.mark.usefixtures("chat_log")

OUT = Path("feedback.jsonl")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labels() -> list[bool]:
    """The labels of the rows that a training run reads."""
    if not OUT.exists():
        return []
    return [json.loads(line)["label"] for line in OUT.read_text().splitlines()]


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().glob("feedback.*")}


def write_lines(path: str, rows: list[dict[str, Any]]) -> str:
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


# What each tool writes


def gradio(votes: list[str]) -> list[str]:
    """A log with votes on one answer, an hour apart; "" for one that is withdrawn."""
    conversation = [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris"},
    ]
    with open("log.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["conversation", "index", "value", "flag", "timestamp"])
        for hour, vote in enumerate(votes):
            time = f"2026-11-25 0{hour}:00:00"
            writer.writerow([json.dumps(conversation), 1, vote, time])
    return ["log.csv"]


def librechat(votes: list[str]) -> list[str]:
    """The messages of a conversation after the last vote."""
    vote = votes[-1]
    rating = {"rating": "thumbsUp" if vote == "Like" else "thumbsDown"} if vote else None
    common = {"conversationId": "c1", "user": "u1"}
    time = {"$date": f"2026-11-25T0{len(votes)}:00:00Z"}
    rows = [
        {"messageId": "m1", "isCreatedByUser": True, "text": "Capital of France?"},
        {"messageId": "m2", "isCreatedByUser": False, "text": "Paris", "parentMessageId": "m1"},
    ]
    rows[1] |= {"feedback": rating, "updatedAt": time}
    return [write_lines("messages.jsonl", [common | row for row in rows])]


def langsmith(votes: list[str]) -> list[str]:
    """Feedback that an agent server updates in place, and its run."""
    run = {
        "id": "r1",
        "trace_id": "r1",
        "run_type": "llm",
        "inputs": {"messages": [{"role": "user", "content": "Capital of France?"}]},
        "outputs": {"choices": [{"message": {"role": "assistant", "content": "Paris"}}]},
    }
    rows = [
        {
            "id": f"f-{key}",
            "run_id": "r1",
            "key": key,
            "score": int(votes[-1] == word),
            "modified_at": f"2026-11-25T0{len(votes)}:00:00Z",
            "feedback_source": {"type": "api"},
        }
        for key, word in (("user_liked", "Like"), ("user_disliked", "Dislike"))
        if word in votes
    ]
    return [write_lines("feedback-export.jsonl", rows), write_lines("runs.jsonl", [run])]


TOOLS = {"gradio": gradio, "librechat": librechat, "langsmith": langsmith}


def do_import(tool: str, *votes: str) -> ImportSummary:
    return import_feedback(tool, TOOLS[tool](list(votes)), ImportOptions(out=OUT))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_later_export_drops_the_row_of_a_withdrawn_vote(tool: str) -> None:
    assert do_import(tool, "Like").counts.new == 1
    assert labels() == [True]
    summary = do_import(tool, "Like", "")
    assert (summary.counts.withdrawn, summary.total, summary.files) == (1, 0, ())
    assert labels() == []
    assert b"Paris" not in b"".join(contents().values())
    about = json.loads(Path("feedback.about.json").read_text())
    assert (about["votes"], about["sources"][tool]["votes"]) == (0, 0)
    print_summary(summary, Terminal())

    before = contents()
    assert do_import(tool, "Like", "").counts.withdrawn == 0
    assert contents() == before
    if tool != "gradio":  # an older export, which its log is not
        assert do_import(tool, "Like").total == 0
        assert labels() == []

    assert do_import(tool, "Like", "", "Dislike").counts.new == 1
    assert labels() == [False]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_vote_that_was_withdrawn_before_the_first_import_gives_nothing(tool: str) -> None:
    with raises_error("nothing-imported"):
        do_import(tool, "Like", "")
    assert not contents()


def test_an_older_gradio_log_does_not_bring_a_withdrawn_vote_back() -> None:
    do_import("gradio", "Like")
    do_import("gradio", "Like", "")
    do_import("gradio", "Like")
    assert labels() == []


def test_a_thumb_that_a_custom_flag_replaced_is_dropped() -> None:
    do_import("gradio", "Like")
    assert do_import("gradio", "Like", "Spam").counts.withdrawn == 1
    assert labels() == []


def test_a_message_of_librechat_without_the_field_withdraws_nothing() -> None:
    (file,) = librechat(["Like"])
    import_feedback("librechat", [file], ImportOptions(out=OUT))
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    del rows[1]["feedback"]
    other = rows[1] | {"messageId": "m3", "feedback": {"rating": "thumbsDown"}}
    import_feedback("librechat", [write_lines(file, [*rows, other])], ImportOptions(out=OUT))
    assert labels() == [True, False]


def test_an_empty_cell_of_librechats_csv_withdraws_nothing() -> None:
    import_feedback("librechat", librechat(["Like"]), ImportOptions(out=OUT))
    columns = ["messageId", "parentMessageId", "conversationId", "isCreatedByUser", "text"]
    rows = [
        ["m1", "", "c1", "true", "Capital of France?", ""],
        ["m2", "m1", "c1", "", "Paris", ""],
    ]
    with open("messages.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([[*columns, "feedback"], *rows])
    with raises_error("nothing-imported"):
        import_feedback("librechat", ["messages.csv"], ImportOptions(out=OUT))
    assert labels() == [True]


def test_of_two_exports_in_one_import_the_later_state_counts() -> None:
    (older,) = librechat(["Like"])
    Path(older).rename("older.jsonl")
    (newer,) = librechat(["Like", ""])
    (other,) = librechat(["Like"])
    text = Path(other).read_text().replace('"m1"', '"n1"').replace('"m2"', '"n2"')
    Path("other.jsonl").write_text(text.replace('"c1"', '"c2"'))
    librechat(["Like", ""])
    files = ["older.jsonl", newer, "other.jsonl"]
    summary = import_feedback("librechat", files, ImportOptions(out=OUT))
    assert (summary.total, labels()) == (1, [True])


# All votes of a tool


def import_log(*entries: dict[str, Any], **options: Any) -> ImportSummary:
    file = write_export(Path("log.jsonl"), *entries)
    return import_feedback(NAME, [file], ImportOptions(out=OUT, **options))


def test_a_complete_export_drops_the_votes_that_it_does_not_have() -> None:
    do_import("gradio", "Like")
    import_log(entry(1), entry(2, False), entry(3))
    summary = import_log(entry(1), entry(3, False, at=5000), complete=True)
    counts = summary.counts
    assert (counts.unchanged, counts.replaced, counts.withdrawn) == (1, 1, 1)
    assert sorted(labels()) == [False, True, True]  # with that of the other tool
    before = contents()
    again = import_log(entry(1), entry(3, False, at=5000), complete=True)
    assert again.counts.withdrawn == 0
    assert contents() == before


def test_what_a_person_wrote_goes_with_the_vote_and_with_the_chat() -> None:
    log = [
        entry(1),
        entry(2, False, comment="I am Ann", next="Call Ann"),
        entry(3, None, next="Ann is 30"),
    ]
    import_log(*log, unlabelled=True)
    assert sum(content.count(b"Ann") for content in contents().values()) > 3
    summary = import_log(entry(1), complete=True, unlabelled=True)
    assert summary.counts.withdrawn == 1
    assert not any(b"Ann" in content for content in contents().values())


def test_follow_ups_that_were_not_read_are_kept() -> None:
    import_log(entry(1), entry(3, None, next="Shorter"), unlabelled=True)
    before = contents()
    import_log(entry(1), complete=True)
    assert contents() == before


def test_votes_that_a_filter_leaves_out_are_not_withdrawn() -> None:
    import_log(entry(1), entry(2, model="large"))
    summary = import_log(entry(1), entry(2, model="large"), complete=True, model="tiny")
    assert summary.counts.withdrawn == 0
    assert labels() == [True, True]


def test_newer_votes_alone_are_not_all_votes() -> None:
    with raises_error("option-conflict", where="--complete"):
        import_log(entry(1), complete=True, since="last")


def open_webui_row(number: int, rating: int) -> dict[str, Any]:
    messages = {
        "m1": {"id": "m1", "parentId": None, "role": "user", "content": f"question {number}"},
        "m2": {"id": "m2", "parentId": "m1", "role": "assistant", "content": "Paris"},
    }
    return {
        "id": f"f{number}",
        "user_id": "u1",
        "updated_at": 1764000000 + number,
        "data": {"rating": rating},
        "meta": {"chat_id": f"c{number}", "message_id": "m2"},
        "snapshot": {"chat": {"id": f"c{number}", "chat": {"history": {"messages": messages}}}},
    }


@pytest.fixture
def server(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The feedback on a server of Open WebUI."""
    rows: list[dict[str, Any]] = []
    mock.answers[EXPORT] = lambda _: rows
    monkeypatch.setenv("OPEN_WEBUI_API_KEY", "key")
    monkeypatch.setenv("URL", mock.url)
    return rows


def pull_all(**options: Any) -> ImportSummary:
    return import_feedback(
        "open-webui", [], ImportOptions(out=OUT, url=os.environ["URL"], **options)
    )


def test_a_vote_that_was_deleted_from_open_webui_is_dropped(server: list[dict[str, Any]]) -> None:
    server += [open_webui_row(1, 1), open_webui_row(2, -1), open_webui_row(3, 1)]
    pull_all()
    del server[1]
    assert pull_all(since="last").counts.withdrawn == 0
    assert labels() == [True, False, True]
    assert pull_all().counts.withdrawn == 1
    assert labels() == [True, True]
    # a vote without its conversation was not deleted
    server[0]["snapshot"] = None
    assert pull_all().counts.withdrawn == 0
    assert labels() == [True, True]
    server.clear()
    assert pull_all().counts.withdrawn == 2
    assert labels() == []


def test_votes_from_elsewhere_stay_unless_the_server_is_said_to_have_all(
    server: list[dict[str, Any]],
) -> None:
    path = write_lines("export.jsonl", [open_webui_row(7, 1)])
    import_feedback("open-webui", [path], ImportOptions(out=OUT))
    server.append(open_webui_row(1, -1))
    pull_all()
    assert sorted(labels()) == [False, True]
    assert pull_all(complete=True).counts.withdrawn == 1
    assert labels() == [False]
