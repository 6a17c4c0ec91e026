"""LangSmith's feedback with its runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.exports import (
    Rows,
    assistant,
    only_reason,
    only_vote,
    results,
    user,
    write_csv,
    write_jsonl,
)
from tests.errors import raises_error
from valence.data.importers.langsmith import read
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.rows import make_rows

NOON = "2026-05-01T12:00:00.000000+00:00"


def feedback(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "f1",
        "created_at": "2026-05-01T11:00:00+00:00",
        "modified_at": NOON,
        "run_id": "root",
        "trace_id": "root",
        "key": "user_feedback",
        "score": True,
        "value": None,
        "comment": "short",
        "correction": None,
        "feedback_source": {"type": "api", "metadata": {}, "user_id": "owner of the key"},
        "session_id": "project",
        "feedback_group_id": None,
    }
    return row | changes


def llm(name: str = "llm1", **changes: Any) -> dict[str, Any]:
    """A call through the wrapper of OpenAI's client."""
    row = {
        "id": name,
        "run_type": "llm",
        "trace_id": "root",
        "parent_run_id": "root",
        "start_time": "2026-05-01T10:00:01",
        "error": None,
        "inputs": {"model": "tiny", "messages": [user("Hi")]},
        "outputs": {"choices": [{"message": assistant(f"Hello from {name}")}]},
        "extra": {"metadata": {"thread_id": "c1", "user_id": "u1"}},
    }
    return row | changes


def root(**changes: Any) -> dict[str, Any]:
    inputs, outputs = {"question": "Hi"}, {"answer": "Hello"}
    run = llm("root", run_type="chain", parent_run_id=None, inputs=inputs, outputs=outputs)
    return run | changes


def constructor(name: str, **kwargs: Any) -> dict[str, Any]:
    path = ["langchain", "schema", "messages", name]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": kwargs}


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., list[str]]:
    def write(rows: Rows, runs: Rows) -> list[str]:
        return [
            write_jsonl(tmp_path / "feedback.jsonl", rows),
            write_jsonl(tmp_path / "runs.jsonl", runs),
        ]

    return write


Export = Callable[[Rows, Rows], list[str]]


def test_everything_of_a_vote(export: Export) -> None:
    """Feedback on the root run is about the call of a model with the output of the root run."""
    runs = [
        llm("llm2", start_time="2026-05-01T10:00:05"),
        llm("title", start_time="2026-05-01T10:00:08"),
        root(outputs={"answer": "Hello from llm2", "steps": 2}),
        llm("llm1"),
        llm("llm3", start_time="2026-05-01T10:00:07", outputs=None),
        llm("tool", run_type="tool", start_time="2026-05-01T10:00:09"),
        llm("elsewhere", trace_id="root2", start_time="2026-05-01T10:00:09"),
    ]
    vote = only_vote(read, export([feedback()], runs))
    assert (vote.source, vote.id, vote.message) == ("langsmith", "f1", "llm2")
    assert vote.updated_at == datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
    assert (vote.model, vote.session, vote.rater) == ("tiny", "c1", "u1")
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello from llm2"))
    assert (vote.label, vote.score, vote.comment) == (True, None, "short")


def test_feedback_on_a_chain_inside_is_about_the_call_in_it(export: Export) -> None:
    runs = [
        root(),
        root(id="inner", parent_run_id="root"),
        llm("llm1", parent_run_id="inner"),
        llm("llm2", start_time="2026-05-01T10:00:05"),
    ]
    assert only_vote(read, export([feedback(run_id="inner")], runs)).message == "llm1"


def test_feedback_without_a_trace_finds_the_trace_of_its_run(export: Export) -> None:
    paths = export([feedback(trace_id=None)], [root(), llm()])
    assert only_vote(read, paths).message == "llm1"


def test_a_root_without_calls_is_used_if_its_format_is_known(export: Export) -> None:
    run = root(inputs={"input": "Hi"}, outputs={"output": "Hello"})
    vote = only_vote(read, export([feedback()], [run]))
    assert (vote.prompt, vote.completion) == ((user("Hi"),), assistant("Hello"))
    assert only_reason(read, export([feedback()], [root()])) == "shape_unknown"
    paths = ReadOptions(paths={"prompt": "inputs.question", "completion": "outputs.answer"})
    assert only_vote(read, export([feedback()], [root()]), paths).prompt == (user("Hi"),)


def test_runs_of_langchain(export: Export) -> None:
    tool = {"name": "weather", "description": "", "parameters": {"type": "object"}}
    run = llm(
        inputs={
            "messages": [
                [
                    constructor("SystemMessage", content="Be brief."),
                    constructor("HumanMessage", content=[{"type": "text", "text": "Hi"}]),
                ]
            ]
        },
        outputs={
            "generations": [
                [{"text": "Hello", "message": constructor("AIMessage", content="Hello")}]
            ]
        },
        extra={
            "metadata": {"ls_model_name": "tiny"},
            "invocation_params": {"tools": [{"type": "function", "function": tool}]},
        },
    )
    vote = only_vote(read, export([feedback()], [root(), run]))
    assert vote.prompt == ({"role": "system", "content": "Be brief."}, user("Hi"))
    assert vote.completion == assistant("Hello")
    assert vote.tools == ({"type": "function", "function": tool},)
    assert (vote.model, vote.session) == ("tiny", "c1")  # of the root


FEEDBACK: dict[str, tuple[dict[str, Any], bool | None, float | None]] = {
    "true": ({"score": True}, True, None),
    "false": ({"score": False}, False, None),
    "text of CSV": ({"score": "False"}, False, None),
    "a number": ({"score": 1.0}, None, 1.0),
    "a number with a meaning": ({"score": 5}, True, None),
    "a word": ({"score": None, "value": "thumbs_down"}, False, None),
    "a word with a meaning": ({"score": None, "value": "Meh"}, False, None),
    "liked": ({"key": "user_liked", "score": 1}, True, None),
    "disliked": ({"key": "user_disliked", "score": 1}, False, None),
    "disliked, without a score": ({"key": "user_disliked", "score": None}, False, None),
    "a hyphen": ({"key": "user-feedback", "score": False}, False, None),
}


@pytest.mark.parametrize("case", FEEDBACK)
def test_values_of_feedback(case: str, export: Export) -> None:
    changes, label, score = FEEDBACK[case]
    options = ReadOptions(labels={"meh": False, "5": True})
    vote = only_vote(read, export([feedback(**changes)], [llm(), root()]), options)
    assert (vote.label, vote.score) == (label, score)


@pytest.mark.parametrize(
    "correction",
    ["Hey", {"output": "Hey"}, {"choices": [{"message": assistant("Hey")}]}],
)
def test_corrections(correction: object, export: Export) -> None:
    row = feedback(score=None, correction=correction, key="correctness")
    vote = only_vote(read, export([row], [llm(), root()]))
    assert (vote.correction, vote.label, vote.score) == ("Hey", None, None)
    row = feedback(score=False, correction=correction)
    vote = only_vote(read, export([row], [llm(), root()]))
    assert (vote.correction, vote.label) == ("Hey", False)


ERROR = {"error": "RateLimitError", "outputs": None}
SKIPPED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a model": ({"feedback_source": {"type": "model"}}, {}, "machine"),
    "an online evaluator": ({"feedback_source": {"type": "auto_eval"}}, {}, "machine"),
    "another key": ({"key": "correctness"}, {}, "no_vote"),
    "a comment alone": ({"score": None}, {}, "no_vote"),
    "no longer liked": ({"key": "user_liked", "score": 0}, {}, "withdrawn"),
    "a correction of a score": (
        {"score": None, "correction": {"score": 0}},
        {},
        "shape_unknown",
    ),
    "no trace": ({"run_id": "r9", "trace_id": "t9"}, {}, "no_conversation"),
    "no run in the trace": ({"run_id": "r9"}, {}, "message_missing"),
    "no run at all": ({"run_id": None, "trace_id": None}, {}, "no_conversation"),
    "an error": ({}, ERROR, "failed"),
    "several choices": (
        {},
        {"outputs": {"choices": [{"message": assistant("a")}, {"message": assistant("b")}]}},
        "shape_unknown",
    ),
    "cut": (
        {},
        {"outputs": {"choices": [{"text": "He", "finish_reason": "length"}]}},
        "unfinished",
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped(case: str, export: Export) -> None:
    changes, run, reason = SKIPPED[case]
    paths = export([feedback(**changes)], [root(), llm(**run)])
    assert only_reason(read, paths) == reason


def test_evaluators_are_read_when_they_are_asked_for(export: Export) -> None:
    paths = export([feedback(feedback_source={"type": "model"})], [llm(), root()])
    assert only_vote(read, paths, ReadOptions(includes_machine=True)).is_machine


def test_only_users_of_the_ui_are_raters(export: Export) -> None:
    row = feedback(feedback_source={"type": "app", "user_id": "a1"})
    assert only_vote(read, export([row], [llm(), root()])).rater == "a1"
    row = feedback(feedback_source={"type": "app", "user_id": None})
    assert only_vote(read, export([row], [llm(), root()])).rater == ""


def compared(scores: dict[str, object], **changes: Any) -> list[dict[str, Any]]:
    """Feedback of one group, on runs of one call each."""
    same = {"key": "preference", "feedback_group_id": "g1"} | changes
    return [
        feedback(id=f"f-{run}", run_id=run, trace_id=run, score=score, **same)
        for run, score in scores.items()
    ]


def single(name: str, **changes: Any) -> dict[str, Any]:
    return llm(name, trace_id=name, parent_run_id=None) | changes


@pytest.mark.parametrize(
    ("scores", "winner"),
    [((1, 0), "this"), ((0, 1), "other"), ((0.5, 0.5), "tie"), ((False, True), "other")],
)
def test_runs_of_a_group_are_compared(
    scores: tuple[object, object], winner: str, export: Export
) -> None:
    rows = compared(dict(zip(("a", "b"), scores, strict=True)))
    vote = only_vote(read, export(rows, [single("a"), single("b")]))
    assert (vote.winner, vote.label, vote.score) == (winner, None, None)
    assert (vote.completion, vote.message) == (assistant("Hello from a"), "a")
    assert (vote.other, vote.other_message) == (assistant("Hello from b"), "b")
    assert (vote.id, vote.other_model) == ("f-a/f-b", "tiny")


def test_three_runs_give_a_pair_for_each_two(export: Export) -> None:
    rows = compared({"a": 1, "b": 0.5, "c": 0})
    votes = results(read, export(rows, [single("a"), single("b"), single("c")]))
    outcomes = [(v.message, v.other_message, v.winner) for v in votes if isinstance(v, Vote)]
    assert outcomes == [("a", "b", "this"), ("a", "c", "this"), ("b", "c", "this")]
    pairs = make_rows([vote for vote in votes if isinstance(vote, Vote)]).rows["pairs"]
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [
        ("Hello from a", "Hello from b"),
        ("Hello from a", "Hello from c"),
        ("Hello from b", "Hello from c"),
    ]


OTHER_PROMPT = {"inputs": {"messages": [user("Bye")]}}
GROUPS: dict[str, tuple[dict[str, object], dict[str, Any], dict[str, Any], str]] = {
    "one run alone": ({"a": 1}, {}, {}, "message_missing"),
    "no score": ({"a": None, "b": 1}, {}, {}, "no_vote"),
    "another prompt": ({"a": 0, "b": 1}, {}, OTHER_PROMPT, "multi_turn"),
    "an error": ({"a": 0, "b": 1}, {}, ERROR, "failed"),
    "a missing run": ({"a": 0, "c": 1}, {}, {}, "no_conversation"),
    "a model": ({"a": 0, "b": 1}, {"feedback_source": {"type": "model"}}, {}, "machine"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_that_are_skipped(case: str, export: Export) -> None:
    scores, changes, run, reason = GROUPS[case]
    paths = export(compared(scores, **changes), [single("a"), single("b", **run)])
    assert only_reason(read, paths) == reason


def test_groups_of_other_keys_than_those_asked_for(export: Export) -> None:
    paths = export(compared({"a": 1, "b": 0}), [single("a"), single("b")])
    assert only_reason(read, paths, ReadOptions(score_names=("user_feedback",))) == "no_vote"
    assert only_vote(read, paths, ReadOptions(score_names=("preference",))).winner == "this"


def test_objects_in_cells(tmp_path: Path) -> None:
    paths = [
        write_csv(tmp_path / "feedback.csv", [feedback(score="0.0")]),
        write_csv(tmp_path / "runs.csv", [root(), llm()]),
    ]
    vote = only_vote(read, paths, ReadOptions(labels={"0": False}))
    assert (vote.label, vote.message, vote.session) == (False, "llm1", "c1")


def test_a_missing_file(export: Export, tmp_path: Path) -> None:
    rows, runs = export([feedback()], [root()])
    with raises_error("import-file-missing", where="feedback.jsonl", fix="runs"):
        results(read, [rows])
    with raises_error("import-file-missing", where="runs.jsonl", fix="feedback"):
        results(read, [runs])
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "a"}])
    with raises_error("import-not-an-export", where="other.jsonl"):
        results(read, [rows, runs, other])


def test_bad_rows_are_skipped(export: Export) -> None:
    rows, runs = export([feedback()], [root(), llm()])
    with Path(rows).open("a", encoding="utf-8") as file:
        file.write("7\n")
    reasons = [r.reason for r in results(read, [rows, runs]) if isinstance(r, Skipped)]
    assert reasons == ["shape_unknown"]
