"""Records of Argilla."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.importers.votes import REAL, only_vote, read_all, write_json
from tests.errors import raises_error
from valence.data.importers.argilla import read
from valence.data.importers.records import ReadOptions, Skipped, Vote

FIELDS = {"prompt": "Capital of France?", "response": "Paris"}
TWO = {"instruction": "Capital of France?", "generation-0": "Paris", "generation-1": "Lyon"}
PROMPT = "u: Capital of France?"


def structured(
    fields: dict[str, Any], suggestions: dict[str, Any] | None = None, **values: Any
) -> dict[str, Any]:
    """A completed record. values: of one user, by question."""
    responses = {
        question.replace("_", "-"): [{"value": value, "user_id": "u1"}]
        for question, value in values.items()
    }
    return {
        "id": "r1",
        "fields": fields,
        "metadata": {},
        "suggestions": suggestions or {},
        "responses": responses,
        "status": "completed",
        "_server_id": "s1",
    }


def flat(*responses: tuple[Any, str, str], **columns: Any) -> dict[str, Any]:
    """A flat record. responses: value, user and status of the question ``quality``."""
    names = ("quality.responses", "quality.responses.users", "quality.responses.status")
    cells = {name: [response[i] for response in responses] or None for i, name in enumerate(names)}
    return {"id": "r1", "status": "pending", **FIELDS, **cells, **columns}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(structured(FIELDS, quality="good"), [True], id="label"),
        pytest.param(structured(FIELDS, score=4), [4.0], id="rating"),
        pytest.param(structured(FIELDS, comment="good"), ["no_vote"], id="comment-alone"),
        pytest.param(structured(FIELDS), ["no_vote"], id="no-response"),
        pytest.param(structured({"prompt": "", "response": "x"}, score=4), ["no_prompt"], id="no"),
        pytest.param(
            structured(FIELDS, quality="good") | {"status": "pending"}, ["draft"], id="pending"
        ),
        pytest.param(flat(("bad", "u1", "submitted")), [False], id="submitted"),
        pytest.param(flat(("bad", "u1", "draft")), ["draft"], id="draft"),
        pytest.param(flat(("bad", "u1", "discarded")), ["cancelled"], id="discarded"),
        pytest.param(
            flat(("bad", "u1", "submitted"), ("good", "u2", "submitted")), [False, True], id="users"
        ),
        pytest.param(flat(), ["no_vote"], id="flat-without-response"),
        pytest.param(
            flat(("bad", "u1", "submitted")) | {"quality.responses.status": None},
            ["draft"],
            id="flat-without-status",
        ),
        pytest.param(flat(**{"quality.suggestion": "bad"}), ["machine"], id="suggestion"),
    ],
)
def test_one_completion(tmp_path: Path, row: dict[str, Any], expected: list[Any]) -> None:
    result = read_all(read, write_json(tmp_path / "records.json", [row]))
    wanted = [item if isinstance(item, str) else (PROMPT, "Paris", item) for item in expected]
    assert result == wanted


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(["generation-1", "generation-0"], ("Lyon", ("this", "Paris")), id="names"),
        pytest.param(
            [{"value": "generation-0", "rank": 2}, {"value": "generation-1", "rank": 1}],
            ("Lyon", ("this", "Paris")),
            id="ranks",
        ),
        pytest.param(
            [{"value": "generation-0", "rank": 1}, {"value": "generation-1", "rank": 1}],
            ("Paris", ("tie", "Lyon")),
            id="equal-ranks",
        ),
        pytest.param("generation-1", ("Lyon", ("this", "Paris")), id="label"),
    ],
)
def test_comparisons(tmp_path: Path, value: object, expected: tuple[Any, Any]) -> None:
    row = structured(TWO, preference=value)
    assert read_all(read, write_json(tmp_path / "r.json", [row])) == [(PROMPT, *expected)]


def test_a_ranking_of_three_gives_three_comparisons(tmp_path: Path) -> None:
    row = structured(
        {"prompt": "Hi", "a": "1", "b": "2", "c": "3", "response": ""}, ranking=["b", "c", "a"]
    )
    assert read_all(read, write_json(tmp_path / "records.json", [row])) == [
        ("u: Hi", "2", ("this", "3")),
        ("u: Hi", "2", ("this", "1")),
        ("u: Hi", "3", ("this", "1")),
    ]


def test_generations_of_distilabel_are_rated_one_by_one(tmp_path: Path) -> None:
    row = structured(
        TWO,
        generation_0_rating=5,
        generation_1_rating=2,
        generation_0_rationale="right",
    )
    path = write_json(tmp_path / "records.json", [row])
    votes = [vote for vote in read([path], ReadOptions()) if isinstance(vote, Vote)]
    results = [(vote.completion["content"], vote.score, vote.scale, vote.comment) for vote in votes]
    assert results == [("Paris", 5.0, (1.0, 5.0), "right"), ("Lyon", 2.0, (1.0, 5.0), "")]


def test_a_response_to_several_questions_is_one_vote(tmp_path: Path) -> None:
    row = structured(FIELDS, quality="good", score=4, comment="clear", correction="Paris!")
    vote = only_vote(read, write_json(tmp_path / "records.json", [row]))
    assert (vote.label, vote.score, vote.comment, vote.correction) == (True, 4.0, "clear", "Paris!")
    assert (vote.rater, vote.message, vote.session) == ("u1", "response", "r1")


def test_agents_are_marked_where_machines_are_included(tmp_path: Path) -> None:
    row = structured(FIELDS, {"quality": {"value": "bad", "score": 0.9, "agent": "judge"}})
    path = write_json(tmp_path / "records.json", [row])
    vote = only_vote(read, path, options=ReadOptions(includes_machine=True))
    assert (vote.is_machine, vote.rater, vote.label) == (True, "judge", False)


def test_a_chat_field_is_a_prompt(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    chat.append({"role": "user", "content": "Bye"})
    row = structured({"chat": chat, "response": "See you"}, quality="good")
    result = read_all(read, write_json(tmp_path / "records.json", [row]))
    assert result == [("u: Hi | a: Yes? | u: Bye", "See you", True)]


def test_the_structured_export_that_argilla_wrote() -> None:
    reasons = [
        item.reason
        for item in read([str(REAL / "argilla.json")], ReadOptions())
        if isinstance(item, Skipped)
    ]
    assert reasons == ["draft", "draft", "machine", "draft"]


def test_the_flat_export_that_argilla_wrote() -> None:
    votes = list(read([str(REAL / "argilla_flat.json")], ReadOptions()))
    first = votes[0]
    assert isinstance(first, Vote)
    assert (first.label, first.score, first.comment) == (True, 4.0, "clear")
    assert [vote.reason for vote in votes[1:] if isinstance(vote, Skipped)] == [
        "cancelled",
        "machine",
        "draft",
    ]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with raises_error("import-not-an-export"):
        read_all(read, write_json(tmp_path / "rows.json", [FIELDS]))
