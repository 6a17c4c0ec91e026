"""Chat turns in the shapes that tracing tools record: OpenAI, Anthropic and LangChain.

A shape that is not certain gives None: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valence.data.importers.fields import decode_json, first_value, is_blank, is_json
from valence.data.importers.records import SkipReason
from valence.data.values import ROLES, TEXT_PARTS
from valence.types import Message

LANGCHAIN_ROLES = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
"""Type of a LangChain message -> its role."""
REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")
REASONING_BLOCK = re.compile(
    r"\s*<think>.*?(?:</think>\s*|\Z)|(?:(?!<think>).)*?^[ \t]*</think>[ \t]*(?:\n\s*|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Reasoning that a model writes before its answer. Its first tag may be part of the prompt."""
TRUNCATED = ("length", "max_tokens", "incomplete")
"""What APIs call the end of a completion that reached its length limit."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt, the tools that it offers, and the assistant's turn that answers it."""

    prompt: tuple[Message, ...]
    completion: Message
    tools: tuple[Mapping[str, Any], ...] = ()


def exchange_of(
    given: object, answer: object, *, keeps_reasoning: bool = False
) -> Exchange | SkipReason:
    """The prompt and the completion in a recorded input and output, or why there are none."""
    given, answer = decode_json(given), decode_json(answer)
    if is_truncated(answer):
        return "unfinished"
    if is_blank(answer):
        return "empty"
    prompt = () if is_blank(given) else messages_of(given)
    turns = _answer_turns(answer)
    if prompt is None or not turns:
        return "shape_unknown"
    *earlier, completion = turns
    prompt = _joined(prompt, tuple(earlier))
    if prompt is None:
        return "shape_unknown"
    if any(has_media(turn) for turn in (*prompt, completion)):
        return "image"
    if completion["role"] != "assistant":
        return "not_assistant"
    completion = completion if keeps_reasoning else _without_reasoning(completion)
    if not completion["content"].strip() and "tool_calls" not in completion:
        return "empty"
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        return "no_prompt"
    return Exchange(tuple(map(_without_reasoning, prompt)), completion, tools_of(given))


def messages_of(value: object) -> tuple[Message, ...] | None:
    """The turns of a recorded input; None if its shape is unknown. Plain text is a user's turn."""
    value = decode_json(value)
    if isinstance(value, str):
        return None if is_json(value) else ({"role": "user", "content": value},)
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], list):  # LangChain's batches
            return messages_of(value[0])
        turns: list[Message] = []
        for item in value:
            found = _turns(item)
            if found is None:
                return None
            turns += found
        return tuple(turns)
    if not isinstance(value, dict):
        return None
    if "messages" in value:
        return _after_system(value.get("system"), messages_of(value["messages"]))
    if "input" in value and (len(value) == 1 or "model" in value or "instructions" in value):
        return _after_system(value.get("instructions"), messages_of(value["input"]))
    return _turns(value)


def assistant_of(value: object) -> Message | None:
    """The last turn of a recorded output; None if its shape is unknown, or if it is not the
    assistant's.
    """
    turns = _answer_turns(decode_json(value))
    return turns[-1] if turns and turns[-1]["role"] == "assistant" else None


def text_of(value: object) -> str | None:
    """The text of a recorded output; None where it is not text alone."""
    message = assistant_of(value)
    if message is None or has_media(message) or "tool_calls" in message:
        return None
    return _without_reasoning(message)["content"] or None


def tools_of(value: object) -> tuple[Mapping[str, Any], ...]:
    """The tools of a request, or of a list of tools, as OpenAI describes them."""
    value = decode_json(value)
    items = decode_json(value.get("tools")) if isinstance(value, dict) else value
    tools: list[Mapping[str, Any]] = []
    for item in items if isinstance(items, list) else []:
        tool = decode_json(item)
        if not isinstance(tool, dict):
            continue
        if isinstance(tool.get("function"), dict):
            tools.append({"type": "function", "function": tool["function"]})
        elif isinstance(tool.get("name"), str):
            parameters = first_value(tool, "parameters", "input_schema") or {}
            function = {"name": tool["name"], "description": tool.get("description") or ""}
            tools.append({"type": "function", "function": {**function, "parameters": parameters}})
    return tuple(tools)


def has_media(message: Message) -> bool:
    """Whether a turn holds anything but text, such as an image."""
    return isinstance(message["content"], list)


def is_truncated(value: object) -> bool:
    """Whether a recorded output ended at its length limit."""
    value = decode_json(value)
    if not isinstance(value, dict):
        return False
    if first_value(value, "stop_reason", "finish_reason", "status") in TRUNCATED:
        return True
    inner = first_value(value, "choices", "generations")
    while isinstance(inner, list) and len(inner) == 1:
        inner = inner[0]
    if not isinstance(inner, dict):
        return False
    info = inner.get("generation_info")
    return is_truncated(inner) or (isinstance(info, dict) and is_truncated(info))


def _after_system(system: object, turns: tuple[Message, ...] | None) -> tuple[Message, ...] | None:
    """The turns with the system prompt that a request has outside of its messages."""
    if turns is None or is_blank(system):
        return turns
    content = _content(system)
    return None if content is None else ({"role": "system", "content": content[0]}, *turns)


def _answer_turns(value: Any) -> tuple[Message, ...] | None:
    """The turns of an output, of which the last is the completion."""
    if isinstance(value, str):
        return None if is_json(value) else ({"role": "assistant", "content": value},)
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], list):
            return _answer_turns(value[0])
        return messages_of(value) or None
    if not isinstance(value, dict):
        return None
    for name in ("choices", "generations"):
        if name in value:
            return _only_choice(value[name])
    if "messages" in value:
        return messages_of(value["messages"]) or None
    if isinstance(value.get("message"), dict):
        return _turns(value["message"])
    if isinstance(value.get("output"), list) and value.get("object") == "response":
        return _response_turns(value["output"])
    if value.keys() == {"output"}:  # LangChain and LangSmith wrap outputs that are no objects
        return _answer_turns(decode_json(value["output"]))
    return _turns(value)


def _only_choice(choices: Any) -> tuple[Message, ...] | None:
    """The turn of the only choice. Of several, the one that was rated is not known."""
    while isinstance(choices, list) and len(choices) == 1:
        choices = choices[0]
    if not isinstance(choices, dict):
        return None
    if isinstance(choices.get("message"), dict):
        return _turns(choices["message"])
    text = choices.get("text")
    return ({"role": "assistant", "content": text},) if isinstance(text, str) else None


def _response_turns(items: list[Any]) -> tuple[Message, ...] | None:
    """One turn of the items that OpenAI's Responses API returns."""
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "message":
            content = _content(item.get("content"))
            if content is None or not isinstance(content[0], str):
                return None
            texts.append(content[0])
        elif kind == "function_call":
            calls.append(_call(item.get("call_id"), item.get("name"), item.get("arguments")))
        elif kind not in REASONING_PARTS:
            return None
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    return ({**message, "tool_calls": calls} if calls else message,)


def _joined(
    prompt: tuple[Message, ...], earlier: tuple[Message, ...]
) -> tuple[Message, ...] | None:
    """The prompt with the turns that an output has before its last one, which may repeat it."""
    if not earlier:
        return prompt
    starts = range(len(earlier) - len(prompt) + 1)
    if any(earlier[start : start + len(prompt)] == prompt for start in starts):
        return earlier
    is_continuation = all(turn["role"] in ("assistant", "tool") for turn in earlier)
    return (*prompt, *earlier) if is_continuation else None


def _turns(value: object) -> tuple[Message, ...] | None:
    """The turns of one recorded message. Anthropic's results of tools are turns of their own."""
    if not isinstance(value, Mapping):
        return None
    role, fields = _role_and_fields(value)
    if role is None:
        return None
    calls = _calls(fields)
    content = _content(fields.get("content"))
    if content is None or calls is None:
        return None
    text, more_calls, results, reasoning = content
    message: dict[str, Any] = {"role": role, "content": text}
    if calls := [*calls, *(call for call in more_calls if call["id"] not in _ids(calls))]:
        message["tool_calls"] = calls
    if role == "tool":
        message |= {
            name: fields[name]
            for name in ("tool_call_id", "name")
            if isinstance(fields.get(name), str)
        }
    reasoning = first_value(fields, "reasoning_content", "reasoning") or reasoning
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    if results:
        return (*results, message) if text else tuple(results)
    return (message,)


def _ids(calls: Sequence[Mapping[str, Any]]) -> set[object]:
    return {call.get("id") for call in calls}


def _role_and_fields(value: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The role of a message and the object that holds its content."""
    if value.get("type") == "constructor" and isinstance(value.get("kwargs"), dict):
        path = value.get("id")
        name = path[-1] if isinstance(path, list) and path else ""
        fields = value["kwargs"]
        kind = str(name).removesuffix("Chunk").removesuffix("Message").lower()
        return LANGCHAIN_ROLES.get(kind) or ROLES.get(str(fields.get("role"))), fields
    if "role" in value:
        role = value["role"]
        return (ROLES.get(role) or LANGCHAIN_ROLES.get(role)) if isinstance(role, str) else None, (
            value
        )
    kind = str(value.get("type", "")).removesuffix("Chunk").removesuffix("Message").lower()
    fields = value["data"] if isinstance(value.get("data"), dict) else value
    role = LANGCHAIN_ROLES.get(kind) if "content" in fields else None
    return role, fields


Parts = tuple[Any, list[Mapping[str, Any]], list[Message], str]


def _content(content: object) -> Parts | None:
    """Text, tool calls, results of tools, and reasoning of a message's content.

    Content with an image stays a list. None for content of another kind.
    """
    if content is None or isinstance(content, str):
        return content or "", [], [], ""
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    results: list[Message] = []
    reasoning: list[str] = []
    has_other = False
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind in TEXT_PARTS:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                return None
            texts.append(text)
        elif kind in REASONING_PARTS:
            reasoning.append(str(first_value(part, "thinking", "reasoning", "text") or ""))
        elif kind == "tool_use":
            calls.append(_call(part.get("id"), part.get("name"), part.get("input")))
        elif kind == "tool_result":
            inner = _content(part.get("content"))
            if inner is None:
                return None
            result = {"role": "tool", "content": inner[0]}
            results.append({**result, "tool_call_id": part.get("tool_use_id")})
        else:
            has_other = True
    return content if has_other else "\n".join(texts), calls, results, "\n".join(reasoning)


def _calls(fields: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The tool calls beside a message's content, as OpenAI writes them."""
    more = fields.get("additional_kwargs")
    given = fields.get("tool_calls") or (more.get("tool_calls") if isinstance(more, dict) else None)
    calls: list[Mapping[str, Any]] = []
    for call in given or []:
        if not isinstance(call, dict):
            return None
        function = call.get("function")
        if isinstance(function, dict):
            calls.append(_call(call.get("id"), function.get("name"), function.get("arguments")))
        else:
            calls.append(_call(call.get("id"), call.get("name"), call.get("args")))
    return calls if all(call["function"]["name"] for call in calls) else None


def _call(identifier: object, name: object, arguments: object) -> Mapping[str, Any]:
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": identifier, "type": "function", "function": function}


def _without_reasoning(message: Message) -> Message:
    """A turn without the assistant's reasoning."""
    if message["role"] != "assistant":
        return message
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    if isinstance(plain["content"], str):
        block = REASONING_BLOCK.match(plain["content"])
        plain["content"] = plain["content"][block.end() :] if block else plain["content"]
    return plain
