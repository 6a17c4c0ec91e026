"""Earlier calls of tools and their results stay in the prompts of all importers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data.importers import (
    test_helicone,
    test_langfuse,
    test_langsmith,
    test_openai,
)
from tests.data.importers.exports import assistant, only_vote, user, write_jsonl
from valence.data.importers import chats, helicone, langfuse, langsmith, openai
from valence.data.importers.records import Reader, ReadOptions
from valence.data.importers.rows import make_rows

FUNCTION = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
OPENAI = [
    user("Hi"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
]
ANTHROPIC = [
    user("Hi"),
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "text", "text": "20 degrees"}],
            }
        ],
    },
]


def constructor(name: str, **kwargs: Any) -> dict[str, Any]:
    path = ["langchain", "schema", "messages", name]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": kwargs}


LANGCHAIN = [
    constructor("HumanMessage", content="Hi"),
    constructor(
        "AIMessage",
        content="",
        tool_calls=[{"id": "c1", "name": "weather", "args": {"city": "Rome"}}],
    ),
    constructor("ToolMessage", content="20 degrees", tool_call_id="c1"),
]
MESSAGES = {"openai": OPENAI, "anthropic": ANTHROPIC, "langchain": LANGCHAIN}

Files = Sequence[tuple[str, dict[str, Any]]]


def of_helicone(messages: list[Any]) -> Files:
    body = {"model": "tiny", "messages": messages, "tools": [TOOL]}
    return [("requests", test_helicone.request(request_body=body))]


def of_langfuse(messages: list[Any]) -> Files:
    step = test_langfuse.observation(input={"messages": messages, "tools": [TOOL]})
    return [("scores", test_langfuse.score()), ("steps", step)]


def of_langfuse_columns(messages: list[Any]) -> Files:
    step = test_langfuse.observation(input=messages, toolDefinitions=[TOOL])
    return [("scores", test_langfuse.score()), ("steps", step)]


def of_langsmith(messages: list[Any]) -> Files:
    run = test_langsmith.llm("root", parent_run_id=None)
    run["inputs"] = {"messages": messages, "tools": [TOOL]}
    return [("feedback", test_langsmith.feedback()), ("runs", run)]


def of_stored_completions(messages: list[Any]) -> Files:
    return [("stored", test_openai.stored(messages=messages, tools=[TOOL]))]


def of_preferences(messages: list[Any]) -> Files:
    row = test_openai.preference(messages=messages)
    row["input"]["tools"] = [TOOL]
    return [("pairs", row)]


def of_chats(messages: list[Any]) -> Files:
    turns = [*messages, assistant("Warm"), user("Thanks")]
    return [("chats", {"messages": turns, "tools": [TOOL]})]


LABEL = ReadOptions(paths={"label": "feedback"})
CASES: dict[str, tuple[Reader, Callable[[list[Any]], Files], ReadOptions | None]] = {
    "helicone": (helicone.read, of_helicone, None),
    "langfuse": (langfuse.read, of_langfuse, None),
    "langfuse-columns": (langfuse.read, of_langfuse_columns, None),
    "langsmith": (langsmith.read, of_langsmith, None),
    "openai-stored": (openai.read, of_stored_completions, LABEL),
    "openai-pairs": (openai.read, of_preferences, None),
    "chats": (chats.read, of_chats, ReadOptions(includes_unlabelled=True)),
}


@pytest.mark.parametrize("shape", MESSAGES)
@pytest.mark.parametrize("tool", CASES)
def test_calls_and_results_are_turns_of_the_prompt(tool: str, shape: str, tmp_path: Path) -> None:
    reader, files, options = CASES[tool]
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [row]) for name, row in files(MESSAGES[shape])]
    vote = only_vote(reader, paths, options)
    arguments = CALL["function"]["arguments"] if shape == "openai" else {"city": "Rome"}
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    assert vote.prompt == (
        user("Hi"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "20 degrees", "tool_call_id": "c1"},
    )
    assert vote.tools == (TOOL,)
    imported = make_rows([vote], unlabelled=True)
    rows = [row for kind in imported.rows.values() for row in kind]
    assert rows, imported.unused
    assert all((row["prompt"], row["tools"]) == (list(vote.prompt), [TOOL]) for row in rows)


def test_a_function_call_of_earlier_versions_of_the_api_is_a_call(tmp_path: Path) -> None:
    function = CALL["function"]
    messages = [
        user("Hi"),
        {"role": "assistant", "content": "I look.", "function_call": function},
        {"role": "function", "name": "weather", "content": "20 degrees"},
    ]
    [(name, row)] = of_helicone(messages)
    vote = only_vote(helicone.read, [write_jsonl(tmp_path / f"{name}.jsonl", [row])])
    call = {"id": None, "type": "function", "function": function}
    assert vote.prompt[1:] == (
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "20 degrees", "name": "weather"},
    )
