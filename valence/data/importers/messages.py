"""Chat turns in the shapes that chat tools and tracing tools record: OpenAI, Anthropic, LangChain.

A shape that is not certain raises UnusableVote: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from valence.data.importers.fields import (
    decode_json,
    first_value,
    is_blank,
    is_json,
    object_at,
    timestamp,
)
from valence.data.importers.records import SkipReason, UnusableVote
from valence.data.values import ROLES, TEXT_PARTS, shown
from valence.types import Message

LANGCHAIN_ROLES = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
"""Type of a LangChain message -> its role."""
REASONING_BLOCKS = (
    # of Open WebUI
    re.compile(r'<details\b[^>]*\btype="reasoning"[^>]*>.*?(?:</details>\s*|\Z)', re.DOTALL),
    # of earlier versions of LibreChat
    re.compile(r"^:::thinking\n.*?\n:::\s*", re.DOTALL | re.MULTILINE),
    re.compile(r"^[ \t]*<think>.*?(?:</think>\s*|\Z)", re.DOTALL | re.MULTILINE),
    # the opening tag was part of the prompt
    re.compile(r"\A(?:(?!<think>).)*?^[ \t]*</think>[ \t]*(?:\n\s*|\Z)", re.DOTALL | re.M),
)
"""Reasoning that models and tools write into the text of a message."""
TOOL_BLOCK = re.compile(r'<details\b[^>]*\btype="tool_calls"')
"""The start of a block of Open WebUI with a call of a tool and its result."""
REASONING_PARTS = ("think", "thinking", "redacted_thinking", "reasoning", "reasoningContent")
FILE_PART = re.compile(r"image|file|video|audio|document|^path$|^component$", re.IGNORECASE)
TRUNCATED = ("length", "max_tokens", "incomplete")
"""What APIs call the end of a completion that reached its length limit."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt, the tools that it offers, and the assistant's turn that answers it."""

    prompt: tuple[Message, ...]
    completion: Message
    tools: tuple[Mapping[str, Any], ...] = ()


def exchange_of(
    request: object, answer: object, *, keeps_reasoning: bool = False
) -> Exchange | SkipReason:
    """The prompt and the completion in a recorded input and output, or why there are none."""
    request, answer = decode_json(request), decode_json(answer)
    if is_truncated(answer):
        return "unfinished"
    if is_blank(answer):
        return "empty"
    try:
        prompt = () if is_blank(request) else messages_of(request)
        *earlier, last = _answer_turns(answer)
        prompt = prompt_turns(_join_turns(prompt, tuple(earlier)))
        completion = _completion(last, keeps_reasoning=keeps_reasoning)
        check_prompt(prompt)
    except UnusableVote as error:
        return error.reason
    return Exchange(prompt, completion, tools_of(request))


# Prompts


def prompt_of(value: object) -> tuple[Message, ...]:
    """The prompt in a recorded input. Raises UnusableVote where there is none."""
    value = decode_json(value)
    prompt = () if is_blank(value) else prompt_turns(messages_of(value))
    if not prompt:
        raise UnusableVote("no_prompt")
    return prompt


def messages_of(value: object) -> tuple[Message, ...]:
    """The turns of a recorded input. Plain text is a user's turn.

    Raises UnusableVote for an unknown shape.
    """
    value = decode_json(value)
    if isinstance(value, str) and not is_json(value):
        return ({"role": "user", "content": value},)
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], list):  # LangChain's batches
            return messages_of(value[0])
        return tuple(turn for message in value for turn in _turns(message))
    if not isinstance(value, Mapping):
        raise UnusableVote("shape_unknown", f"input is {shown(value)}")
    if "messages" in value:
        return (*system_turn(value.get("system")), *messages_of(value["messages"]))
    if "input" in value and (len(value) == 1 or "model" in value or "instructions" in value):
        return (*system_turn(value.get("instructions")), *messages_of(value["input"]))
    return _turns(value)


def turns_of(messages: Iterable[object]) -> tuple[Message, ...]:
    """The turns of a list of messages, as ``prompt_turns`` gives them."""
    return prompt_turns(turn for message in messages for turn in _turns(message))


def prompt_turns(turns: Iterable[Message]) -> tuple[Message, ...]:
    """The turns without the assistant's reasoning, and without an empty system turn.

    Raises UnusableVote for another empty turn.
    """
    prompt: list[Message] = []
    for turn in map(_without_reasoning, turns):
        is_empty = not turn["content"].strip() and "tool_calls" not in turn
        if is_empty and turn["role"] == "system":
            continue
        if is_empty and turn["role"] != "tool":
            raise UnusableVote("shape_unknown", f"an earlier {turn['role']} turn is empty")
        prompt.append(turn)
    return tuple(prompt)


def system_turn(content: object) -> tuple[Message, ...]:
    """The system prompt that is outside of the messages, as a turn; none where it is empty."""
    text = text_of(content, keeps_reasoning=True)
    return ({"role": "system", "content": text},) if text.strip() else ()


def check_prompt(prompt: tuple[Message, ...]) -> None:
    """Raise UnusableVote for a completion that answers nothing, such as a greeting."""
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise UnusableVote("no_prompt")


def merge_turns(turns: Iterable[Message]) -> list[Message]:
    """The turns, in which messages of the assistant that follow each other are one."""
    merged_turns: list[Message] = []
    for turn in turns:
        if merged_turns and turn["role"] == merged_turns[-1]["role"] == "assistant":
            text = f"{merged_turns[-1]['content']}\n\n{turn['content']}"
            merged_turns[-1] = {**merged_turns[-1], "content": text}
        else:
            merged_turns.append(turn)
    return merged_turns


def branch(
    messages: Mapping[str, Mapping[str, Any]], message: str, parent_field: str
) -> list[Mapping[str, Any]]:
    """The messages that lead to one, from the root of a conversation's tree, and itself.

    Raises UnusableVote when one of them is missing.
    """
    if not message:
        raise UnusableVote("message_missing")
    path: list[Mapping[str, Any]] = []
    visited: set[str] = set()
    while message:
        if message not in messages or message in visited:
            raise UnusableVote("no_conversation" if path else "message_missing", message)
        visited.add(message)
        path.append(messages[message])
        message = str(messages[message].get(parent_field) or "")
    return path[::-1]


def tools_of(value: object) -> tuple[Mapping[str, Any], ...]:
    """The tools of a request, or of a list of tools, as OpenAI describes them."""
    value = decode_json(value)
    items = decode_json(value.get("tools")) if isinstance(value, Mapping) else value
    tools: list[Mapping[str, Any]] = []
    for item in items if isinstance(items, list) else []:
        tool = decode_json(item)
        if not isinstance(tool, Mapping):
            continue
        if isinstance(tool.get("function"), Mapping):
            tools.append({"type": "function", "function": tool["function"]})
        elif isinstance(tool.get("name"), str):
            parameters = first_value(tool, "parameters", "input_schema") or {}
            function = {"name": tool["name"], "description": tool.get("description") or ""}
            tools.append({"type": "function", "function": {**function, "parameters": parameters}})
    return tuple(tools)


# Follow-ups


def user_text(content: object) -> str:
    """The text that a user wrote in a message, without images and files; "" when there is none."""
    if isinstance(content, list):
        content = [part for part in content if not _is_file(part)]
    try:
        return _parse_content(content).text.strip()
    except UnusableVote:
        return ""


def _is_file(part: object) -> bool:
    return isinstance(part, Mapping) and bool(FILE_PART.search(str(part.get("type") or "")))


def follow_up(turns: Iterable[Mapping[str, Any]]) -> str:
    """What the user wrote right after a completion; "" when there is nothing.

    turns: after the completion, with their roles. Several turns of the user in a row are one
    message. A turn of a system is passed over.
    """
    texts: list[str] = []
    for turn in turns:
        role = ROLES.get(str(turn.get("role")))
        if role == "system":
            continue
        if role != "user":
            break
        texts.append(user_text(turn.get("content")))
    return "\n\n".join(filter(None, texts))


def follow_ups(
    user_messages: Iterable[Mapping[str, Any]], parent_field: str, *time_fields: str
) -> dict[str, str]:
    """What the user wrote after each completion in a conversation's tree, by the id of its message.

    user_messages: all messages of the user, with the text in ``content`` or ``text``. If there are
    several after one completion, these are versions of one message, of which the last one counts.
    """
    by_time = sorted(user_messages, key=lambda item: timestamp(first_value(item, *time_fields)))
    texts = {
        str(message.get(parent_field) or ""): user_text(message.get("content"))
        or user_text(message.get("text"))
        for message in by_time
    }
    return {name: text for name, text in texts.items() if name and text}


# Completions


def assistant(content: object, *, keeps_reasoning: bool = False) -> Message:
    """A completion with this content. Raises UnusableVote when it is empty."""
    return completion_of({"role": "assistant", "content": content}, keeps_reasoning=keeps_reasoning)


def completion_of(message: object, *, keeps_reasoning: bool = False) -> Message:
    """The completion that a message is. Raises UnusableVote when it is none, or empty."""
    return _completion(_turns(message)[-1], keeps_reasoning=keeps_reasoning)


def _completion(turn: Message, *, keeps_reasoning: bool) -> Message:
    if turn["role"] != "assistant":
        raise UnusableVote("not_assistant", turn["role"])
    turn = turn if keeps_reasoning else _without_reasoning(turn)
    if not turn["content"].strip() and "tool_calls" not in turn:
        raise UnusableVote("empty")
    return turn


def assistant_of(value: object) -> Message:
    """The last turn of a recorded output.

    Raises UnusableVote if its shape is unknown, or if it is not the assistant's.
    """
    turn = _answer_turns(decode_json(value))[-1]
    if turn["role"] != "assistant":
        raise UnusableVote("not_assistant", turn["role"])
    return turn


def answer_text(value: object) -> str | None:
    """The text of a recorded output; None where it is not text alone."""
    try:
        turn = assistant_of(value)
        return None if "tool_calls" in turn else _without_reasoning(turn)["content"] or None
    except UnusableVote:
        return None


def is_truncated(value: object) -> bool:
    """Whether a recorded output ended at its length limit."""
    value = decode_json(value)
    if not isinstance(value, Mapping):
        return False
    if first_value(value, "stop_reason", "finish_reason", "status") in TRUNCATED:
        return True
    inner = first_value(value, "choices", "generations")
    while isinstance(inner, list) and len(inner) == 1:
        inner = inner[0]
    if not isinstance(inner, Mapping):
        return False
    info = inner.get("generation_info")
    return is_truncated(inner) or (isinstance(info, Mapping) and is_truncated(info))


def _answer_turns(value: Any) -> tuple[Message, ...]:
    """The turns of an output, of which the last is the completion."""
    turns: tuple[Message, ...] = ()
    if isinstance(value, str) and not is_json(value):
        turns = ({"role": "assistant", "content": value},)
    elif isinstance(value, list):
        is_nested = len(value) == 1 and isinstance(value[0], list)
        turns = _answer_turns(value[0]) if is_nested else messages_of(value)
    elif not isinstance(value, Mapping):
        pass
    elif choices := [value[name] for name in ("choices", "generations") if name in value]:
        turns = _only_choice(choices[0])
    elif "messages" in value:
        turns = messages_of(value["messages"])
    elif isinstance(value.get("message"), Mapping):
        turns = _turns(value["message"])
    elif isinstance(value.get("output"), list) and value.get("object") == "response":
        turns = _response_turns(value["output"])
    elif value.keys() == {"output"}:  # LangChain and LangSmith wrap outputs that are no objects
        turns = _answer_turns(decode_json(value["output"]))
    else:
        turns = _turns(value)
    if not turns:
        raise UnusableVote("shape_unknown", f"output is {shown(value)}")
    return turns


def _only_choice(choices: Any) -> tuple[Message, ...]:
    """The turn of the only choice. Of several, the one that was rated is not known."""
    while isinstance(choices, list) and len(choices) == 1:
        choices = choices[0]
    if isinstance(choices, Mapping):
        if isinstance(choices.get("message"), Mapping):
            return _turns(choices["message"])
        if isinstance(choices.get("text"), str):
            return ({"role": "assistant", "content": choices["text"]},)
    raise UnusableVote("shape_unknown", f"choices are {shown(choices)}")


def _response_turns(items: list[Any]) -> tuple[Message, ...]:
    """One turn of the items that OpenAI's Responses API returns."""
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for item in items:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "message":
            texts.append(text_of(item.get("content"), keeps_reasoning=True))
        elif kind == "function_call":
            calls.append(_call(item.get("call_id"), item.get("name"), item.get("arguments")))
        elif kind not in REASONING_PARTS:
            raise UnusableVote("shape_unknown", f"output item of type {kind}")
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    return ({**message, "tool_calls": calls} if calls else message,)


def _join_turns(prompt: tuple[Message, ...], earlier: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt with the turns that an output has before its last one, which may repeat it."""
    if not earlier:
        return prompt
    starts = range(len(earlier) - len(prompt) + 1)
    if any(earlier[start : start + len(prompt)] == prompt for start in starts):
        return earlier
    if any(turn["role"] not in ("assistant", "tool") for turn in earlier):
        raise UnusableVote("shape_unknown", "the output is of another conversation")
    return (*prompt, *earlier)


# Messages


def _turns(value: object) -> tuple[Message, ...]:
    """The turns of one recorded message. Anthropic's tool results become separate turns."""
    role, fields = _role_and_fields(value) if isinstance(value, Mapping) else (None, {})
    if role is None:
        raise UnusableVote("shape_unknown", f"turn is {shown(value)}")
    content = _parse_content(fields.get("content"))
    message: dict[str, Any] = {"role": role, "content": content.text}
    calls = _calls(fields)
    ids = {call["id"] for call in calls}
    if calls := [*calls, *(call for call in content.calls if call["id"] not in ids)]:
        message["tool_calls"] = calls
    if role == "tool":
        message |= {
            name: fields[name]
            for name in ("tool_call_id", "name")
            if isinstance(fields.get(name), str)
        }
    reasoning = first_value(fields, "reasoning_content", "reasoning") or content.reasoning
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    if content.results:
        if role != "user":
            raise UnusableVote("shape_unknown", f"tool_result in a turn of the {role}")
        return (*content.results, message) if content.text else tuple(content.results)
    return (message,)


def _role_and_fields(value: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The role of a message and the object that holds its content."""
    if value.get("type") == "constructor" and isinstance(value.get("kwargs"), Mapping):
        path = value.get("id")
        name = path[-1] if isinstance(path, list) and path else ""
        fields = value["kwargs"]
        kind = str(name).removesuffix("Chunk").removesuffix("Message").lower()
        return LANGCHAIN_ROLES.get(kind) or ROLES.get(str(fields.get("role"))), fields
    if "role" in value:
        role = str(value["role"])
        return ROLES.get(role) or LANGCHAIN_ROLES.get(role), value
    kind = str(value.get("type", "")).removesuffix("Chunk").removesuffix("Message").lower()
    fields = value["data"] if isinstance(value.get("data"), Mapping) else value
    return LANGCHAIN_ROLES.get(kind) if "content" in fields else None, fields


@dataclass(slots=True)
class _Content:
    """Content of a message. results: of tools, as Anthropic puts them into a user's message."""

    text: str = ""
    calls: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    results: list[Message] = field(default_factory=list[Message])
    reasoning: str = ""


def _parse_content(value: object) -> _Content:
    """Read content that is text, a part, or a list of parts.

    Raises UnusableVote for images, files and unknown parts.
    """
    if value is None:
        return _Content()
    content = _Content()
    texts: list[str] = []
    thoughts: list[str] = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise UnusableVote("shape_unknown", f"content part is {shown(part)}")
        kind = str(part.get("type") or next((name for name in part if part[name] is not None), ""))
        if kind in TEXT_PARTS:
            text = part.get("text")
            text = text.get("value") if isinstance(text, Mapping) else text
            if not isinstance(text, str):
                raise UnusableVote("shape_unknown", f"text of a content part is {shown(text)}")
            texts.append(text)
        elif kind in REASONING_PARTS:
            thought = part.get(kind) or part.get("text")
            thoughts += [thought] if isinstance(thought, str) else []
        elif kind == "tool_use":
            content.calls.append(_call(part.get("id"), part.get("name"), part.get("input")))
        elif kind == "tool_result":
            result = text_of(part.get("content"), keeps_reasoning=True)
            identifier = part.get("tool_use_id")
            content.results.append({"role": "tool", "content": result, "tool_call_id": identifier})
        elif kind == "error":
            raise UnusableVote("failed", "content part of type error")
        else:
            reason = "image" if FILE_PART.search(kind) else "shape_unknown"
            raise UnusableVote(reason, f"content part of type {kind}")
    content.text = "\n".join(text for text in texts if text)
    content.reasoning = "\n".join(thoughts)
    return content


def text_of(value: object, *, keeps_reasoning: bool = False) -> str:
    """The text of a message's content, without parts that are reasoning.

    Blocks of reasoning in the text are left out, unless ``keeps_reasoning``. Raises UnusableVote
    for content that is not text alone, and for blocks of tool calls.
    """
    content = _parse_content(value)
    if content.calls or content.results:
        raise UnusableVote("shape_unknown", "tool calls or their results instead of text")
    return content.text if keeps_reasoning else strip_reasoning(content.text)


def strip_reasoning(text: str) -> str:
    """The text without blocks of reasoning.

    Raises UnusableVote for a block of a tool call: without it, the text would teach to answer
    without the tool.
    """
    if TOOL_BLOCK.search(text):
        raise UnusableVote("context", "a block of tool calls")
    answer = text
    for block in REASONING_BLOCKS:
        answer = block.sub("", answer)
    return text if answer == text else answer.strip()


def _without_reasoning(turn: Message) -> Message:
    """A turn without the assistant's reasoning."""
    if turn["role"] != "assistant":
        return turn
    plain = {name: value for name, value in turn.items() if name != "reasoning_content"}
    return {**plain, "content": strip_reasoning(turn["content"])}


def _calls(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls next to a message's content, as OpenAI writes them."""
    places = (fields, object_at(fields, "additional_kwargs"))
    calls = next((decode_json(p["tool_calls"]) for p in places if p.get("tool_calls")), [])
    if not calls:  # of earlier versions of the API
        functions = (decode_json(place.get("function_call")) for place in places)
        calls = [{"function": function} for function in functions if function][:1]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnusableVote("shape_unknown", f"tool_calls are {shown(calls)}")
    tool_calls: list[Mapping[str, Any]] = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping):
            name, arguments = function.get("name"), function.get("arguments")
        else:
            name, arguments = call.get("name"), call.get("args")
        tool_calls.append(_call(call.get("id"), name, arguments))
    return tool_calls


def _call(identifier: object, name: object, arguments: object) -> Mapping[str, Any]:
    if not isinstance(name, str) or not name:
        raise UnusableVote("shape_unknown", f"name of a tool call is {shown(name)}")
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": identifier, "type": "function", "function": function}
