"""Annotations of Label Studio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import REAL, only_vote, read_all, write_json
from tests.errors import raises_error
from valence.data.importers.label_studio import read
from valence.data.importers.records import ReadOptions, Vote
from valence.types import Origin

PAIR = {"prompt": "Capital of France?", "answer1": "Paris", "answer2": "Lyon"}
SINGLE = {"question": "Capital of France?", "response": "Paris"}
PROMPT = "u: Capital of France?"


def result(kind: str, name: str = "", **value: Any) -> dict[str, Any]:
    return {"from_name": name or kind, "to_name": "x", "type": kind, "value": value}


def annotation(*results: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {
        "id": 11,
        "completed_by": {"id": 3, "email": "ann@example.org"},
        "created_at": "2026-01-02T03:04:05.000000Z",
        "updated_at": "2026-01-02T03:04:06.500000Z",
        "was_cancelled": False,
        "result": list(results),
        **extra,
    }


def task(data: dict[str, Any], *annotations: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"id": 7, "data": data, "annotations": list(annotations), **extra}


GOOD = result("choices", "quality", choices=["Good"])
LEFT = result("pairwise", selected="left")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(task(PAIR, annotation(LEFT)), [("this", "Lyon")], id="left"),
        pytest.param(
            task(PAIR, annotation(result("pairwise", selected="right"))),
            [("other", "Lyon")],
            id="right",
        ),
        pytest.param(
            task(PAIR, annotation(result("pairwise", selected="answer2"))),
            [("other", "Lyon")],
            id="custom-choice-value",
        ),
        pytest.param(
            task(PAIR, annotation(result("choices", choices=["Tie"]))), [("tie", "Lyon")], id="tie"
        ),
        pytest.param(
            task(PAIR, annotation(result("choices", choices=["Both bad"]))),
            [("both_bad", "Lyon")],
            id="both-bad",
        ),
        pytest.param(task(SINGLE, annotation(GOOD)), [True], id="choice"),
        pytest.param(task(SINGLE, annotation(result("rating", rating=4))), [4.0], id="rating"),
        pytest.param(task(SINGLE, annotation(GOOD), annotation(GOOD)), [True, True], id="two"),
    ],
)
def test_verdicts(tmp_path: Path, row: dict[str, Any], expected: list[Any]) -> None:
    outcome = read_all(read, write_json(tmp_path / "tasks.json", [row]))
    assert outcome == [(PROMPT, "Paris", verdict) for verdict in expected]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(task(PAIR, annotation(LEFT, was_cancelled=True)), "cancelled", id="cancelled"),
        pytest.param(task(PAIR, annotation()), "no_vote", id="no-result"),
        pytest.param(task(PAIR), "no_vote", id="no-annotation"),
        pytest.param(
            task(PAIR, annotation(result("pairwise", selected="A"))), "no_vote", id="unknown-word"
        ),
        pytest.param(task(PAIR | {"answer2": ""}, annotation(LEFT)), "empty", id="empty"),
        pytest.param(task({"response": "Paris"}, annotation(GOOD)), "no_prompt", id="no-prompt"),
        pytest.param(
            task({"prompt": "Hi", "reply": "Yo"}, annotation(GOOD)),
            "shape_unknown",
            id="no-completion",
        ),
    ],
)
def test_reasons(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    assert read_all(read, write_json(tmp_path / "tasks.json", [row])) == [expected]


def test_predictions_are_no_votes(tmp_path: Path) -> None:
    row = task(PAIR, annotation(LEFT), predictions=[{"id": 1, "result": [LEFT]}])
    outcome = read_all(read, write_json(tmp_path / "tasks.json", [row]))
    assert outcome == ["machine", (PROMPT, "Paris", ("this", "Lyon"))]


def test_all_fields_of_an_annotation_are_in_the_vote(tmp_path: Path) -> None:
    comment = result("textarea", "why", text=["short", "clear"])
    better = result("textarea", "better", text=["Paris!"])
    path = write_json(tmp_path / "tasks.json", [task(SINGLE, annotation(GOOD, comment, better))])
    vote = only_vote(read, path, options=ReadOptions(paths={"correction": "better"}))
    assert (vote.id, vote.rater, vote.message) == ("11", "3", "7/response")
    assert (vote.updated_at, vote.origin) == (1767323046.5, Origin(path, 1))
    assert (vote.comment, vote.correction) == ("short\nclear", "Paris!")


def test_columns_can_be_named(tmp_path: Path) -> None:
    data = {"chat": {"turns": [{"role": "user", "content": "Hi"}]}, "a": "Yo", "b": "No"}
    paths = {"prompt": "data.chat.turns", "left": "a", "right": "data.b"}
    path = write_json(tmp_path / "tasks.json", [task(data, annotation(LEFT))])
    outcome = read_all(read, path, options=ReadOptions(paths=paths))
    assert outcome == [("u: Hi", "Yo", ("this", "No"))]


def test_old_exports_call_annotations_completions(tmp_path: Path) -> None:
    row = {"id": 7, "data": PAIR, "completions": [annotation(LEFT, skipped=True)]}
    assert read_all(read, write_json(tmp_path / "tasks.json", [row])) == ["cancelled"]


def flat(**columns: Any) -> dict[str, Any]:
    meta = {"id": 7, "annotator": "ann@example.org", "annotation_id": 11, "updated_at": None}
    return {**meta, "created_at": "2026-01-02T03:04:05Z", **columns}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(flat(**PAIR, pw=[{"selected": "left"}]), ("this", "Lyon"), id="pairwise"),
        pytest.param(flat(**PAIR, pw='[{"selected": "right"}]'), ("other", "Lyon"), id="json-cell"),
        pytest.param(flat(**SINGLE, label="Good"), True, id="choice"),
        pytest.param(flat(**SINGLE, stars=[{"rating": 2}]), 2.0, id="rating"),
        pytest.param(flat(**SINGLE, verified="no", label="Good"), True, id="data-is-no-annotation"),
        pytest.param(
            flat(question=SINGLE["question"], _data_response="Paris", response="Good"),
            True,
            id="data-and-control-of-one-name",
        ),
    ],
)
def test_flat_rows(tmp_path: Path, row: dict[str, Any], expected: object) -> None:
    options = ReadOptions(paths={"label": "response"}) if "_data_response" in row else ReadOptions()
    outcome = read_all(read, write_json(tmp_path / "min.json", [row]), options=options)
    assert outcome == [(PROMPT, "Paris", expected)]


@pytest.mark.parametrize("name", ["label_studio_min.json", "label_studio.csv"])
def test_flat_exports_that_label_studio_wrote(name: str) -> None:
    assert read_all(read, str(REAL / name)) == [
        (PROMPT, "Paris", ("this", "Lyon")),
        ("u: Two?", "2", ("tie", "two")),
        "no_vote",
    ]


def test_the_json_that_label_studio_wrote() -> None:
    assert read_all(read, str(REAL / "label_studio.json")) == [
        "machine",
        (PROMPT, "Paris", ("this", "Lyon")),
        "cancelled",
        ("u: Two?", "2", ("tie", "two")),
        "no_vote",
    ]


def test_all_three_exports_name_the_same_votes() -> None:
    names = ("label_studio.json", "label_studio_min.json", "label_studio.csv")
    exports = [
        [
            (vote.id, vote.comment, vote.updated_at)
            for vote in read([str(REAL / name)], ReadOptions())
            if isinstance(vote, Vote)
        ]
        for name in names
    ]
    assert exports[0] == [("11", "clear", 1767323045.0), ("21", "", 1767323045.0)]
    assert exports[1] == exports[2] == exports[0]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "tasks.json", [{"data": {}, "id": 1}]))
