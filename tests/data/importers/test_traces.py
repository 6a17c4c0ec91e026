"""Which step of a trace a vote is about, and several records of one rater."""

from __future__ import annotations

from typing import Any

from tests.data.importers.exports import assistant, user
from valence.data.importers.records import Vote
from valence.data.importers.traces import Step, Traces, combine_votes
from valence.types import Origin


def step(name: str, parent: str = "", **changes: Any) -> Step:
    fields: dict[str, Any] = {"trace": "t", "is_generation": True, "answer": "Hello", "row": {}}
    return Step(id=name, parent=parent, **{**fields, **changes})


def rated(steps: list[Step], step_id: str = "", trace_id: str = "t") -> str:
    traces = Traces(steps).rated_step(step_id, trace_id)
    return traces.id if isinstance(traces, Step) else traces


def test_steps_may_come_in_any_order() -> None:
    steps = [step("late", start=2.0), step("early", start=1.0)]
    assert rated(steps) == rated(steps[::-1]) == "late"


def test_without_times_the_last_row_is_the_last_step() -> None:
    assert rated([step("a"), step("b")]) == "b"


def test_a_failed_last_call_is_the_one_that_was_rated() -> None:
    steps = [step("a", start=1.0), step("b", start=2.0, is_failed=True, answer=None)]
    assert rated(steps) == "b"


def test_parents_that_go_in_a_circle() -> None:
    steps = [step("a", "b"), step("b", "a"), step("outer", is_generation=False, answer="Hi")]
    assert rated(steps, "outer") == "outer"


def test_a_later_row_of_a_step_replaces_an_earlier_one() -> None:
    assert rated([step("a", answer=None), step("b", start=1.0), step("a", start=2.0)]) == "a"


def test_a_trace_of_enclosing_steps_alone() -> None:
    steps = [step("inner", "root", is_generation=False), step("root", is_generation=False)]
    assert rated(steps) == "root"
    assert rated(steps[:1]) == "message_missing"


def test_conversation_and_user_are_those_of_the_trace() -> None:
    trace = step("t", is_generation=False, session="c1", rater="u1")
    traces = Traces([trace, step("a")]).rated_step("a", "t")
    assert isinstance(traces, Step)
    assert (traces.session, traces.rater) == ("c1", "u1")


def vote(number: int, time: float, rater: str = "r", **message: Any) -> Vote:
    return Vote(
        source="test",
        id=f"v{number}",
        updated_at=time,
        rater=rater,
        prompt=(user("Hi"),),
        completion=assistant("Hello"),
        message="m",
        origin=Origin("x", number),
        **message,
    )


def combined(*votes: Vote) -> list[tuple[bool | None, float | None, str | None]]:
    results = [v for v in combine_votes(votes) if isinstance(v, Vote)]
    return [(v.label, v.score, v.correction) for v in results]


def test_a_changed_label_keeps_the_correction() -> None:
    votes = vote(1, 1.0, label=True), vote(2, 2.0, correction="Hey"), vote(3, 3.0, label=False)
    assert combined(*votes) == [(True, None, "Hey"), (False, None, "Hey")]


def test_records_are_combined_in_the_order_of_their_times() -> None:
    assert combined(vote(1, 2.0, score=0.5), vote(2, 1.0, label=True)) == [(True, 0.5, None)]
    assert combined(vote(1, 2.0, label=False), vote(2, 1.0, label=True)) == [
        (True, None, None),
        (False, None, None),
    ]


def test_records_of_others_and_of_unknown_raters_are_not_combined() -> None:
    assert len(combined(vote(1, 1.0, "a", label=True), vote(2, 1.0, "b", score=1.0))) == 2
    assert len(combined(vote(1, 1.0, "", label=True), vote(2, 1.0, "", score=1.0))) == 2


def test_comparisons_are_not_combined() -> None:
    sides: dict[str, Any] = {"other": assistant("Hey"), "other_message": "n", "winner": "this"}
    assert len(combined(vote(1, 1.0, **sides), vote(2, 2.0, **sides))) == 2
