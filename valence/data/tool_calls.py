"""Tool calls in sampled text: one parser for each family of chat templates."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from valence.data.strict_json import JSONError, StrictDecoder
from valence.types import Message

Tools = Sequence[Mapping[str, Any]]

_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,:=|]+")
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_PYTHON_NAMES = {"True": True, "False": False, "None": None}

_REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>", "<channel|>"),
)


class _MalformedCallError(ValueError):
    """A call that cannot be read. Its message tells the model how to write it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool. ``id``: names the call in its result; 9 letters or digits if the text
    has none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """An assistant turn. ``content``: the text without its calls; all of the text if a call is
    malformed. ``error``: why a call is malformed and how to fix it; empty if none is. A turn with
    an error has no calls. ``reasoning``: in formats that keep it in a separate message (Harmony);
    elsewhere it is a part of the content.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str = ""
    reasoning: str = ""

    @property
    def message(self) -> Message:
        """The turn as chat templates read it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["thinking"] = self.reasoning
            if self.calls and self.content:  # Harmony's template refuses both in front of a call
                message |= {"content": "", "thinking": f"{self.reasoning}\n{self.content}"}
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.calls
            ]
        return message


@dataclass(slots=True)
class _Turn:
    """A turn while it is parsed. ``calls``: name, arguments and the id in the text, if any."""

    content: str = ""
    calls: list[tuple[str, dict[str, Any], str | None]] = field(
        default_factory=list[tuple[str, dict[str, Any], str | None]]
    )
    reasoning: str = ""

    def add(self, name: object, arguments: object, call_id: object = None) -> None:
        """Add a call. Raises _MalformedCallError for a name or arguments of another type."""
        if not isinstance(name, str) or not _NAME.fullmatch(name.strip()):
            raise _MalformedCallError(
                f"the tool call has no valid name: {_shown(name)}; write the name of one of the "
                "tools"
            )
        if not isinstance(arguments, dict):
            raise _MalformedCallError(
                f"the arguments of {name.strip()} must be a JSON object, such as "
                f'{{"argument": "value"}}, not {_shown(arguments)}'
            )
        known_id = call_id if isinstance(call_id, str) and call_id else None
        self.calls.append((name.strip(), arguments, known_id))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes tool calls. starts: texts with which calls start. Before the
    first of them, a turn has no call.
    """

    name: str
    _read: Callable[[str, Tools], _Turn] = field(repr=False)
    starts: tuple[str, ...] = ("",)

    def parse(self, text: str, tools: Tools = (), *, num_earlier_calls: int = 0) -> ParsedTurn:
        """Parse a sampled turn.

        text: the sampled tokens, decoded with special tokens and without the final end token.
        tools: their JSON schemas give the types of arguments in formats that write these as text.
        Without a schema, such text is JSON if it parses as JSON. num_earlier_calls: calls in
        earlier turns of the conversation, which have other ids. Raises no exception: malformed
        calls are an ``error`` of the turn.
        """
        reasoning, answer = ("", text) if self.name == "harmony" else _split_reasoning(text)
        try:
            turn = self._read(answer, tools)
        except _MalformedCallError as error:
            if self.name == "harmony":  # whose tokens would start messages within the answer
                plain = re.sub(r"<\|[a-z]+\|>", " ", f"{error}")
                return ParsedTurn(_without_channels(text), error=plain)
            return ParsedTurn(text, error=f"{error}")
        if not turn.calls:
            return ParsedTurn(reasoning + turn.content, reasoning=turn.reasoning)
        calls = tuple(
            ToolCall(name, arguments, call_id or f"call{num_earlier_calls + i:05d}")
            for i, (name, arguments, call_id) in enumerate(turn.calls)
        )
        return ParsedTurn((reasoning + turn.content).strip(), calls, reasoning=turn.reasoning)


def call_format_of(source: str) -> CallFormat | None:
    """The format that a chat template prints tool calls in; None if it prints none of a known
    family.

    source: the Jinja text of the template.
    """
    for marker, call_format in _MARKERS:
        if re.search(marker, source):
            return call_format
    return None


# --- parts of several formats


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return f"'{text[:60]}...'" if len(text) > 60 else f"'{text}'"


def _split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning at the start of a turn with its tags, and the text behind it.

    The generation prompt may have opened the reasoning, so the opening tag may be missing.
    Reasoning that does not end is the whole text.
    """
    for opening, closing in _REASONING_TAGS:
        start, end = text.find(opening), text.find(closing)
        if not text[: max(start, 0)].strip() and start >= 0:
            end = text.find(closing, start)
            stop = len(text) if end < 0 else end + len(closing)
            return text[:stop], text[stop:]
        if end >= 0 and not 0 <= start < end:
            return text[: end + len(closing)], text[end + len(closing) :]
    return "", text


def _json_at(text: str, start: int, name: str = "the tool call") -> tuple[Any, int]:
    """The JSON value that starts behind white space at ``start``, and where it ends."""
    while start < len(text) and text[start].isspace():
        start += 1
    decoder = StrictDecoder()
    try:
        value, end = decoder.value_at(text, start)
        if decoder.fault is not None:
            raise decoder.fault
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        near = text[start : start + 60] if error.pos <= start else text[start : error.pos][-40:]
        raise _MalformedCallError(
            f"{name} is not valid JSON: {error.msg} after {_shown(near)}; write one JSON object"
        ) from error
    except JSONError as error:
        raise _MalformedCallError(f"{name} is not valid JSON: {error}; {error.fix}") from error
    except (ValueError, RecursionError) as error:  # infinity, or nested beyond what can be written
        raise _MalformedCallError(f"{name} is not valid JSON: {error}") from error
    return value, end


def _add_json_call(turn: _Turn, value: object, fields: Sequence[str] = ("arguments",)) -> None:
    """Add a call that is a JSON object with a name and, in one of ``fields``, arguments."""
    example = f'{{"name": "tool_name", "{fields[0]}": {{"argument": "value"}}}}'
    if not isinstance(value, dict):
        raise _MalformedCallError(f"the tool call is not a JSON object; write it as {example}")
    if "name" not in value:
        raise _MalformedCallError(f"the tool call has no name; write it as {example}")
    used = next((name for name in fields if name in value), None)
    if used is None:
        raise _MalformedCallError(f"the tool call has no {fields[0]}; write it as {example}")
    turn.add(value["name"], value[used], value.get("id"))


def _unclosed(closing: str) -> _MalformedCallError:
    return _MalformedCallError(f"the tool call does not end; write {closing} behind it")


def _tag_bodies(text: str, opening: str, closing: str, turn: _Turn) -> Iterator[str]:
    """What is between each pair of tags. The text outside becomes the turn's content."""
    position = 0
    while (start := text.find(opening, position)) >= 0:
        turn.content += text[position:start]
        end = text.find(closing, start)
        if end < 0:
            raise _unclosed(closing)
        yield text[start + len(opening) : end]
        position = end + len(closing)
    turn.content += text[position:]


# --- values that are written as text


def _schema_types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set[str]()
    if isinstance(kinds, list):
        types |= {kind for kind in kinds if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            types |= _schema_types(option)
    return types


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """The schemas of a tool's parameters by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            if isinstance(parameters, Mapping):
                properties = parameters.get("properties")
                return properties if isinstance(properties, Mapping) else {}
    return {}


def _literal(text: str) -> Any:
    """The value of a text that is JSON or, as some templates print values, Python."""
    try:
        return _json_text(text)
    except _MalformedCallError:
        pass
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise _MalformedCallError("not a value") from error
    return json.loads(json.dumps(value))


def _json_text(text: str) -> Any:
    value, end = _json_at(text, 0)
    if text[end:].strip():
        raise _MalformedCallError("text follows the value")
    return value


def _value(text: str, schema: object) -> Any:
    """The value of a parameter: of a type that its schema allows; without a schema JSON if the text
    is JSON; else the text.
    """
    types = _schema_types(schema)
    if types == {"string"}:
        return text
    try:
        value = _literal(text) if types else _json_text(text)
    except _MalformedCallError:
        return text
    if not types:
        return value
    allowed = tuple(kind for name in types for kind in _JSON_TYPES.get(name, ()))
    if isinstance(value, bool) and "boolean" not in types:
        return text
    return value if isinstance(value, allowed) else text


def _text_arguments(pairs: Sequence[tuple[str, str]], name: str, tools: Tools) -> dict[str, Any]:
    schemas = _properties(name, tools)
    return {key: _value(text, schemas.get(key)) for key, text in pairs}


# --- the formats


def _read_hermes(text: str, _: Tools) -> _Turn:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    opening, closing = "<tool_call>", "</tool_call>"
    turn, position = _Turn(), 0
    while (start := text.find(opening, position)) >= 0:
        turn.content += text[position:start]
        value, end = _json_at(text, start + len(opening))
        _add_json_call(turn, value)
        position = text.find(closing, end)
        if position < 0:
            raise _unclosed(closing)
        if between := text[end:position].strip():
            raise _MalformedCallError(
                f"the tool call has {_shown(between)} behind its JSON object; write one object "
                "between each pair of tags"
            )
        position += len(closing)
    turn.content += text[position:]
    return turn


_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
)


def _read_xml(text: str, tools: Tools) -> _Turn:
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    A value in ``<tool_call>`` stands on separate lines; one in ``<seed:tool_call>`` does not.
    """
    tag = "seed:tool_call" if "<seed:tool_call>" in text else "tool_call"
    turn, is_on_lines = _Turn(), tag == "tool_call"
    example = "<function=tool_name><parameter=argument>value</parameter></function>"
    for body in _tag_bodies(text, f"<{tag}>", f"</{tag}>", turn):
        function = _FUNCTION.fullmatch(body)
        if function is None:
            raise _MalformedCallError(
                f"the tool call {_shown(body.strip())} is malformed; write it as {example}"
            )
        pairs: list[tuple[str, str]] = []
        position, parameters = 0, function[2].strip() if not is_on_lines else function[2]
        while parameter := _PARAMETER.match(parameters, position):
            value = parameter[2]
            if is_on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            pairs.append((parameter[1].strip(), value))
            position = parameter.end()
        if rest := parameters[position:].strip():
            raise _MalformedCallError(
                f"the parameters of the tool call are malformed at {_shown(rest)}; write it as "
                f"{example}"
            )
        name = function[1].strip()
        turn.add(name, _text_arguments(pairs, name, tools))
    return turn


_GLM_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)


def _read_glm(text: str, tools: Tools) -> _Turn:
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``."""
    turn = _Turn()
    example = "name<arg_key>argument</arg_key><arg_value>value</arg_value>"
    for body in _tag_bodies(text, "<tool_call>", "</tool_call>", turn):
        name, mark, rest = body.partition("<arg_key>")
        rest, name, position = mark + rest, name.strip(), 0
        pairs: list[tuple[str, str]] = []
        while pair := _GLM_PAIR.match(rest, position):
            pairs.append((pair[1].strip(), pair[2]))
            position = pair.end()
        if remainder := rest[position:].strip():
            raise _MalformedCallError(
                f"the tool call is malformed at {_shown(remainder)}; write it as {example}"
            )
        turn.add(name, _text_arguments(pairs, name, tools))
    return turn


_LLAMA_START = re.compile(r"\s*(<\|python_tag\|>)?\s*(\{)?")


def _read_llama(text: str, _: Tools) -> _Turn:
    """``{"name": ..., "parameters": {...}}`` as the whole turn. Another JSON object is an answer.

    The templates print one call in a turn.
    """
    start = _LLAMA_START.match(text)
    assert start is not None
    is_tagged, turn = start[1] is not None, _Turn()
    if not is_tagged and start[2] is None:
        return _Turn(text)
    position = start.end() - len(start[2] or "")
    try:
        value, end = _json_at(text, position)
    except _MalformedCallError:
        if is_tagged or re.compile(r'\{\s*"name"').match(text, position):
            raise
        return _Turn(text)
    if not is_tagged and not _is_llama_call(value):
        return _Turn(text)
    _add_json_call(turn, value, ("parameters", "arguments"))
    if rest := text[end:].strip().removeprefix(";"):
        raise _MalformedCallError(
            f"the tool call has {_shown(rest.strip())} behind its JSON object; write one call and "
            "nothing behind it"
        )
    return turn


def _is_llama_call(value: object) -> bool:
    return (
        isinstance(value, dict)
        and "name" in value
        and bool({"parameters", "arguments"} & set(value))
    )


_MISTRAL_HEADER = re.compile(r"\s*([^\[{]*?)\s*(?:\[CALL_ID\]\s*([^\[]*?)\s*)?\[ARGS\]", re.DOTALL)


def _read_mistral(text: str, _: Tools) -> _Turn:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]``, or
    ``[TOOL_CALLS]name[ARGS]{...}`` for each call, with ``[CALL_ID]id`` behind the name in some
    models.
    """
    marker = "[TOOL_CALLS]"
    turn, position = _Turn(), 0
    while (start := text.find(marker, position)) >= 0:
        turn.content += text[position:start]
        position = start + len(marker)
        if text[position:].lstrip()[:1] in ("[", "{") and not _MISTRAL_HEADER.match(text, position):
            value, position = _json_at(text, position)
            for call in value if isinstance(value, list) else [value]:
                _add_json_call(turn, call)
            continue
        header = _MISTRAL_HEADER.match(text, position)
        if header is None:
            raise _MalformedCallError(
                f"the tool call {_shown(text[position:].strip())} is malformed; write it as "
                '[TOOL_CALLS]tool_name[ARGS]{"argument": "value"}'
            )
        value, position = _json_at(text, header.end(), f"the arguments of {header[1]}")
        turn.add(header[1], value, header[2])
    turn.content += text[position:]
    # The templates accept no other ids.
    turn.calls = [
        (n, a, i if i is not None and _ID.fullmatch(i) else None) for n, a, i in turn.calls
    ]
    return turn


_GEMMA_CALL = re.compile(r"(<\|tool_call>|<start_function_call>)\s*call:([^{<\s]*)\s*(?=\{)")
_GEMMA_TAGS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
_GEMMA_QUOTES = {"<|tool_call>": '<|"|>', "<start_function_call>": "<escape>"}
_GEMMA_BARE = re.compile(r"[^,\]\}\{\[\s<:][^,\]\}\{\[<]*")


def _read_gemma(text: str, _: Tools) -> _Turn:
    """``<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>``, or, in FunctionGemma,
    ``<start_function_call>call:name{key:<escape>value<escape>}<end_function_call>``.
    """
    turn, position = _Turn(), 0
    tags = "|".join(map(re.escape, _GEMMA_TAGS))
    while start := re.compile(tags).search(text, position):
        turn.content += text[position : start.start()]
        call = _GEMMA_CALL.match(text, start.start())
        closing, quote = _GEMMA_TAGS[start[0]], _GEMMA_QUOTES[start[0]]
        if call is None:
            raise _MalformedCallError(
                f"the tool call {_shown(text[start.end() :])} is malformed; write it as "
                f"{start[0]}call:tool_name{{argument:{quote}value{quote}}}{closing}"
            )
        try:
            arguments, end = _GemmaValues(text, quote).value(call.end())
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except RecursionError as error:
            raise _MalformedCallError("the arguments are nested too deeply") from error
        except UnicodeEncodeError as error:
            raise _MalformedCallError("the arguments hold half of a character") from error
        turn.add(call[2], arguments)
        position = end + len(text[end:]) - len(text[end:].lstrip())
        if not text.startswith(closing, position):
            raise _unclosed(closing)
        position += len(closing)
    turn.content += text[position:]
    return turn


class _GemmaValues:
    """Reads values in the notation of Gemma's templates: keys without quotes, and strings between
    a special token.
    """

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote = text, quote

    def value(self, position: int) -> tuple[Any, int]:
        """The value at ``position``, and where it ends."""
        position = self._skip(position)
        if self.text.startswith("{", position):
            return self._object(position + 1)
        if self.text.startswith("[", position):
            return self._list(position + 1)
        if self.text.startswith(self.quote, position):
            return self._string(position)
        bare = _GEMMA_BARE.match(self.text, position)
        if bare is None:
            raise self._error(position)
        try:
            return _json_text(bare[0]), bare.end()
        except _MalformedCallError:
            if bare[0].strip() in _PYTHON_NAMES:
                return _PYTHON_NAMES[bare[0].strip()], bare.end()
            raise self._error(position) from None

    def _skip(self, position: int) -> int:
        while position < len(self.text) and self.text[position].isspace():
            position += 1
        return position

    def _string(self, position: int) -> tuple[str, int]:
        start = position + len(self.quote)
        end = self.text.find(self.quote, start)
        if end < 0:
            raise self._error(position)
        return self.text[start:end], end + len(self.quote)

    def _object(self, position: int) -> tuple[dict[str, Any], int]:
        value: dict[str, Any] = {}
        while not self.text.startswith("}", position := self._skip(position)):
            if value:
                position = self._skip(self._after(",", position))
            if self.text.startswith(self.quote, position):
                key, position = self._string(position)
            else:
                end = self.text.find(":", position)
                if end < 0:
                    raise self._error(position)
                key, position = self.text[position:end].strip(), end
            value[key], position = self.value(self._after(":", self._skip(position)))
        return value, position + 1

    def _list(self, position: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        while not self.text.startswith("]", position := self._skip(position)):
            if values:
                position = self._after(",", position)
            value, position = self.value(position)
            values.append(value)
        return values, position + 1

    def _after(self, character: str, position: int) -> int:
        if not self.text.startswith(character, position):
            raise self._error(position)
        return position + 1

    def _error(self, position: int) -> _MalformedCallError:
        return _MalformedCallError(
            f"the arguments are malformed at {_shown(self.text[position:])}; write strings between "
            f"{self.quote}, and numbers, true, false and null as in JSON"
        )


_HARMONY_MESSAGE = re.compile(
    r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL
)
_HARMONY_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def _read_harmony(text: str, _: Tools) -> _Turn:
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``, which
    may follow a message with reasoning. The recipient may also stand in front of the channel.
    """
    turn, position, contents, reasons = _Turn(), 0, list[str](), list[str]()
    while message := _HARMONY_MESSAGE.match(text, position):
        position = message.end()
        recipient = _HARMONY_RECIPIENT.search(message["header"])
        if recipient is not None and recipient[1] != "assistant":
            name = recipient[1].removeprefix("functions.")
            value, end = _json_at(message["body"], 0, f"the arguments of {name}")
            if rest := message["body"][end:].strip():
                raise _MalformedCallError(
                    f"the arguments of {name} have {_shown(rest)} behind the JSON object; write "
                    "one JSON object"
                )
            if turn.calls:
                raise _MalformedCallError("the turn has several tool calls; write one at a time")
            turn.add(name, value)
        elif "<|channel|>analysis" in message["header"]:
            reasons.append(message["body"])
        else:
            contents.append(message["body"])
    rest = text[position:]
    if _HARMONY_RECIPIENT.search(rest) and "<|channel|>" in rest:
        raise _MalformedCallError("the tool call has no arguments; write them as a JSON object")
    contents += [rest] if rest.strip() else []
    turn.content = "\n".join(map(_without_channels, contents))
    turn.reasoning = "\n".join(map(_without_channels, reasons))
    return turn


def _without_channels(text: str) -> str:
    """The text without Harmony's tokens if it names channels, which the template refuses."""
    return re.sub(r"<\|[a-z]+\|>", " ", text).strip() if "<|channel|>" in text else text


_DEEPSEEK_CALL = re.compile(
    "\\s*<\uff5ctool\u2581call\u2581begin\uff5c>(.*?)<\uff5ctool\u2581sep\uff5c>", re.DOTALL
)
_DEEPSEEK_CLOSING = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_FENCED = re.compile(r"([^\n`{]*)\n```(?:json)?\n")


def _read_deepseek(text: str, _: Tools) -> _Turn:
    """DeepSeek's list of calls, each with a name and a JSON object (V3.1), or with the word
    ``function``, a name and a fenced JSON object (V3, R1).
    """
    begin, finish = (f"<\uff5ctool\u2581calls\u2581{word}\uff5c>" for word in ("begin", "end"))
    turn, position = _Turn(), 0
    while (start := text.find(begin, position)) >= 0:
        turn.content += text[position:start]
        position = start + len(begin)
        while call := _DEEPSEEK_CALL.match(text, position):
            name, position = call[1], call.end()
            fenced = _DEEPSEEK_FENCED.match(text, position)
            if fenced is not None:
                name, position = fenced[1], fenced.end()
            value, position = _json_at(text, position, f"the arguments of {name.strip()}")
            turn.add(name, value)
            if fenced is not None:
                position = text.find("```", position) + 3 if "```" in text[position:] else position
            position += len(text[position:]) - len(text[position:].lstrip())
            if not text.startswith(_DEEPSEEK_CLOSING, position):
                raise _unclosed(_DEEPSEEK_CLOSING)
            position += len(_DEEPSEEK_CLOSING)
        position += len(text[position:]) - len(text[position:].lstrip())
        if not text.startswith(finish, position):
            raise _unclosed(finish)
        position += len(finish)
    turn.content += text[position:]
    return turn


HERMES = CallFormat("hermes", _read_hermes, ("<tool_call>",))
XML = CallFormat("xml", _read_xml, ("<tool_call>", "<seed:tool_call>"))
GLM = CallFormat("glm", _read_glm, ("<tool_call>",))
LLAMA = CallFormat("llama", _read_llama, ("{", "<|python_tag|>"))
MISTRAL = CallFormat("mistral", _read_mistral, ("[TOOL_CALLS]",))
GEMMA = CallFormat("gemma", _read_gemma, tuple(_GEMMA_TAGS))
HARMONY = CallFormat("harmony", _read_harmony)
DEEPSEEK = CallFormat("deepseek", _read_deepseek, ("<\uff5ctool\u2581calls\u2581begin\uff5c>",))

CALL_FORMATS = (HERMES, XML, GLM, LLAMA, MISTRAL, GEMMA, HARMONY, DEEPSEEK)

_MARKERS: tuple[tuple[str, CallFormat], ...] = (
    (r"<\|call\|>", HARMONY),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", DEEPSEEK),
    (r"<\|tool_call>call:|<start_function_call>", GEMMA),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<arg_key>", GLM),
    (r"<function=", XML),
    (r"<tool_call>", HERMES),
    (r'(?s)(?=.*ipython).*"parameters": ', LLAMA),
)
"""A marker in the source of a template, and its format; the first that matches counts."""
