"""Imports of feedback: files, changes by a second import, and the state after a killed one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.arch.source import ROOT
from tests.data.importers.test_fastchat import LEFT, RIGHT, logged_battle, single
from tests.data.importers.test_pull import Mock, mock, score, serve_langfuse
from tests.errors import raises_error
from tests.jobs.chat_log import (
    NAME,
    chat_log,
    entry,
    install_until_undone,
    write_export,
)
from valence.apps.feedback import import_rows
from valence.apps.feedback.import_rows import ImportSummary, import_feedback, print_summary
from valence.apps.feedback.import_store import ImportStore, merge_votes
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.kind_names import METHOD_FOR, WORDS
from valence.options import ImportOptions
from valence.reports.verdict import rows_needed
from valence.types import Origin

__all__ = ["chat_log", "mock"]

pytestmark = pytest.mark.usefixtures("chat_log")

OUT = Path("feedback.jsonl")
EVERY_KIND = (
    entry(1),
    entry(2, False),
    entry(3, None, score=4.0),
    entry(4, None, other="other 4", winner="other", other_model="large"),
    entry(5, None, better="better 5"),
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def do_import(*entries: dict[str, Any], **options: Any) -> ImportSummary:
    """Import these entries of the log."""
    file = write_export(Path("log.jsonl"), *entries)
    return import_feedback(NAME, [file], ImportOptions(out=OUT, **options))


def rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def contents(folder: Path = Path()) -> dict[str, bytes]:
    """All that imports wrote."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name.startswith("feedback.")}


def counts(summary: ImportSummary) -> tuple[int, int, int, int]:
    result = summary.counts
    return result.new, result.replaced, result.unchanged, result.superseded


# What is written


def test_each_kind_of_rows_has_a_file() -> None:
    summary = do_import(*EVERY_KIND)
    assert {(file.path, file.kind, file.rows) for file in summary.files} == {
        ("feedback.jsonl", "thumbs", 2),
        ("feedback.scores.jsonl", "scores", 1),
        ("feedback.pairs.jsonl", "pairs", 2),
        ("feedback.demonstrations.jsonl", "demonstrations", 1),
    }
    assert [(row["completion"], row["label"]) for row in rows(OUT)] == [
        ("answer 1", True),
        ("answer 2", False),
    ]
    assert rows("feedback.scores.jsonl")[0]["score"] == 4.0
    assert [(row["chosen"], row["rejected"]) for row in rows("feedback.pairs.jsonl")] == [
        ("other 4", "answer 4"),
        ("better 5", "answer 5"),
    ]
    assert rows("feedback.demonstrations.jsonl")[0]["completion"] == "better 5"
    assert counts(summary) == (5, 0, 0, 0)
    assert (summary.votes, summary.total, summary.num_raters) == (5, 5, 5)


def printed(summary: ImportSummary) -> str:
    console = Console(file=StringIO(), width=200)
    print_summary(summary, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_summary_explains_the_files_and_names_those_with_few_rows() -> None:
    shown = printed(do_import(*EVERY_KIND))
    for kind, method in METHOD_FOR.items():
        if kind not in ("ranking", "prompt", "feedback"):
            assert f"{WORDS[kind]}, for {method}" in shown
    for path, needed in {"feedback": rows_needed(0.5), "feedback.pairs": rows_needed(None)}.items():
        assert re.search(rf"^{path}\.jsonl: 2 .* {needed} ", shown, re.MULTILINE)


@pytest.mark.parametrize("is_up", [True, False])
def test_thumbs_of_one_kind_have_nothing_to_compare_with(is_up: bool) -> None:
    shown = printed(do_import(entry(1, is_up), entry(2, is_up)))
    assert ("chosen_to_demonstrations" in shown) is is_up
    assert "all thumbs are" in shown


def import_fastchat() -> ImportSummary:
    """Import a thumb and a pair from FastChat, most of whose rows are pairs."""
    file = write_export(Path("fastchat.jsonl"), single(), logged_battle("rightvote", LEFT, RIGHT))
    return import_feedback("fastchat", [file], ImportOptions(out=OUT))


def test_where_pairs_are_the_main_kind_thumbs_have_a_file_of_their_own() -> None:
    import_fastchat()
    assert [row["chosen"] for row in rows(OUT)] == ["Yo"]
    assert [row["label"] for row in rows("feedback.thumbs.jsonl")] == [True]
    assert not Path("feedback.pairs.jsonl").exists()


def test_the_description_has_checksums_and_names_no_person_or_folder(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    os.chdir(inside)
    file = write_export(tmp_path / "log.jsonl", *EVERY_KIND)
    import_feedback(NAME, [file], ImportOptions(out=OUT))
    about = json.loads(Path("feedback.about.json").read_text())
    assert about["sources"] == {NAME: {"files": ["log.jsonl"], "votes": 5}}
    assert (about["votes"], about["raters"]) == (5, 5)
    assert (about["from"], about["to"]) == (
        "1970-01-01T00:16:41+00:00",
        "1970-01-01T00:16:45+00:00",
    )
    assert {name: item["sha256"] for name, item in about["files"].items()} == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in contents().items()
        if name != "feedback.about.json"
    }
    everything = b"".join(contents().values())
    assert b"person" not in everything
    assert str(tmp_path).encode() not in everything
    assert {row["rater"] for row in rows("feedback.votes.jsonl")} == {
        rater for name in ("", ".scores", ".pairs") for row in rows(f"feedback{name}.jsonl")
        for rater in row["info"]["raters"]
    }  # fmt: skip


@pytest.mark.parametrize("text", ["half \ud800", float("nan")], ids=["surrogate", "nan"])
def test_a_vote_that_json_cannot_hold_is_skipped(text: Any) -> None:
    bad = entry(2, None, score=text) if isinstance(text, float) else entry(2, answer=text)
    summary = do_import(entry(1), bad)
    assert summary.skipped["shape_unknown"].place == "log.jsonl:2"
    assert len(rows(OUT)) == 1


def test_votes_that_make_no_row_are_skipped_with_the_reason() -> None:
    summary = do_import(
        entry(1),
        entry(2, question=""),
        entry(3, None, other="answer 3", winner="this"),
        entry(4, answer=""),
    )
    assert {reason: item.place for reason, item in summary.skipped.items()} == {
        "no_prompt": "log.jsonl:2",
        "identical": "log.jsonl:3",
        "shape_unknown": "log.jsonl:4",
    }
    assert {file.path: file.rows for file in summary.files} == {"feedback.jsonl": 1}


def test_votes_of_machines_are_left_out_unless_asked_for() -> None:
    result = do_import(entry(1), entry(2, machine=True))
    assert (result.votes, result.skipped["machine"].count) == (1, 1)
    result = do_import(entry(1), entry(2, machine=True), include_machine=True)
    assert (result.votes, result.skipped) == (2, {})


def test_raters_who_disagree_are_counted() -> None:
    def vote(number: int, target: int, label: bool) -> dict[str, Any]:
        same = {name: entry(target)[name] for name in ("question", "answer", "message")}
        return entry(number, label, **same)

    summary = do_import(
        vote(1, 1, True), vote(2, 1, True), vote(3, 1, False), vote(4, 4, True), vote(5, 4, False)
    )
    (row,) = rows(OUT)
    assert (row["label"], row.get("weight", 1.0)) == (True, 1.0)
    assert (summary.num_shared, summary.agreement) == (2, 0.25)
    assert (summary.skipped["disagreement"].count, summary.skipped["disagreement"].place) == (
        2,
        "log.jsonl:4",
    )


def test_raters_who_saw_two_completions_in_another_order_agree() -> None:
    def compare(number: int, one: str, two: str, winner: str) -> dict[str, Any]:
        texts = {"A": "first", "B": "second"}
        return entry(
            number, None, question="q", answer=texts[one], message="", other=texts[two],
            winner=winner,
        )  # fmt: skip

    votes = [compare(1, "A", "B", "this"), compare(2, "B", "A", "other")]
    assert do_import(*votes).agreement == 1.0
    (pair,) = rows("feedback.pairs.jsonl")
    assert (pair["chosen"], pair.get("soft")) == ("first", None)
    summary = do_import(*votes, compare(3, "A", "B", "other"), compare(4, "A", "B", "tie"))
    assert (summary.num_shared, summary.agreement) == (1, 1 / 6)
    (pair,) = rows("feedback.pairs.jsonl")
    assert (pair["chosen"], pair["soft"]) == ("first", 2.5 / 4)


# Again, and newer


def test_the_same_export_again_changes_nothing() -> None:
    do_import(*EVERY_KIND)
    before, times = contents(), {p.name: p.stat().st_mtime_ns for p in Path().glob("feedback.*")}
    summary = do_import(*EVERY_KIND)
    assert counts(summary) == (0, 0, 5, 0)
    assert contents() == before
    assert {p.name: p.stat().st_mtime_ns for p in Path().glob("feedback.*")} == times
    other = write_export(Path("renamed.jsonl"), *EVERY_KIND)
    import_feedback(NAME, [other], ImportOptions(out=OUT))
    assert contents() == before


def test_a_newer_vote_replaces_an_older_one_in_its_place() -> None:
    do_import(entry(1), entry(2), entry(3))
    summary = do_import(entry(2, False, at=5000), entry(4))
    assert counts(summary) == (1, 1, 0, 0)
    votes = [(vote["message"], vote["label"]) for vote in rows("feedback.votes.jsonl")]
    assert votes == [("m1", True), ("m2", False), ("m3", True), ("m4", True)]
    assert {row["completion"]: row["label"] for row in rows(OUT)} == {
        "answer 1": True,
        "answer 2": False,
        "answer 3": True,
        "answer 4": True,
    }


def test_an_older_vote_does_not_replace_a_newer_one() -> None:
    do_import(entry(1, True, at=5000))
    before = contents()
    assert counts(do_import(entry(1, False, at=4000))) == (0, 0, 1, 0)
    assert contents() == before


@pytest.mark.parametrize("at", [0, 4000])
def test_of_votes_with_the_same_time_the_one_that_is_imported_later_counts(at: int) -> None:
    do_import(entry(1, True, at=at))
    assert counts(do_import(entry(1, False, at=at))) == (0, 1, 0, 0)
    assert [row["label"] for row in rows(OUT)] == [False]


def test_a_vote_of_the_same_rater_on_the_same_completion_replaces_one_with_another_id() -> None:
    first = entry(1, True)
    second = first | {"id": "v2", "at": 5000, "vote": False}
    assert counts(do_import(first, second)) == (1, 0, 0, 1)
    assert counts(do_import(first, second)) == (0, 0, 1, 1)
    assert [row["label"] for row in rows(OUT)] == [False]


def test_a_vote_that_moved_to_another_completion_leaves_the_first_one() -> None:
    do_import(entry(1), entry(2))
    assert counts(do_import(entry(1, False, at=5000, message="m9", answer="answer 9"))) == (
        0,
        1,
        0,
        0,
    )
    assert {row["completion"] for row in rows(OUT)} == {"answer 2", "answer 9"}


def test_comparisons_of_one_vote_with_several_completions_are_all_kept() -> None:
    votes = [entry(1, None, other=f"other {n}", winner="this") for n in range(3)]
    assert counts(do_import(*votes)) == (3, 0, 0, 0)
    assert len(rows("feedback.pairs.jsonl")) == 3
    assert counts(do_import(*votes)) == (0, 0, 3, 0)
    assert counts(do_import(*[vote | {"at": 5000} for vote in votes[:2]])) == (0, 2, 0, 0)
    assert [row["rejected"] for row in rows("feedback.pairs.jsonl")] == ["other 0", "other 1"]


def test_votes_with_one_id_on_several_completions_are_all_kept() -> None:
    votes = [entry(n, n == 1, id="turn", at=n, parent="p", question="q") for n in (1, 2)]
    assert counts(do_import(*votes)) == (2, 0, 0, 0)
    assert counts(do_import(*votes)) == (0, 0, 2, 0)
    (pair,) = rows("feedback.pairs.jsonl")
    assert (pair["chosen"], pair["rejected"]) == ("answer 1", "answer 2")


def test_a_file_whose_last_row_goes_is_removed() -> None:
    do_import(entry(1), entry(2, None, score=1.0))
    assert Path("feedback.scores.jsonl").exists()
    do_import(entry(2, True, at=5000))
    assert not Path("feedback.scores.jsonl").exists()
    assert set(json.loads(Path("feedback.about.json").read_text())["files"]) == {
        "feedback.jsonl",
        "feedback.votes.jsonl",
    }


def a_vote(id: str, at: float, rater: str, target: str, label: bool | str | None) -> Vote:
    is_follow_up = isinstance(label, str)
    return Vote(
        source=NAME,
        id=f"{id}/follow_up" if is_follow_up else id,
        updated_at=at,
        rater=rater,
        prompt=({"role": "user", "content": "question"},),
        completion={"role": "assistant", "content": target},
        label=None if isinstance(label, str) else label,
        follow_up=label if isinstance(label, str) else "",
        origin=Origin("log", 1),
    )


VOTES = st.lists(
    st.builds(
        a_vote,
        st.sampled_from("abc"),
        st.sampled_from((0.0, 1.0, 2.0)),
        st.sampled_from(("", "x", "y")),
        st.sampled_from("mn"),
        st.sampled_from((True, False, None, "next")),
    ),
    max_size=6,
)


@given(VOTES, VOTES)
def test_merging_twice_changes_nothing(earlier: list[Vote], later: list[Vote]) -> None:
    stored, first = merge_votes([], earlier)
    assert (first.new, first.replaced) == (sum(vote.has_verdict for vote in stored), 0)
    once, counted = merge_votes(stored, later)
    twice, again = merge_votes(once, later)
    assert twice == once
    assert (again.new, again.replaced, again.withdrawn) == (0, 0, 0)
    for merge, votes in ((counted, later), (again, later), (first, earlier)):
        num_verdicts = sum(vote.has_verdict for vote in votes)
        assert merge.new + merge.replaced + merge.unchanged + merge.superseded == num_verdicts
    assert len({vote.key for vote in once}) == len(once)
    for vote in (*earlier, *later):
        rivals = [v for v in (*earlier, *later) if v is not vote and vote.key == v.key]
        rivals += [v for v in (*earlier, *later) if v is not vote and vote.id == v.id]
        if all(vote.updated_at > rival.updated_at for rival in rivals):
            assert vote in once


# Feedback as text


FOLLOWED = entry(3, None, next="Shorter")


def test_feedback_is_a_column_next_to_the_label() -> None:
    log = [entry(1, comment="clear"), entry(2, False, next="Why?"), FOLLOWED, entry(4)]
    summary = do_import(*log)
    assert [(row["label"], row.get("feedback")) for row in rows(OUT)] == [
        (True, "clear"),
        (False, "Why?"),
        (True, None),
    ]
    assert not Path("feedback.unlabelled.jsonl").exists()
    assert summary.feedback == {
        "rows": 3,
        "label": 3,
        "feedback": 2,
        "comment": 1,
        "reasons": 0,
        "correction": 0,
        "follow_up": 1,
    }


def test_rows_without_a_label_have_a_file_of_their_own() -> None:
    log = [entry(1, comment="clear"), entry(2, None, better="better 2"), FOLLOWED]
    do_import(*log)
    before = contents()
    summary = do_import(*log, unlabelled=True)
    assert [row["feedback"] for row in rows("feedback.unlabelled.jsonl")] == ["better 2", "Shorter"]
    for name in ("feedback.jsonl", "feedback.pairs.jsonl", "feedback.demonstrations.jsonl"):
        assert contents()[name] == before[name]
    assert counts(summary) == (0, 0, 2, 0)
    assert (summary.votes, summary.total, summary.follow_ups) == (2, 2, 1)
    shown = printed(summary)
    assert "1 answer read without a vote" in shown
    assert re.search(r"^feedback\.unlabelled\.jsonl +2 +unlabelled ", shown, re.MULTILINE)
    assert (
        "Feedback as text: 3 of 3 rows (1 with a comment, 1 with a correction, "
        "1 with a follow-up); 1 with a label"
    ) in shown
    assert (
        "valence init feedback.unlabelled.jsonl --out unlabelled.yaml --method hindsight" in shown
    )


def test_later_imports_keep_rows_without_a_label() -> None:
    do_import(entry(1), FOLLOWED, unlabelled=True)
    do_import(entry(2))
    assert [row["feedback"] for row in rows("feedback.unlabelled.jsonl")] == ["Shorter"]
    before = contents()
    do_import(entry(1), entry(2), FOLLOWED, unlabelled=True)
    assert contents() == before


def test_chats_without_any_vote_fill_the_main_file() -> None:
    with raises_error("nothing-imported", fix="--unlabelled"):
        do_import(FOLLOWED)
    do_import(FOLLOWED, unlabelled=True)
    assert [(row["completion"], row["feedback"]) for row in rows(OUT)] == [("answer 3", "Shorter")]
    do_import(entry(1))
    assert [row["label"] for row in rows("feedback.thumbs.jsonl")] == [True]


def test_a_vote_after_the_follow_up_gives_the_row_its_label() -> None:
    do_import(entry(1), FOLLOWED, unlabelled=True)
    do_import(FOLLOWED | {"vote": False, "next": ""})
    assert not Path("feedback.unlabelled.jsonl").exists()
    assert [(row["label"], row.get("feedback")) for row in rows(OUT)] == [
        (True, None),
        (False, "Shorter"),
    ]


def test_since_last_is_the_last_vote_and_not_the_last_message() -> None:
    do_import(entry(1), FOLLOWED, unlabelled=True)
    assert do_import(entry(2), since="last").counts.new == 1


def test_logs_of_chats_give_rows_without_a_label() -> None:
    turns = [("user", "Hi"), ("assistant", "Yo"), ("user", "Shorter")]
    log = {"messages": [{"role": role, "content": text} for role, text in turns]}
    Path("chats.jsonl").write_text(json.dumps(log))
    summary = import_feedback("chats", ["chats.jsonl"], ImportOptions(out=OUT))
    (row,) = rows(OUT)
    assert (row["completion"], row["feedback"]) == ("Yo", "Shorter")
    assert (summary.votes, summary.total, summary.follow_ups) == (0, 0, 1)
    assert "votes" not in printed(summary)


# Filters


def test_since_leaves_out_older_votes_and_last_is_the_newest_one_that_is_stored() -> None:
    log = [entry(n) for n in range(6)]
    result = do_import(*log, since="1970-01-01T00:16:42")
    assert (result.votes, result.skipped["before_since"].count) == (4, 2)
    result = do_import(*log, entry(9), since="last")
    assert (result.counts.new, result.counts.unchanged, result.skipped["before_since"].count) == (
        1,
        1,
        5,
    )
    before = contents()
    result = do_import(*log, since="last")
    assert (result.votes, result.skipped["before_since"].count) == (0, 6)
    assert contents() == before
    with raises_error("date-invalid", where="--since"):
        do_import(*log, since="yesterday")


def test_a_date_without_a_time_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC+12")
        time.tzset()
        summary = do_import(*(entry(n) for n in range(6)), since="1970-01-01T00:16:42")
    time.tzset()
    assert summary.votes == 4


def test_votes_without_a_time_pass_since() -> None:
    assert do_import(entry(1, at=0), since="2020-01-01").votes == 1


def test_model_leaves_out_completions_of_others() -> None:
    log = [
        entry(1),
        entry(2, model="large"),
        entry(3, None, other="other", winner="this", model="large", other_model="tiny"),
    ]
    assert do_import(*log, model="tiny").skipped["other_model"].example == "large"
    assert [row["completion"] for row in rows(OUT)] == ["answer 1"]
    assert len(rows("feedback.pairs.jsonl")) == 1
    assert do_import(*log).models == {"large": 2, "tiny": 1}


def test_the_weights_that_kto_advises_are_in_the_summary() -> None:
    result = do_import(*(entry(n, n == 0) for n in range(4)))
    assert result.weights is not None
    assert (result.weights.n_up, result.weights.n_down) == (1, 3)
    assert result.weights.change == "desirable_weight"
    assert result.to_dict()["weights"]["advice"] == result.weights.remedy
    assert result.files[0].command == "valence init feedback.jsonl"


# Mistakes


@pytest.mark.parametrize(
    ("log", "options", "reason", "fix"),
    [
        ([entry(1, None)], {}, "without a vote", ""),
        ([entry(1, machine=True)], {}, "model or program", "--include-machine"),
        ([entry(1)], {"model": "large"}, "another model", "--model"),
        ([entry(1)], {"since": "2020-01-01"}, "--since", "--since"),
        ([], {}, "no votes", ""),
    ],
    ids=["no vote", "machine", "model", "since", "empty"],
)
def test_nothing_is_written_where_nothing_is_imported(
    log: list[dict[str, Any]], options: dict[str, Any], reason: str, fix: str
) -> None:
    with raises_error("nothing-imported", where="log.jsonl", fix=fix) as raised:
        do_import(*log, **options)
    assert reason in raised.error.message
    assert contents() == {}


def test_an_unknown_source_is_refused_with_the_nearest_one() -> None:
    with raises_error("source-unknown", fix="open-webui"):
        import_feedback("open-webiu", ["log.jsonl"], ImportOptions(out=OUT))


@pytest.mark.parametrize("files", [[], ["log.jsonl"]])
def test_either_files_or_a_url_are_read(files: list[str]) -> None:
    with raises_error("import-input"):
        import_feedback(
            "open_webui", files, ImportOptions(out=OUT, url="http://host" if files else None)
        )


def test_a_tool_without_a_server_has_no_url() -> None:
    with raises_error("source-not-pullable"):
        import_feedback(NAME, [], ImportOptions(out=OUT, url="http://host"))


def test_a_server_is_asked_for_votes_from_since_on(
    mock: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_rows, "EVERY", 0.0)
    monkeypatch.setenv("KEY", "public:secret")
    new = {"updatedAt": "2026-05-02T12:00:00.000Z"}
    lost = score(3, traceId=None, sessionId="c1", **new)
    serve_langfuse(mock, [score(1, userId="person"), score(2, **new), lost])
    for since in (None, "last"):
        summary = import_feedback(
            "langfuse", [], ImportOptions(out=OUT, url=mock.url, token_env="KEY", since=since)
        )
        assert summary.skipped["no_conversation"].place.startswith(f"{mock.url}:")
    traces = [path[-1] for path in mock.paths() if "traces" in path]
    assert sorted(traces) == ["1", "2", "2"]
    assert "3 votes read" in capsys.readouterr().out
    assert b"person" not in b"".join(contents().values())


def read_from_url(_: list[str], __: ReadOptions) -> Iterator[Vote | Skipped]:
    yield a_vote("a", 7.0, "person", "answer", True)
    yield Skipped("no_vote", Origin("https://user:key@host/path?key=1", 1))


def test_the_summary_has_no_credentials_of_a_url() -> None:
    file = write_export(Path("log.jsonl"))
    summary = import_feedback(f"{__name__}:read_from_url", [file], ImportOptions(out=OUT))
    assert summary.skipped["no_vote"].place == "https://host/path:1"


def test_outputs_are_not_inputs() -> None:
    do_import(entry(1))
    with raises_error("output-is-input"):
        import_feedback(NAME, ["feedback.votes.jsonl"], ImportOptions(out=OUT))


def test_rows_that_were_edited_are_not_lost() -> None:
    do_import(entry(1), entry(2))
    original = contents()
    OUT.write_text("mine\n")
    with raises_error("output-edited", where="feedback.jsonl", fix="--overwrite"):
        do_import(entry(3))
    assert OUT.read_text() == "mine\n"
    assert do_import(entry(1), entry(2), overwrite=True).counts.unchanged == 2
    assert contents() == original


def test_a_file_that_no_import_wrote_is_not_replaced() -> None:
    Path("feedback.pairs.jsonl").write_text("mine\n")
    do_import(entry(1))
    with raises_error("output-foreign", where="feedback.pairs.jsonl", fix="--overwrite"):
        do_import(entry(2, None, better="better"))
    assert Path("feedback.pairs.jsonl").read_text() == "mine\n"
    assert [row["completion"] for row in rows(OUT)] == ["answer 1"]
    do_import(entry(2, None, better="better"), overwrite=True)
    assert rows("feedback.pairs.jsonl")[0]["chosen"] == "better"


def change_vote() -> None:
    path = Path("feedback.votes.jsonl")
    path.write_text(path.read_text().replace("answer 1", "answer 9"))


def remove_about() -> None:
    Path("feedback.about.json").unlink()


def remove_votes() -> None:
    Path("feedback.votes.jsonl").unlink()


def damage_about() -> None:
    path = Path("feedback.about.json")
    path.write_text(path.read_text().replace('"votes": 1', '"votes": 2'))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (change_vote, "output-edited"),
        (remove_votes, "output-lines-missing"),
        (remove_about, "output-foreign"),
        (damage_about, "output-state-damaged"),
    ],
)
def test_damaged_votes_are_never_replaced(damage: Callable[[], None], code: str) -> None:
    do_import(entry(1))
    damage()
    before = contents()
    for overwrite in (False, True):
        with raises_error(code):
            do_import(entry(1), overwrite=overwrite)
        assert contents() == before


def test_rows_that_were_deleted_are_made_again() -> None:
    do_import(entry(1))
    before = contents()
    OUT.unlink()
    do_import(entry(1))
    assert contents() == before


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ("feedback.json", "output-not-jsonl"),
        ("nowhere/feedback.jsonl", "path-invalid-output"),
        ("link.jsonl", "path-is-symlink"),
    ],
)
def test_the_output_must_be_a_file_of_json_lines(out: str, code: str) -> None:
    Path("link.jsonl").symlink_to("elsewhere.jsonl")
    file = write_export(Path("log.jsonl"), entry(1))
    with raises_error(code):
        import_feedback(NAME, [file], ImportOptions(out=Path(out)))


def test_a_second_import_at_the_same_time_is_refused() -> None:
    with ImportStore(OUT).locked(), raises_error("output-locked", where="feedback.jsonl"):
        do_import(entry(1))
    do_import(entry(1))
    assert sorted(p.name for p in Path().iterdir() if p.name.startswith(".")) == []


def test_a_full_disk_is_told_and_the_old_state_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    do_import(entry(1))
    before = contents()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with raises_error("file-not-writable", where="a file"):
            do_import(entry(2))
    assert contents() == before
    do_import(entry(2))
    assert len(rows(OUT)) == 2


# Several tools


def test_exports_of_several_tools_share_files() -> None:
    """The first one decides which kind of rows --out itself has; last is that of each tool."""
    do_import(entry(1))
    summary = import_fastchat()
    assert (summary.counts.new, summary.total) == (2, 3)
    assert {file.path: file.rows for file in summary.files} == {
        "feedback.jsonl": 2,
        "feedback.pairs.jsonl": 1,
    }
    about = json.loads(Path("feedback.about.json").read_text())
    assert about["sources"] == {
        NAME: {"files": ["log.jsonl"], "votes": 1},
        "fastchat": {"files": ["fastchat.jsonl"], "votes": 2},
    }
    assert do_import(entry(1), entry(2), since="last").counts.new == 1


# Killed


class Halt(BaseException):
    """The end of the program."""


STEPS = 13
"""Changes on the disk of the second import below: four files and the description twice are written
and put in place, and one file is removed.
"""
OLD = (*EVERY_KIND, entry(6, None, score=1.0))
NEW = (entry(1, False, at=5000), entry(7), entry(3, True, at=5000), entry(6, True, at=5000))


def halt_at(step: int, monkeypatch: pytest.MonkeyPatch, halt: Callable[[], None]) -> list[int]:
    """Halt before change number ``step`` (from 1) on the disk; the changes that were made."""
    results: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path, name = Path(args[0]), function.__name__
            is_change = args[1] & os.O_TRUNC if name == "open" else path.exists()
            if is_change and path.suffix != ".lock":
                results.append(1)
                if len(results) == step:
                    halt()
            return function(*args, **kwargs)

        return call

    for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "open")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return results


def raise_halt() -> None:
    raise Halt


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What the imports below write when nothing halts them: old, new, and of the new ones alone."""
    results: dict[str, dict[str, bytes]] = {}
    for name, imports in (("old", [OLD]), ("new", [OLD, NEW]), ("alone", [NEW])):
        with pytest.MonkeyPatch.context() as patch:
            install_until_undone(patch)
            patch.chdir(tmp_path_factory.mktemp(name))
            for entries in imports:
                do_import(*entries)
            results[name] = contents()
    return results


def check_state(states: dict[str, dict[str, bytes]]) -> None:
    """Each file is that of the old or the new state, and the next import repairs all."""
    for name, content in contents().items():
        if name != "feedback.about.json":
            assert content in (states["old"].get(name), states["new"].get(name)), name
    has_new_rows = any(
        content == states["new"].get(name) != states["old"].get(name)
        for name, content in contents().items()
        if name not in ("feedback.about.json", "feedback.votes.jsonl")
    )
    if has_new_rows:
        assert contents()["feedback.votes.jsonl"] == states["new"]["feedback.votes.jsonl"]
    halted = contents()
    do_import(*OLD)
    repaired = contents()
    assert repaired in (states["old"], states["new"])
    if halted["feedback.votes.jsonl"] == states["new"]["feedback.votes.jsonl"]:
        assert repaired == states["new"]
    do_import(*NEW)
    assert contents() == states["new"]
    assert [p.name for p in Path().iterdir() if p.name.endswith(".part")] == []


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_an_import_that_ends_anywhere_leaves_the_old_or_the_new_state(
    step: int, states: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    do_import(*OLD)
    with monkeypatch.context() as patch:
        halt_at(step, patch, raise_halt)
        with pytest.raises(Halt):
            do_import(*NEW)
    check_state(states)


def test_all_changes_on_the_disk_are_tried(
    states: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    do_import(*OLD)
    with monkeypatch.context() as patch:
        result = halt_at(0, patch, raise_halt)
        do_import(*NEW)
    assert len(result) == STEPS
    assert contents() == states["new"]


def test_a_first_import_that_ends_anywhere_can_be_repeated(
    states: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, STEPS):
        with monkeypatch.context() as patch:
            halt_at(step, patch, raise_halt)
            try:
                do_import(*NEW)
            except Halt:
                assert step < STEPS
        do_import(*NEW)
        assert contents() == states["alone"]
        for path in Path().glob("feedback.*"):
            path.unlink()


KILLED = """
import os, signal, sys
import pytest
from tests.jobs.chat_log import install
from tests.jobs.test_import_rows import NEW, do_import, halt_at

install()
with pytest.MonkeyPatch.context() as patch:
    halt_at(int(sys.argv[1]), patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    do_import(*NEW)
"""


@pytest.mark.parametrize(
    "step", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 6, 7, 9, 11, 13))]
)
def test_a_killed_import_leaves_the_old_or_the_new_state(
    step: int, states: dict[str, dict[str, bytes]]
) -> None:
    do_import(*OLD)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(step)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    check_state(states)
