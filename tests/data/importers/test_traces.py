"""Which step of a trace a vote is about, and several records of one rater."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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


ROOT = step("t", is_generation=False, answer="the answer")


def test_steps_may_come_in_any_order() -> None:
    steps = [ROOT, step("late", start=2.0, answer="the answer"), step("early", start=1.0)]
    assert rated(steps) == rated(steps[::-1]) == "late"


def test_without_times_the_last_row_is_the_last_step() -> None:
    answers = {"answer": "the answer"}
    assert rated([ROOT, step("a", **answers), step("b", **answers)]) == "b"


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
LOOK = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "fine", "tool_call_id": "c"}
TITLE = step("title", start=9.0, answer="A title")
ANSWER = step("a", start=1.0, answer="the answer ")
BOTH = [ANSWER, TITLE]
CHAT_TITLE = step(
    "title",
    start=9.0,
    answer="A title",
    inputs=[user("Hi"), assistant("the answer "), user("Write a title.")],
)
OUTPUTS: dict[str, tuple[Any, list[Step], str]] = {
    "a later call writes a title": ("the answer", [ANSWER, TITLE], "a"),
    "a message": (assistant("the answer"), [ANSWER, TITLE], "a"),
    "the conversation": ({"messages": [user("Hi"), assistant("the answer")]}, [ANSWER, TITLE], "a"),
    "one text of several columns": ({"reply": "the answer", "sources": 3}, [ANSWER, TITLE], "a"),
    "the column of the answer": ({"context": ["A title"], "answer": "the answer"}, BOTH, "a"),
    "a title next to an edited answer": ({"title": "A title", "answer": "ed"}, BOTH, "unclear"),
    "a title next to an unknown column": ({"title": "A title", "reply": "ed"}, BOTH, "unclear"),
    "several columns of answers": ({"answer": "A title", "text": "ed"}, BOTH, "unclear"),
    "both are in it": ({"reply": "the answer", "title": "A title"}, [ANSWER, TITLE], "unclear"),
    "pieces of a stream": (["A title", " of an answer"], [ANSWER, TITLE], "unclear"),
    "neither is": ("edited", [ANSWER, TITLE], "unclear"),
    "there is none": (None, [ANSWER, TITLE], "unclear"),
    "there is none, of one call": (None, [ANSWER], "a"),
    "the title follows the answer": ("the answer", [ANSWER, CHAT_TITLE], "a"),
    "there is none, and a title follows": (None, [ANSWER, CHAT_TITLE], "unclear"),
    "the last call reads the result of a tool": (
        None,
        [step("look", answer=LOOK), step("b", start=2.0, inputs=[user("Hi"), LOOK, RESULT])],
        "b",
    ),
    "a title follows a call of a tool": (None, [step("look", answer=LOOK), TITLE], "unclear"),
    "two calls with other prompts have it": (
        "Yes",
        [
            step("a", inputs="Is it true?", answer="Yes"),
            step("guard", start=1.0, inputs="Is this harmless: Yes", answer="Yes"),
        ],
        "unclear",
    ),
    "one call was recorded twice": (
        None,
        [
            step("a", inputs="Hi", answer="Yes"),
            step("b", start=1.0, inputs={"messages": [user("Hi")]}, answer=assistant("Yes")),
        ],
        "b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUTS)
def test_the_rated_call_is_the_one_with_the_output_of_the_trace(case: str) -> None:
    output, calls, expected = OUTPUTS[case]
    assert rated([*calls, step("t", is_generation=False, answer=output)]) == expected


def test_the_output_of_the_rated_step_counts_before_that_of_the_trace() -> None:
    inner = [step("a", "chain", answer="one"), step("b", "chain", answer="two", start=1.0)]
    chain = step("chain", "t", is_generation=False, answer="one")
    root = step("t", is_generation=False, answer="two")
    assert rated([*inner, chain, root], "chain") == "a"
    assert rated([*inner, chain, root]) == "b"


def test_the_output_of_one_of_several_outer_steps_is_not_that_of_the_trace() -> None:
    titles = step("titles", is_generation=False, answer="A title")
    steps = [ANSWER, titles, replace(TITLE, parent="titles")]
    assert rated(steps) == "unclear"
    assert (
        rated([replace(step, parent="titles") for step in steps if step.is_generation]) == "unclear"
    )
    chat = step("chat", is_generation=False, answer="the answer")
    assert rated([chat, replace(ANSWER, parent="chat"), replace(TITLE, parent="chat")]) == "a"
    assert rated([chat, titles]) == "unclear"


def test_a_failed_last_call_is_the_one_that_was_rated() -> None:
    steps = [step("a", start=1.0), step("b", start=2.0, is_failed=True, answer=None)]
    assert rated(steps) == "b"


def test_parents_that_go_in_a_circle() -> None:
    steps = [step("a", "b"), step("b", "a"), step("outer", is_generation=False, answer="Hi")]
    assert rated(steps, "outer") == "outer"


def test_a_later_row_of_a_step_replaces_an_earlier_one() -> None:
    steps = [step("a", answer="no"), step("b", start=1.0), step("a", answer="the answer")]
    assert rated([*steps, ROOT]) == "a"


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
