"""Chat turns in the shapes of OpenAI, Anthropic and LangChain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.importers.exports import assistant, user
from valence.data.importers import messages
from valence.data.importers.messages import (
    Exchange,
    answer_text,
    assistant_of,
    branch,
    exchange_of,
    follow_up,
    merge_turns,
    messages_of,
    prompt_of,
    prompt_turns,
    strip_reasoning,
    text_of,
    tools_of,
    turns_of,
)
from valence.data.importers.records import SkipReason, UnusableVote

HI = (user("Hi"),)


def constructor(name: str, **kwargs: Any) -> dict[str, Any]:
    path = ["langchain", "schema", "messages", name]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": kwargs}


SYSTEM_HI = ({"role": "system", "content": "Be brief."}, user("Hi"))
INPUTS: dict[str, tuple[Any, tuple[dict[str, Any], ...]]] = {
    "text": ("Hi", HI),
    "turns": ([user("Hi")], HI),
    "one turn": (user("Hi"), HI),
    "JSON in a cell": (json.dumps([user("Hi")]), HI),
    "OpenAI's request": ({"model": "m", "messages": [user("Hi")]}, HI),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], HI),
    "developer": ([{"role": "developer", "content": "Be brief."}, user("Hi")], SYSTEM_HI),
    "Responses": ({"model": "m", "instructions": "Be brief.", "input": "Hi"}, SYSTEM_HI),
    "Anthropic": ({"system": "Be brief.", "messages": [user("Hi")]}, SYSTEM_HI),
    "Anthropic's parts of a system prompt": (
        {"system": [{"type": "text", "text": "Be brief."}], "messages": [user("Hi")]},
        SYSTEM_HI,
    ),
    "LangChain's constructors in lists": (
        {
            "messages": [
                [
                    constructor("SystemMessage", content="Be brief."),
                    constructor("HumanMessage", content="Hi"),
                ]
            ]
        },
        SYSTEM_HI,
    ),
    "LangChain's types": ([{"type": "human", "content": "Hi", "example": False}], HI),
    "LangChain's dictionaries": ([{"type": "human", "data": {"content": "Hi"}}], HI),
    "LangChain's input": ({"input": "Hi"}, HI),
}


@pytest.mark.parametrize("shape", INPUTS)
def test_known_shapes_of_inputs(shape: str) -> None:
    value, turns = INPUTS[shape]
    assert messages_of(value) == turns


@pytest.mark.parametrize(
    "value",
    [
        {"question": "Hi"},
        {"input": "Hi", "context": "..."},
        {"prompts": ["Human: Hi"]},
        '{"question": "Hi"}',
        '{"messages": [], "messages": "Hi"}',
        [{"role": "critic", "content": "Hi"}],
        [{"content": "Hi"}],
        ["Hi"],
        7,
        None,
    ],
)
def test_unknown_shapes_of_inputs(value: object) -> None:
    with pytest.raises(UnusableVote) as info:
        messages_of(value)
    assert info.value.reason == "shape_unknown"


HELLO = assistant("Hello")
OUTPUTS: dict[str, Any] = {
    "text": "Hello",
    "turn": assistant("Hello"),
    "JSON in a cell": json.dumps(assistant("Hello")),
    "choices": {"choices": [{"message": assistant("Hello"), "finish_reason": "stop"}]},
    "text of choices": {"choices": [{"text": "Hello"}]},
    "message": {"message": assistant("Hello")},
    "list of one": [assistant("Hello")],
    "Anthropic": {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "..."}, {"type": "text", "text": "Hello"}],
    },
    "Responses": {
        "object": "response",
        "output": [
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello"}],
            },
        ],
    },
    "LangChain's generations": {
        "generations": [[{"text": "Hello", "message": constructor("AIMessage", content="Hello")}]]
    },
    "LangChain's chunk": constructor("AIMessageChunk", content="Hello"),
    "LangChain's output": {"output": "Hello"},
    "state of a graph": {"messages": [user("Hi"), {"type": "ai", "content": "Hello"}]},
}


@pytest.mark.parametrize("shape", OUTPUTS)
def test_known_shapes_of_outputs(shape: str) -> None:
    message = assistant_of(OUTPUTS[shape])
    assert message is not None
    assert (message["role"], message["content"]) == ("assistant", "Hello")
    assert exchange_of("Hi", OUTPUTS[shape]) == Exchange(HI, HELLO)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"answer": "Hello"}, "shape_unknown"),
        ('{"answer": "Hello"}', "shape_unknown"),
        ('{"answer": NaN}', "shape_unknown"),
        ({"choices": [{"message": HELLO}, {"message": assistant("Hey")}]}, "shape_unknown"),
        ({"choices": []}, "shape_unknown"),
        (user("Hello"), "not_assistant"),
    ],
)
def test_unknown_shapes_of_outputs(value: object, reason: SkipReason) -> None:
    with pytest.raises(UnusableVote) as info:
        assistant_of(value)
    assert info.value.reason == reason
    assert answer_text(value) is None


def test_text_of_an_output() -> None:
    assert answer_text({"content": "<think>Hm</think>Hello", "role": "assistant"}) == "Hello"
    assert answer_text({"role": "assistant", "content": "", "tool_calls": [CALL]}) is None


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        constructor(
            "AIMessage",
            content="",
            tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "c1"}],
        ),
        constructor("AIMessage", content="", additional_kwargs={"tool_calls": [CALL]}),
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
            ],
        },
    ],
)
def test_tool_calls_are_written_as_openai_does(message: dict[str, Any]) -> None:
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert messages_of([message]) == (expected,)
    assert exchange_of("Hi", message) == Exchange(HI, expected)


def test_anthropic_tool_results_are_separate_turns() -> None:
    parts = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "20 degrees"},
        {"type": "text", "text": "And tomorrow?"},
    ]
    assert messages_of([{"role": "user", "content": parts}]) == (
        {"role": "tool", "content": "20 degrees", "tool_call_id": "c1"},
        user("And tomorrow?"),
    )


FUNCTION = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": FUNCTION},
        {"name": "weather", "description": "Of a city", "input_schema": {"type": "object"}},
        json.dumps({"type": "function", "function": FUNCTION}),
    ],
)
def test_tools(tool: object) -> None:
    assert tools_of({"tools": [tool]}) == ({"type": "function", "function": FUNCTION},)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
REASONS: dict[str, tuple[Any, Any, str]] = {
    "cut at the limit": (
        "Hi",
        {"choices": [{"text": "He", "finish_reason": "length"}]},
        "unfinished",
    ),
    "cut at Anthropic's limit": ("Hi", {**HELLO, "stop_reason": "max_tokens"}, "unfinished"),
    "nothing": ("Hi", None, "empty"),
    "only spaces": ("Hi", assistant(" \n"), "empty"),
    "unfinished reasoning": ("Hi", assistant("<think>Hm"), "empty"),
    "only reasoning": ("Hi", assistant("<think>Hm</think>"), "empty"),
    "image": ([{"role": "user", "content": [IMAGE]}], "Hello", "image"),
    "image in the completion": ("Hi", {"role": "assistant", "content": [IMAGE]}, "image"),
    "not the assistant": ("Hi", user("Hello"), "not_assistant"),
    "no prompt": ("", "Hello", "no_prompt"),
    "system prompt alone": ([{"role": "system", "content": "Be brief."}], "Hello", "no_prompt"),
    "unknown input": ({"question": "Hi"}, "Hello", "shape_unknown"),
    "unknown output": ("Hi", {"answer": "Hello"}, "shape_unknown"),
    "output of another conversation": ("Hi", [user("Hey"), HELLO], "shape_unknown"),
    "an empty turn": ([assistant(""), user("Hi")], "Hello", "shape_unknown"),
    "an unknown part": ("Hi", {"role": "assistant", "content": [{"type": "x"}]}, "shape_unknown"),
    "tool calls of another kind": ("Hi", {**HELLO, "tool_calls": 7}, "shape_unknown"),
    "a tool call without a name": ("Hi", {**HELLO, "tool_calls": [{}]}, "shape_unknown"),
    "a tool's result in a completion": (
        "Hi",
        {"role": "assistant", "content": [{"type": "tool_result", "content": "20"}]},
        "shape_unknown",
    ),
    "output with a turn in between": ("Hi", [HELLO, user("And?"), HELLO], "shape_unknown"),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_there_is_no_exchange(case: str) -> None:
    inputs, answer, reason = REASONS[case]
    assert exchange_of(inputs, answer) == reason


def test_an_output_may_repeat_the_conversation_or_continue_it() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "20 degrees", "tool_call_id": "c1"}
    expected = Exchange((user("Hi"), call, result), HELLO)
    assert exchange_of("Hi", [user("Hi"), call, result, HELLO]) == expected
    assert exchange_of("Hi", [call, result, HELLO]) == expected
    earlier = [user("One"), assistant("Two"), user("Hi")]
    assert exchange_of("Hi", [*earlier, HELLO]) == Exchange(tuple(earlier), HELLO)


@pytest.mark.parametrize(
    "answer",
    [
        assistant("<think>Hm</think>\nHello"),
        assistant("Hm\n</think>\n\nHello"),
        {**HELLO, "reasoning_content": "Hm"},
    ],
)
def test_reasoning_is_left_out_unless_it_is_kept(answer: dict[str, Any]) -> None:
    assert exchange_of("Hi", answer) == Exchange(HI, HELLO)
    assert exchange_of("Hi", answer, keeps_reasoning=True) == Exchange(HI, answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm\n</think>\n\nParis", "Paris"),
        ("  <think>hm</think>Paris", "Paris"),
        ("hm, so\n</think>\n\nParis", "Paris"),
        ("<think>\nhm, and so on", ""),
        ("<think>a</think>\nFirst\n<think>b</think>\nSecond", "First\nSecond"),
        ('<details type="reasoning" done="false">\nhm', ""),
        (
            '<details type="code">x</details>',
            '<details type="code">x</details>',
        ),
        ("Write </think> to end it.", "Write </think> to end it."),
        ("  Paris\n", "  Paris\n"),
    ],
)
def test_reasoning_is_stripped(text: str, expected: str) -> None:
    assert strip_reasoning(text) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("Paris", "Paris"),
        (["a", {"type": "text", "text": "b"}, {"text": "c"}], "a\nb\nc"),
        ({"type": "output_text", "text": "a"}, "a"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a"),
    ],
)
def test_content_as_text(content: object, expected: str) -> None:
    assert text_of(content) == expected


def test_thoughts_are_kept_on_request() -> None:
    content = [{"type": "think", "think": "hm"}, {"type": "text", "text": "a"}]
    assert messages.assistant(content) == assistant("a")
    completion = messages.assistant(content, keeps_reasoning=True)
    assert completion == {**assistant("a"), "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {}}], "image"),
        ([{"type": "input_audio", "input_audio": {}}], "image"),
        ([{"document": {"name": "x"}}], "image"),
        ([{"toolUse": {}}], "shape_unknown"),
        ([{"type": "text", "text": 7}], "shape_unknown"),
        ([7], "shape_unknown"),
        (7, "shape_unknown"),
    ],
)
def test_content_that_is_no_text(content: object, reason: SkipReason) -> None:
    with pytest.raises(UnusableVote) as info:
        text_of(content)
    assert info.value.reason == reason


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Hi", ["Hi"]),
        ([{"role": "user", "content": "Hi"}], ["Hi"]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, ["Hi"]),
        ('[{"role": "user", "content": "Hi"}]', ["Hi"]),
    ],
)
def test_prompts(value: object, expected: list[str]) -> None:
    assert [turn["content"] for turn in prompt_of(value)] == expected


def test_a_block_of_a_tool_call_is_not_stripped() -> None:
    text = 'First\n<details type="tool_calls" id="x">\ny\n</details>\nSecond'
    with pytest.raises(UnusableVote) as info:
        strip_reasoning(text)
    assert info.value.reason == "context"
    assert answer_text(text) is None


@pytest.mark.parametrize("value", ["", "  ", None, [], {}])
def test_no_prompt(value: object) -> None:
    with pytest.raises(UnusableVote) as info:
        prompt_of(value)
    assert info.value.reason == "no_prompt"


def test_reasoning_is_stripped_from_the_assistants_turns_alone() -> None:
    text = "<think>\nhm\n</think>\nParis"
    turns = turns_of([{"role": role, "content": text} for role in ("user", "assistant")])
    assert [turn["content"] for turn in turns] == [text, "Paris"]


def test_messages_of_the_assistant_in_a_row_are_one_turn() -> None:
    texts = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]
    merged = merge_turns([{"role": role, "content": text} for role, text in texts])
    assert [turn["content"] for turn in merged] == ["a", "b", "c\n\nd", "e"]


@pytest.mark.parametrize(
    ("message", "parents", "expected"),
    [
        ("c", {"a": None, "b": "a", "c": "a"}, ["a", "c"]),
        ("x", {"a": None}, "message_missing"),
        ("", {"a": None}, "message_missing"),
        ("b", {"b": "a"}, "no_conversation"),
        ("b", {"a": "b", "b": "a"}, "no_conversation"),
    ],
)
def test_branches(message: str, parents: dict[str, str | None], expected: Any) -> None:
    messages = {name: {"name": name, "parent": parent} for name, parent in parents.items()}
    try:
        results: object = [item["name"] for item in branch(messages, message, "parent")]
    except UnusableVote as error:
        results = error.reason
    assert results == expected


def test_an_empty_system_turn_is_left_out() -> None:
    user = {"role": "user", "content": "hi"}
    assert prompt_turns([{"role": "system", "content": " "}, user]) == (user,)
    with pytest.raises(UnusableVote):
        prompt_turns([{"role": "user", "content": " "}, user])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param([("user", "Why?")], "Why?", id="text"),
        pytest.param([("human", "Why?"), ("human", "Tell me")], "Why?\n\nTell me", id="two"),
        pytest.param([("assistant", "Also"), ("user", "Why?")], "", id="assistant"),
        pytest.param([("tool", "12"), ("user", "Why?")], "", id="tool"),
        pytest.param([("system", "x"), ("user", "Why?")], "Why?", id="system"),
        pytest.param([("user", " \n"), ("user", "Why?")], "Why?", id="blank"),
        pytest.param([("user", None)], "", id="null"),
        pytest.param([("user", [{"type": "image_url", "image_url": {}}])], "", id="image"),
        pytest.param(
            [("user", [{"type": "image"}, {"type": "text", "text": "Why?"}])], "Why?", id="both"
        ),
        pytest.param(
            [("user", [{"type": "tool_result", "tool_use_id": "c", "content": "12"}])],
            "",
            id="result-of-a-tool",
        ),
        pytest.param([("user", [{"type": "unknown"}])], "", id="unknown-part"),
    ],
)
def test_follow_ups(turns: list[tuple[str, Any]], expected: str) -> None:
    assert follow_up({"role": role, "content": content} for role, content in turns) == expected
