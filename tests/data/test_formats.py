"""Detection and reading of every format."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises_error
from valence.data import values
from valence.data.detect import detect
from valence.data.format_table import FORMATS, SHAPES
from valence.data.formats import columns_read, read_example
from valence.errors import UserError
from valence.types import (
    Chat,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Origin,
    Preference,
    Prompt,
    Ranking,
)

HERE = Origin("rows.jsonl", 1)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def sharegpt_turn(role: str, value: str) -> dict[str, str]:
    return {"from": role, "value": value}


def chat(*turns: dict[str, Any], tools: tuple[dict, ...] = ()) -> Chat:
    return Chat(turns, tools)


ASK, HI, BYE = turn("user", "Say hi."), turn("assistant", "Hi!"), turn("assistant", "Bye!")
SYSTEM = turn("system", "Be brief.")
TOOL = {"type": "function", "function": {"name": "clock"}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "clock", "arguments": {}}}],
}


def judged(prompt: Any, completion: Any, label: bool | None = True, **more: Any) -> Judgement:
    return Judgement(prompt=prompt, completion=completion, label=label, origin=HERE, **more)


def pair(prompt: Any, chosen: Any, rejected: Any, **more: Any) -> Preference:
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, origin=HERE, **more)


def demo(prompt: Any, completion: Any, **more: Any) -> Demonstration:
    return Demonstration(prompt=prompt, completion=completion, origin=HERE, **more)


ALPACA = chat(turn("user", "Add.\n1 + 1"))
CASES: list[tuple[str, dict[str, Any], Example]] = [
    # judgement
    ("judgement", {"prompt": "1+1=", "completion": "2", "label": True}, judged("1+1=", "2")),
    (
        "judgement",
        {"prompt": "1+1=", "completion": "3", "label": 0, "weight": 0.5, "score": -1},
        judged("1+1=", "3", False, weight=0.5, score=-1.0),
    ),
    (
        "judgement",
        {"prompt": [SYSTEM, ASK], "completion": [HI], "label": "good"},
        judged(chat(SYSTEM, ASK), chat(HI)),
    ),
    ("judgement", {"prompt": [ASK], "completion": HI, "label": True}, judged(chat(ASK), chat(HI))),
    (
        "judgement",
        {"prompt": [ASK], "completion": "Hi!", "label": True},
        judged(chat(ASK), chat(HI)),
    ),
    (
        "judgement",
        {"prompt": "Say hi.", "completion": [HI], "label": True},
        judged(chat(ASK), chat(HI)),
    ),
    (
        "judgement",
        {"prompt": [ASK], "completion": [ASK, HI], "label": True},
        judged(chat(ASK), chat(HI)),
    ),
    (
        "judgement",
        {
            "prompt": [ASK],
            "completion": [CALL, turn("tool", "12:00"), HI],
            "label": True,
            "tools": [TOOL],
        },
        judged(chat(ASK, tools=(TOOL,)), chat(CALL, turn("tool", "12:00"), HI)),
    ),
    (
        "judgement",
        {
            "prompt": [ASK, CALL, turn("tool", "12:00", name=None)],
            "completion": [HI],
            "label": True,
        },
        judged(chat(ASK, CALL, turn("tool", "12:00")), chat(HI)),
    ),
    (
        "scored",
        {"prompt": "1+1=", "completion": "2", "score": 0.7},
        judged("1+1=", "2", None, score=0.7),
    ),
    (
        "scored",
        {"prompt": "1+1=", "completion": "2", "score": 0.7, "label": None},
        judged("1+1=", "2", None, score=0.7),
    ),
    (
        "attributes",
        {"prompt": "1+1=", "completion": "2", "scores": {"help": 3, "truth": 4.5}},
        judged("1+1=", "2", None, attributes={"help": 3.0, "truth": 4.5}),
    ),
    (
        "scored_messages",
        {"messages": [ASK, HI], "score": 3},
        judged(chat(ASK), chat(HI), None, score=3.0),
    ),
    (
        "judged_messages",
        {"messages": [SYSTEM, ASK, HI], "label": False, "id": 7},
        judged(chat(SYSTEM, ASK), chat(HI), False),
    ),
    # pairs
    (
        "preference",
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5},
        pair("1+1=", "2", "3", margin=0.5),
    ),
    (
        "preference",
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "soft": 0.8},
        pair("1+1=", "2", "3", soft=0.8),
    ),
    (
        "preference",
        {"prompt": [ASK], "chosen": [HI], "rejected": [BYE]},
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
    (
        "preference",
        {"prompt": "Say hi.", "chosen": [ASK, HI], "rejected": [ASK, BYE]},
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
    (
        "preference",
        {"chosen": [SYSTEM, ASK, HI, ASK, HI], "rejected": [SYSTEM, ASK, HI, ASK, BYE]},
        pair(chat(SYSTEM, ASK, HI, ASK), chat(HI), chat(BYE)),
    ),
    (
        "preference",
        {
            "chosen": [ASK, CALL, turn("tool", "1"), HI],
            "rejected": [ASK, CALL, turn("tool", "1"), BYE],
        },
        pair(chat(ASK, CALL, turn("tool", "1")), chat(HI), chat(BYE)),
    ),
    (
        "preference",
        {
            "chosen": "\n\nHuman: Say hi.\n\nAssistant: Hi!",
            "rejected": "\n\nHuman: Say hi.\n\nAssistant: Bye!",
        },
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
    # imitation, prompts, rankings
    (
        "demonstration",
        {"prompt": "1+1=", "completion": "2", "weight": "3"},
        demo("1+1=", "2", weight=3.0),
    ),
    (
        "messages",
        {"messages": [ASK, HI, ASK, BYE], "tools": [TOOL]},
        demo(chat(ASK, HI, ASK, tools=(TOOL,)), chat(BYE)),
    ),
    (
        "text_prompt",
        {"text": "1+1=", "answer": 2},
        Prompt(prompt="1+1=", info={"answer": 2}, origin=HERE),
    ),
    (
        "prompt",
        {"prompt": [ASK], "text": "x"},
        Prompt(prompt=chat(ASK), info={"text": "x"}, origin=HERE),
    ),
    (
        "prompt",
        {"prompt": [ASK], "answer": 2},
        Prompt(prompt=chat(ASK), info={"answer": 2}, origin=HERE),
    ),
    (
        "ranking",
        {"prompt": "1+1=", "completions": ["2", "3", "4"], "scores": [1, 0.5, 0]},
        Ranking(prompt="1+1=", completions=("2", "3", "4"), scores=(1.0, 0.5, 0.0), origin=HERE),
    ),
    (
        "ranking",
        {"prompt": [ASK], "completions": [[HI], BYE], "ranks": [2, 1]},
        Ranking(
            prompt=chat(ASK), completions=(chat(HI), chat(BYE)), scores=(-2.0, -1.0), origin=HERE
        ),
    ),
    # token ids
    (
        "judgement_ids",
        {"prompt_ids": [1, 2], "completion_ids": [3], "label": True},
        judged(Ids((1, 2)), Ids((3,))),
    ),
    (
        "scored_ids",
        {"prompt_ids": [1, 2], "completion_ids": [3], "score": 0.5},
        judged(Ids((1, 2)), Ids((3,)), None, score=0.5),
    ),
    (
        "demonstration_ids",
        {"prompt_ids": [1, 2], "completion_ids": [3]},
        demo(Ids((1, 2)), Ids((3,))),
    ),
    (
        "preference_ids",
        {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]},
        pair(Ids((1,)), Ids((2,)), Ids((3,))),
    ),
    # HALOs
    (
        "binary_feedback",
        {
            "prompt_id": 0,
            "prompt": [ASK],
            "output": [HI],
            "label": 1,
            "reward": 2.5,
            "type": "binary_feedback",
        },
        judged(chat(ASK), chat(HI), score=2.5),
    ),
    (
        "scalar_feedback",
        {"prompt": [ASK], "output": [HI], "reward": 2.5, "type": "scalar_feedback", "sample_id": 1},
        judged(chat(ASK), chat(HI), None, score=2.5),
    ),
    (
        "pairwise_feedback",
        {
            "prompt": [ASK],
            "output_A": [HI],
            "output_B": [BYE],
            "label": 1,
            "reward_A": 2,
            "reward_B": 1,
            "reward_difference": 1,
            "type": "pairwise_feedback",
        },
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
    (
        "pairwise_feedback",
        {
            "prompt": [ASK],
            "output_A": [HI],
            "output_B": [BYE],
            "label": 0,
            "reward_A": 1,
            "reward_B": 2,
            "type": "pairwise_feedback",
        },
        pair(chat(ASK), chat(BYE), chat(HI)),
    ),
    # others
    (
        "helpsteer",
        {
            "prompt": "1+1=",
            "response": "2",
            "helpfulness": 4,
            "correctness": 3,
            "coherence": 2,
            "complexity": 1,
            "verbosity": 0,
        },
        judged(
            "1+1=",
            "2",
            None,
            attributes={
                "helpfulness": 4.0,
                "correctness": 3.0,
                "coherence": 2.0,
                "complexity": 1.0,
                "verbosity": 0.0,
            },
        ),
    ),
    (
        "nemo_aligner",
        {"prompt": "1+1=", "response": "3", "preference": "rejected"},
        judged("1+1=", "3", False),
    ),
    (
        "colossalchat",
        {
            "prompt": [{"from": "user", "content": "Say hi."}],
            "completion": {"from": "assistant", "content": "Hi!"},
            "label": True,
        },
        judged(chat(ASK), chat(HI)),
    ),
    (
        "colossalchat",
        {
            "prompt": [{"from": "human", "content": "Say hi."}],
            "completion": {"from": "assistant", "content": "Hi!"},
            "label": False,
        },
        judged(chat(ASK), chat(HI), False),
    ),
    ("openrlhf", {"input": "1+1=", "output": "2", "label": 1}, judged("1+1=", "2")),
    (
        "openrlhf_preference",
        {"input": [ASK], "chosen": [HI], "rejected": [BYE]},
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
    (
        "sharegpt",
        {
            "conversations": [sharegpt_turn("human", "Say hi."), sharegpt_turn("gpt", "Hi!")],
            "system": "Be brief.",
            "tools": '[{"name": "clock"}]',
        },
        demo(chat(SYSTEM, ASK, tools=({"name": "clock"},)), chat(HI)),
    ),
    (
        "sharegpt",
        {
            "conversations": [
                sharegpt_turn("system", "Be brief."),
                sharegpt_turn("human", "Say hi."),
                sharegpt_turn("gpt", "Hi!"),
            ],
            "system": "",
            "tools": "",
        },
        demo(chat(SYSTEM, ASK), chat(HI)),
    ),
    (
        "sharegpt_kto",
        {
            "conversations": [sharegpt_turn("human", "Say hi."), sharegpt_turn("gpt", "Bye!")],
            "kto_tag": False,
        },
        judged(chat(ASK), chat(BYE), False),
    ),
    (
        "sharegpt_preference",
        {
            "conversations": [sharegpt_turn("human", "Say hi.")],
            "chosen": sharegpt_turn("gpt", "Hi!"),
            "rejected": sharegpt_turn("gpt", "Bye!"),
        },
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
    (
        "openai_preference",
        {
            "input": {"messages": [SYSTEM, ASK], "tools": [TOOL], "parallel_tool_calls": True},
            "preferred_output": [HI],
            "non_preferred_output": [BYE],
        },
        pair(chat(SYSTEM, ASK, tools=(TOOL,)), chat(HI), chat(BYE)),
    ),
    (
        "openai_preference",
        {
            "input": {"messages": [ASK]},
            "preferred_output": [HI],
            "non_preferred_output": [BYE],
            "info": {"rater": 7},
        },
        pair(chat(ASK), chat(HI), chat(BYE), info={"rater": 7}),
    ),
    # Chat turns as tools write them
    ("judgement", {"prompt": ASK, "completion": "Hi!", "label": True}, judged(chat(ASK), chat(HI))),
    ("prompt", {"prompt": ASK}, Prompt(prompt=chat(ASK), origin=HERE)),
    (
        "judgement",
        {"prompt": [sharegpt_turn("human", "Say hi.")], "completion": "Hi!", "label": 1},
        judged(chat(ASK), chat(HI)),
    ),
    (
        "preference",
        {
            "prompt": [sharegpt_turn("system", "Be brief."), sharegpt_turn("human", "Say hi.")],
            "chosen": [sharegpt_turn("gpt", "Hi!")],
            "rejected": [BYE],
        },
        pair(chat(SYSTEM, ASK), chat(HI), chat(BYE)),
    ),
    (
        "messages",
        {"messages": [sharegpt_turn("human", "Say hi."), sharegpt_turn("gpt", "Hi!")]},
        demo(chat(ASK), chat(HI)),
    ),
    ("sharegpt", {"conversations": [ASK, HI]}, demo(chat(ASK), chat(HI))),
    (
        "messages",
        {
            "messages": [
                turn("developer", "Be brief."),
                turn("human", "Say hi."),
                turn("model", "Hi!"),
            ]
        },
        demo(chat(SYSTEM, ASK), chat(HI)),
    ),
    (
        "judgement",
        {
            "prompt": [ASK, CALL, turn("function", "12:00", name="clock")],
            "completion": [turn("gpt", "Hi!")],
            "label": True,
        },
        judged(chat(ASK, CALL, turn("tool", "12:00", name="clock")), chat(HI)),
    ),
    (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi."}],
                },
                {"role": "assistant", "content": [{"text": "Hi!"}]},
            ]
        },
        demo(chat(turn("user", "Say\nhi.")), chat(HI)),
    ),
    (
        "demonstration",
        {
            "prompt": [{"type": "input_text", "text": "1+1="}],
            "completion": [{"type": "output_text", "text": "2"}],
        },
        demo("1+1=", "2"),
    ),
    (
        "messages",
        {"messages": [ASK, turn("assistant", "Hi!", weight=1)]},
        demo(chat(ASK), chat(HI)),
    ),
    (
        "messages",
        {"messages": [ASK, turn("assistant", "Hi!", weight=0), ASK, BYE]},
        demo(chat(ASK, turn("assistant", "Hi!", weight=0), ASK), chat(BYE)),
    ),
    (
        "messages",
        {"messages": [ASK, HI, ASK, turn("assistant", "Bye!", weight=0)]},
        demo(chat(ASK), chat(HI)),
    ),
    (
        "alpaca",
        {"instruction": "Add.", "input": "1 + 1", "output": "2"},
        demo(ALPACA, chat(turn("assistant", "2"))),
    ),
    (
        "alpaca",
        {
            "instruction": "Say hi.",
            "input": "",
            "output": "Hi!",
            "system": "Be brief.",
            "history": [["Say hi.", "Bye!"]],
        },
        demo(chat(SYSTEM, ASK, BYE, ASK), chat(HI)),
    ),
    (
        "alpaca_kto",
        {"instruction": "Say hi.", "output": "Hi!", "kto_tag": "true"},
        judged(chat(ASK), chat(HI)),
    ),
    (
        "alpaca_preference",
        {"instruction": "Say hi.", "input": None, "chosen": "Hi!", "rejected": "Bye!"},
        pair(chat(ASK), chat(HI), chat(BYE)),
    ),
]


@pytest.mark.parametrize(
    ("name", "row", "example"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_a_row_is_recognised_and_read(name: str, row: dict, example: Example):
    assert detect([row]) == name
    assert read_example(name, row, HERE) == example


def test_a_column_that_keys_name_is_read_once() -> None:
    row = {"input": "Say hi.", "chosen": "Hi!", "rejected": "Bye!"}
    example = read_example("alpaca_preference", row, HERE, {"instruction": "input"})
    assert example == pair(chat(ASK), chat(HI), chat(BYE))


def test_every_format_has_a_case_and_gives_the_kind_that_the_table_says():
    assert {name for name, _, _ in CASES} == FORMATS.keys() - SHAPES.keys()
    kinds = {
        Judgement: "judgement",
        Preference: "preference",
        Demonstration: "demonstration",
        Prompt: "prompt",
        Ranking: "ranking",
    }
    for name, _, example in CASES:
        assert FORMATS[name].gives == kinds[type(example)]


def test_reading_leaves_the_row_as_it_was():
    for name, row, _ in CASES:
        before = repr(row)
        read_example(name, row, HERE)
        assert repr(row) == before


@pytest.mark.parametrize(("name", "row"), [
    ("judgement", {"prompt": "1+1=", "completion": "2", "label": True}),
    ("scored", {"prompt": "1+1=", "completion": "2", "score": 1}),
    ("attributes", {"prompt": "1+1=", "completion": "2", "scores": {"help": 1}}),
    ("preference", {"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
    ("demonstration", {"prompt": "1+1=", "completion": "2"}),
    ("messages", {"messages": [ASK, HI]}),
    ("ranking", {"prompt": "1+1=", "completions": ["2", "3"], "scores": [1, 0]}),
    ("judgement_ids", {"prompt_ids": [1], "completion_ids": [2], "label": True}),
    ("prompt", {"prompt": "1+1="}),
])  # fmt: skip
def test_any_row_may_have_info(name: str, row: dict):
    info = {"rater": 3, "comment": "short", "tags": ["a"]}
    assert detect([{**row, "info": info}]) == name
    plain, example = read_example(name, row, HERE), read_example(name, {**row, "info": info}, HERE)
    assert (plain.info, example.info) == ({}, info)
    assert (example.id == plain.id) is (name != "prompt")
    assert read_example(name, {**row, "info": '{"rater": 3}'}, HERE).info == {"rater": 3}
    assert read_example(name, {**row, "info": "a note"}, HERE).info == {"info": "a note"}


def test_a_prompt_has_its_columns_and_the_entries_of_its_info():
    row = {"prompt": "1+1=", "answer": 2, "info": {"answer": 3, "rater": 7}}
    assert read_example("prompt", row, HERE).info == {"answer": 2, "rater": 7}


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "a.png"}},
    {"type": "text", "text": None},
])  # fmt: skip
def test_content_that_is_not_text_is_named(part: dict):
    turns = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    with raises_error("row-content-parts") as raised:
        read_example("judgement", {"prompt": turns, "completion": "a", "label": True}, HERE)
    assert "part 2 of content of turn 1 of prompt" in raised.error.message
    assert ("'image_url'" in raised.error.message) == (part["type"] == "image_url")


def test_a_conversation_of_which_no_turn_is_to_be_learnt_is_refused():
    silent = turn("assistant", "Hi!", weight=0)
    for row, name in (
        ({"messages": [ASK, silent]}, "messages"),
        ({"messages": [ASK, silent, ASK, silent]}, "messages"),
        ({"messages": [ASK, HI, ASK, silent], "label": True}, "judged_messages"),
        ({"prompt": [ASK], "chosen": [HI], "rejected": [silent]}, "preference"),
    ):
        with raises_error("row-weight-zero"):
            read_example(name, row, HERE)
    for wrong in (0.5, 2, "0", True, -1):
        with raises_error("row-weight-invalid") as raised:
            row = {"messages": [ASK, turn("assistant", "Hi!", weight=wrong)]}
            read_example("messages", row, HERE)
        assert "turn 2 of messages" in raised.error.message
        assert repr(wrong) in raised.error.message


# Detection


def test_most_of_the_first_rows_decide():
    rows = [
        {"prompt": "a", "completion": "b"},
        *[{"prompt": "a", "completion": "b", "label": True}] * 2,
        {"x": 1},
    ]
    assert detect(rows) == "judgement"


def test_rows_that_fit_several_formats_are_not_guessed():
    with raises_error("format-ambiguous", fix="format: preference or format: messages"):
        detect(
            [{"prompt": "a", "chosen": [ASK, HI], "rejected": [ASK, BYE], "messages": [ASK, HI]}]
        )
    with raises_error("format-ambiguous", fix="format: openrlhf or format: alpaca"):
        detect([{"instruction": "a", "input": "b", "output": "c", "label": True}])


def test_unknown_columns_are_listed_with_the_nearest_formats():
    with raises_error("format-unknown-columns", fix="{path: FILE, keys:") as raised:
        detect(
            [
                {
                    "prompt": "a",
                    "answer": "b",
                    "verdict": True,
                    "completion": None,
                    "label": None,
                    "score": 1,
                }
            ]
        )
    assert "'answer', 'prompt', 'score', 'verdict'" in raised.error.message
    fix = str(raised.error.fix)
    assert "keys: {completion: answer, label: verdict}" in fix
    assert "scored" in fix.partition("path: FILE")[2]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"question": "a", "answer": "b", "verdict": 1}, "{prompt: question, completion: answer"),
        ({"Prompt": "a", "Completion": "b", "Label": 1}, "{prompt: Prompt, completion: Completion"),
        ({"foo": "a", "answer": "b"}, None),
    ],
)
def test_keys_are_suggested_where_a_format_then_fits(row: dict, keys: str | None):
    with raises_error("format-unknown-columns", fix=keys) as raised:
        detect([row])
    assert ("did you mean" in str(raised.error.fix)) == (keys is not None)
    if keys:
        mapping = str(raised.error.fix).partition("{")[2].partition("}")[0]
        assert detect([row], dict(pair.split(": ") for pair in mapping.split(", "))) == "judgement"


def test_a_missing_column_may_have_another_name():
    for row in ({"prompt": "a", "completion": "b", "thumb": 1}, {"prompt": "a", "label": 1}):
        column = "completion" if "label" in row else "label"
        with raises_error(f"row-{'column' if 'label' in row else 'rating'}-missing") as raised:
            read_example("judgement", row, HERE)
        assert f"keys: {{{column}: COLUMN}}" in str(raised.error.fix)
    with raises_error("keys-unknown-column", fix="{prompt: question}"):
        columns_read("judgement", {"question": "prompt"})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "response": "b", "output": "c"},
        {"prompt": "a", "output": "b", "passage": "c d"},
        {"prompt": "a", "label": True},
    ],
)
def test_a_row_with_an_answer_is_never_read_as_a_prompt(row: dict):
    with raises_error("format-unknown-columns"):
        detect([row])
    assert read_example("prompt", row, HERE).origin == HERE


# Keys


def test_keys_name_the_columns_of_the_file():
    row = {"question": "1+1=", "answer": "2", "ok": 1}
    keys = {"input": "question", "output": "answer", "label": "ok"}
    assert detect([row], keys) == "openrlhf"
    assert read_example("openrlhf", row, HERE, keys) == judged("1+1=", "2")
    keys = {"prompt": "question", "completion": "answer", "label": "ok"}
    assert read_example(detect([row], keys), row, HERE, keys) == judged("1+1=", "2")


def test_a_named_column_goes_before_one_of_the_usual_name():
    row = {"prompt": "wrong", "text": "1+1=", "completion": "2", "label": True}
    assert read_example("judgement", row, HERE, {"prompt": "text"}) == judged("1+1=", "2")


def test_keys_name_places_inside_columns():
    row = {
        "input": {"messages": [ASK], "tools": [TOOL]},
        "choices": [{"text": "Hi!"}],
        "data": {"ok": 1},
        "note": "x",
    }
    keys = {
        "prompt": "input.messages",
        "tools": "input.tools",
        "completion": "choices.0.text",
        "label": "data.ok",
    }
    assert detect([row], keys) == "judgement"
    assert read_example("judgement", row, HERE, keys) == judged(chat(ASK, tools=(TOOL,)), chat(HI))
    dotted = {"input.messages": "1+1=", "completion": "2", "label": True}
    assert read_example("judgement", dotted, HERE, {"prompt": "input.messages"}) == judged(
        "1+1=", "2"
    )
    for path in (
        "input.nothing",
        "input.messages.9",
        "note.text",
        "input.messages.x",
        "nothing.at.all",
    ):
        with raises_error("row-column-missing") as raised:
            read_example("judgement", row, HERE, {**keys, "prompt": path})
        assert path in raised.error.message


def test_turns_inside_an_object_are_answered_with_the_place_to_name():
    with raises_error("row-nested-messages", fix="keys: {prompt: prompt.messages}"):
        read_example(
            "judgement", {"prompt": {"messages": [ASK]}, "completion": "a", "label": True}, HERE
        )


def test_messages_of_a_fault_use_the_names_of_the_file():
    row = {"prompt": "a", "answer": " ", "label": True}
    with raises_error("row-completion-empty") as raised:
        read_example("judgement", row, HERE, {"completion": "answer"})
    assert "answer" in raised.error.message
    assert "completion" not in raised.error.message
    row = {"conversation_a": [ASK, HI], "conversation_b": "Hi!", "winner": "model_a"}
    with raises_error("row-value-type") as raised:
        read_example("arena", row, HERE)
    assert raised.error.message.startswith("conversation_b is 'Hi!'")


def test_keys_of_columns_that_the_format_does_not_have_are_errors():
    row = {"x": "a", "completion": "b", "label": True}
    with raises_error("keys-unknown-column", fix="prompt, completion, label") as raised:
        read_example("judgement", row, HERE, {"promt": "x"})
    assert "'promt'" in raised.error.message


# Labels and numbers


UP = [
    True,
    1,
    1.0,
    "1",
    "1.0",
    "true",
    "TRUE",
    " True ",
    "chosen",
    "good",
    "Desirable",
    "👍",
    "thumbs_up",
    "thumbs-up",
    "Thumbs Up",
    "thumbsUp",
    "THUMBSUP",
    "up",
    "+1",
    "yes",
    "Yes",
    "Like",
    "positive",
    "Positive",
    "upvote",
    "UPVOTE",
    "up_vote",
    "thumb_up",
    ":+1:",
    ":thumbsup:",
    ":Thumbs_Up:",
    ":+1::skin-tone-3:",
    "👍🏽",
    "👍\ufe0f",
]
DOWN = [
    False,
    0,
    -1,
    0.0,
    -1.0,
    "0",
    "-1",
    "0.0",
    "-1.0",
    "false",
    "False",
    "rejected",
    "bad",
    "undesirable",
    "👎",
    "thumbs_down",
    "thumbs-down",
    "thumbs down",
    "thumbsDown",
    "DOWN",
    "no",
    "NO",
    "Dislike",
    "negative",
    "downvote",
    "Down-Vote",
    "thumbdown",
    ":-1:",
    ":thumbsdown:",
    ":thumbs-down:",
    ":-1::skin-tone-2:",
    "👎🏿",
]


@pytest.mark.parametrize("up", UP)
def test_labels_that_mean_up(up: object):
    assert values.label(up, "label") is True


@pytest.mark.parametrize("down", DOWN)
def test_labels_that_mean_down(down: object):
    assert values.label(down, "label") is False


@pytest.mark.parametrize(
    "wrong",
    [
        "maybe",
        "",
        "neutral",
        "tie",
        2,
        -2,
        0.7,
        -0.5,
        float("nan"),
        None,
        [],
        {},
        [True],
        "0.7",
        "none",
        "yes!",
        "un like",
        "٣",
        "1_0",
        ":1:",
        "::",
        ":up:",
        ":+1",
        "🏽",
        ":heart:",
    ],
)
def test_everything_else_is_no_label(wrong: object):
    with raises_error("row-label-invalid", fix="thumbs_up") as raised:
        values.label(wrong, "thumbs")
    assert "thumbs" in raised.error.message
    assert "score" in str(raised.error.fix)  # where a graded label belongs


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.booleans())))
def test_a_label_is_one_of_the_words_or_an_error(value: object):
    try:
        result = values.label(value, "label")
    except UserError:
        return
    word = str(value + 0.0 if isinstance(value, float) else value).strip().casefold()  # -0.0 is 0
    word = re.sub(":skin-tone-[2-6]:$|[\U0001f3fb-\U0001f3ff\ufe0f]$", "", word)
    word = word[1:-1] if word[:1] == word[-1:] == ":" else word
    assert re.sub(r"(?<=[a-z])[\s_-]+(?=[a-z])", "", word) in (values.UP if result else values.DOWN)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_numbers_are_kept(value: float):
    assert values.number(value, "score") == values.number(repr(value), "score") == value


@pytest.mark.parametrize("wrong", ["1_000", "٣", "1e", "0x1", "1.5.2", "1 000", "--1", "²", "1\n2"])
def test_numbers_are_written_in_ascii_digits_without_separators(wrong: str):
    for read in (values.number, values.weight):
        with raises_error("row-number-invalid") as raised:
            read(wrong, "weight")
        assert "weight" in raised.error.message
    row = {"prompt": "a", "completion": "b", "label": True, "weight": wrong, "score": wrong}
    with raises_error("row-number-invalid"):
        read_example("judgement", row, HERE)


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), (" +2.5 ", 2.5), (".5", 0.5), ("-1e-3", -0.001), ("3.", 3.0)]
)
def test_numbers_that_a_table_holds_as_text(text: str, value: float):
    assert values.number(text, "score") == value


def test_a_decimal_comma_is_named():
    with raises_error("row-decimal-comma") as raised:
        values.number("0,5", "score")
    assert "'0,5'" in raised.error.message


@pytest.mark.parametrize(
    "wrong", [True, None, "", "high", "nan", "inf", float("nan"), float("-inf"), [1], 10**400]
)
def test_a_number_that_is_not_finite_is_an_error(wrong: object):
    with raises_error("row-number-invalid") as raised:
        values.number(wrong, "score")
    assert "score" in raised.error.message
