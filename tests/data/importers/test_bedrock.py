"""DPO rows and human evaluation jobs of Amazon Bedrock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import read_all, write_json, write_jsonl
from tests.errors import raises_error
from valence.data.importers.bedrock import read
from valence.data.importers.records import ReadOptions, Vote

PROMPT = "u: Hi"


def text(value: str) -> list[dict[str, Any]]:
    return [{"text": value}]


def candidate(content: Any, label: str) -> dict[str, Any]:
    return {"content": text(content), "preferenceLabel": label}


GOOD = candidate("Hello", "preferred")
BAD = candidate("What", "non-preferred")


def dpo(*candidates: dict[str, Any], **extra: Any) -> dict[str, Any]:
    last = {"role": "assistant", "candidates": list(candidates)}
    return {
        "schemaVersion": "bedrock-conversation-2024",
        "messages": [{"role": "user", "content": text("Hi")}, last],
        **extra,
    }


PAIR = (PROMPT, "Hello", ("this", "What"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(dpo(GOOD, BAD), [PAIR], id="pair"),
        pytest.param(dpo(BAD, GOOD), [PAIR], id="order"),
        pytest.param(
            dpo(GOOD, BAD, candidate("Go", "non-preferred")),
            [PAIR, (PROMPT, "Hello", ("this", "Go"))],
            id="three",
        ),
        pytest.param(
            dpo(GOOD, BAD, system=text("Be kind.")),
            [(f"s: Be kind. | {PROMPT}", "Hello", ("this", "What"))],
            id="system",
        ),
        pytest.param(dpo(GOOD), ["no_vote"], id="one-candidate"),
        pytest.param(dpo(), ["no_vote"], id="no-candidates"),
        pytest.param(dpo(GOOD, candidate("", "non-preferred")), ["empty"], id="empty"),
        pytest.param(
            dpo(GOOD, BAD)
            | {
                "messages": [
                    {"role": "user", "content": [{"image": {"format": "png"}}]},
                    {"role": "assistant", "candidates": [GOOD, BAD]},
                ]
            },
            ["image"],
            id="image",
        ),
    ],
)
def test_one_dpo_row(tmp_path: Path, row: dict[str, Any], expected: list[Any]) -> None:
    assert read_all(read, write_jsonl(tmp_path / "dpo.jsonl", [row])) == expected


def evaluated(*workers: dict[str, Any], prompt: Any = "Hi") -> dict[str, Any]:
    answers = [
        {
            "answerContent": {"evaluationResults": results},
            "submissionTime": "2026-01-02T03:04:05Z",
            "workerId": f"w{number}",
            "workerMetadata": {"identityData": {"sub": "ann@example.org"}},
        }
        for number, results in enumerate(workers)
    ]
    responses = [
        {"response": "Hello", "modelIdentifier": "a"},
        {"response": "What", "modelIdentifier": "b"},
    ]
    return {
        "humanEvaluationResult": {"humanAnswers": answers, "humanLoopName": "loop1"},
        "inputRecord": {"prompt": prompt},
        "modelResponses": responses,
    }


def entry(result: Any, response: str | None = "0", metric: str = "Help") -> dict[str, Any]:
    named = {} if response is None else {"modelResponseId": response}
    return {"metricName": metric, **named, "result": result}


def ranks(first: int, second: int) -> list[dict[str, Any]]:
    return [{"modelResponseId": "0", "rank": first}, {"modelResponseId": "1", "rank": second}]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        pytest.param(
            {"thumbsUpDown": [entry(True), entry(False, "1")]},
            [(PROMPT, "Hello", True), (PROMPT, "What", False)],
            id="thumbs",
        ),
        pytest.param({"individualLikertScale": [entry(4)]}, [(PROMPT, "Hello", 4.0)], id="likert"),
        pytest.param({"comparisonChoice": [entry({"modelResponseId": "0"}, None)]}, [PAIR], id="0"),
        pytest.param(
            {"comparisonChoice": [entry({"modelResponseId": "1"}, None)]},
            [(PROMPT, "Hello", ("other", "What"))],
            id="choice",
        ),
        pytest.param({"comparisonRank": [entry(ranks(1, 2), None)]}, [PAIR], id="rank"),
        pytest.param(
            {"comparisonRank": [entry(ranks(1, 1), None)]},
            [(PROMPT, "Hello", ("tie", "What"))],
            id="equal-ranks",
        ),
        pytest.param({"thumbsUpDown": [entry(True, "2")]}, ["message_missing"], id="missing"),
        pytest.param({"thumbsUpDown": [entry(None)]}, ["no_vote"], id="no-result"),
        pytest.param({"comparisonLikertScale": [entry(2)]}, ["no_vote"], id="other-method"),
        pytest.param({"comparisonChoice": [entry("x", None)]}, ["shape_unknown"], id="unknown"),
    ],
)
def test_one_evaluation(tmp_path: Path, results: dict[str, Any], expected: list[Any]) -> None:
    path = write_jsonl(tmp_path / "output.jsonl", [evaluated(results)])
    assert read_all(read, path) == expected


def test_a_prompt_may_be_an_object(tmp_path: Path) -> None:
    row = evaluated({"thumbsUpDown": [entry(True)]}, prompt={"text": "Hi"})
    assert read_all(read, write_jsonl(tmp_path / "o.jsonl", [row])) == [(PROMPT, "Hello", True)]


def test_workers_are_distinguished_and_not_named_in_ids(tmp_path: Path) -> None:
    thumbs = {"thumbsUpDown": [entry(True)]}
    path = write_jsonl(tmp_path / "output.jsonl", [evaluated(thumbs, thumbs)])
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    assert [vote.rater for vote in votes] == ["w0", "w1"]
    assert [vote.model for vote in votes] == ["a", "a"]
    assert len({vote.id for vote in votes} | {vote.key for vote in votes}) == 4
    assert not any("w0" in vote.id or "w1" in vote.id for vote in votes)


def test_an_evaluation_without_workers_is_no_vote(tmp_path: Path) -> None:
    assert read_all(read, write_jsonl(tmp_path / "o.jsonl", [evaluated()])) == ["no_vote"]


def test_one_of_several_metrics_must_be_named(tmp_path: Path) -> None:
    results = {"thumbsUpDown": [entry(True), entry(False, metric="Style")]}
    path = write_jsonl(tmp_path / "output.jsonl", [evaluated(results)])
    with raises_error("import-score-name-missing", where=f"{path}:1"):
        read_all(read, path)
    result = read_all(read, path, options=ReadOptions(score_names=("Style",)))
    assert result == [(PROMPT, "Hello", False)]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "rows.json", [{"prompt": "x"}]))
