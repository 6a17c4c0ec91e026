"""Tool calls in sampled text: parsers read what templates print, and explain malformed calls."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.encoding import turn
from tests.data.tool_models import (
    FOLDER,
    MARKUP_TEXT,
    TOOL_MODELS,
    call,
    stop_ids,
    tool,
    tool_tokenizer,
)
from tests.tiny import CHATML, tiny_tokenizer
from valence.data.template import ChatTemplate
from valence.data.tool_calls import (
    CALL_FORMATS,
    DEEPSEEK,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    XML,
    CallFormat,
    ParsedTurn,
    ToolCall,
    call_format_of,
)

FORMATS = {call_format.name: call_format for call_format in CALL_FORMATS}

TOOLS = (
    tool("weather", city="string"),
    tool(
        "store",
        text="string",
        number="number",
        count="integer",
        flag="boolean",
        missing="null",
        items="array",
        nested="object",
    ),
    tool("now"),
)

ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("weather", {"city": "Paris"}),
    "unicode": ("weather", {"city": "Zürich 温度 🌡"}),
    "quotes": ("weather", {"city": "\"double\" 'single' `back` \\ slash"}),
    "lines": ("weather", {"city": "one\ntwo\n\n  three\ttab"}),
    "markup": ("weather", {"city": "a < b && c > d {x: [1]} }}, ]]"}),
    "text that is JSON": ("weather", {"city": "12"}),
    "text of an object": ("weather", {"city": '{"name": "x", "arguments": {}}'}),
    "types": ("store", {"number": 1.5, "count": -3, "flag": True, "missing": None}),
    "nested": ("store", {"items": [1, "a, b", None, [True]], "nested": {"x": {"y": [{"z": "ü"}]}}}),
    "empty values": ("store", {"text": "", "items": [], "nested": {}}),
    "nothing": ("now", {}),
}


def text_of(name: str, message: dict[str, Any]) -> str:
    """What a model samples for this turn: what its template prints, without the end token."""
    model, tokenizer = TOOL_MODELS[name], tool_tokenizer(name)
    template = ChatTemplate(tokenizer, model.kwargs, stop_ids(name))
    question = [turn("user", "hello")]
    prompt = template.render(question, TOOLS, ask=True)
    text = template.render([*question, message], TOOLS, ask=False)
    assert text.startswith(prompt) or name == "glm-4.7-flash"
    body = text[len(prompt) :] if text.startswith(prompt) else text.partition("</think>")[2]
    return body.removesuffix("\n").removesuffix(model.call_end)


@pytest.mark.parametrize("name", TOOL_MODELS)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_calls_that_a_template_prints_are_read_back(name: str, case: str) -> None:
    tool_name, arguments = ARGUMENTS[case]
    text = text_of(name, turn("assistant", "", tool_calls=[call(tool_name, arguments)]))
    parsed = FORMATS[TOOL_MODELS[name].format].parse(text, TOOLS)
    assert parsed.error == ""
    assert parsed.calls == (ToolCall(tool_name, arguments, "call00000"),)
    assert parsed.content.replace("<think>", "").replace("</think>", "").strip() == ""


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEYS = st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
STORED = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "number": NUMBERS,
        "count": st.integers(),
        "flag": st.booleans(),
        "missing": st.none(),
        "items": st.lists(JSON, max_size=3),
        "nested": st.dictionaries(KEYS, JSON, max_size=3),
    },
)


@given(st.sampled_from(sorted(TOOL_MODELS)), STORED)
def test_any_arguments_that_a_template_prints_are_read_back(
    name: str, arguments: dict[str, Any]
) -> None:
    text = text_of(name, turn("assistant", "", tool_calls=[call("store", arguments)]))
    parsed = FORMATS[TOOL_MODELS[name].format].parse(text, TOOLS)
    assert parsed.error == ""
    assert [(c.name, c.arguments) for c in parsed.calls] == [("store", arguments)]


@pytest.mark.parametrize("name", [n for n, m in TOOL_MODELS.items() if m.num_calls > 1])
def test_several_calls_and_the_text_in_front_are_read_back(name: str) -> None:
    calls = [
        call(tool_name, arguments, f"call{i:05d}")
        for i, (tool_name, arguments) in enumerate(ARGUMENTS.values())
    ]
    message = turn("assistant", "Let me look.", tool_calls=calls)
    parsed = FORMATS[TOOL_MODELS[name].format].parse(text_of(name, message), TOOLS)
    assert parsed.error == ""
    assert [(c.name, c.arguments, c.id) for c in parsed.calls] == [
        (c["function"]["name"], c["function"]["arguments"], c["id"]) for c in calls
    ]
    content = parsed.content.partition("</think>")[2] or parsed.content
    assert content.strip() == ("" if name == "mistral-nemo" else "Let me look.")


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_the_message_of_a_parsed_turn_prints_the_same_calls_again(name: str) -> None:
    text = text_of(name, turn("assistant", "", tool_calls=[call(*ARGUMENTS["nested"])]))
    call_format = FORMATS[TOOL_MODELS[name].format]
    parsed = call_format.parse(text, TOOLS)
    again = call_format.parse(text_of(name, dict(parsed.message)), TOOLS)
    assert again.calls == parsed.calls


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_an_answer_is_no_call(name: str) -> None:
    parsed = FORMATS[TOOL_MODELS[name].format].parse("It is {cold}, [really].\n", TOOLS)
    assert parsed == ParsedTurn("It is {cold}, [really].\n")
    assert parsed.message == {"role": "assistant", "content": "It is {cold}, [really].\n"}


# --- which format a template has


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_a_turn_has_no_call_before_its_start(name: str) -> None:
    call_format = FORMATS[TOOL_MODELS[name].format]
    text = text_of(name, turn("assistant", "", tool_calls=[call(*ARGUMENTS["nested"])]))
    place = min(text.find(start) for start in call_format.starts if start in text)
    assert call_format.parse(text, TOOLS).calls
    for end in range(place + 1):
        parsed = call_format.parse(text[:end], TOOLS)
        assert (parsed.calls, parsed.error) == ((), "")


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_the_template_shows_the_format(name: str) -> None:
    source = ChatTemplate(tool_tokenizer(name)).source(TOOLS)
    call_format = call_format_of(source)
    assert call_format is not None
    assert call_format.name == TOOL_MODELS[name].format


def test_templates_without_calls_of_a_known_family_have_no_format() -> None:
    formats = {
        path.stem: call_format_of(path.read_text(encoding="utf-8"))
        for path in FOLDER.glob("*.jinja")
    }
    assert {name for name, call_format in formats.items() if call_format is None} == {
        "granite-3.3", "phi-3.5", "smollm3",
    }  # fmt: skip
    assert formats["qwq"] is HERMES
    assert formats["deepseek-r1-distill-qwen"] is DEEPSEEK
    assert call_format_of(CHATML) is None
    assert tiny_tokenizer().chat_template == CHATML


# --- variants of formats


def calls_in(call_format: CallFormat, text: str, **more: Any) -> list[tuple[str, Any]]:
    parsed = call_format.parse(text, **more)
    assert parsed.error == ""
    return [(c.name, c.arguments) for c in parsed.calls]


def test_ids_are_those_of_the_text_or_numbered() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": "mine"}</tool_call>'
    assert [c.id for c in HERMES.parse(text).calls] == ["mine"]
    plain = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert [c.id for c in HERMES.parse(plain).calls] == ["call00000", "call00001"]
    ids = [c.id for c in HERMES.parse(plain, num_earlier_calls=7).calls]
    assert ids == ["call00007", "call00008"]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    for known, expected in (("aB3dE6gH9", "aB3dE6gH9"), ("short", "call00000"), (3, "call00000")):
        text = f'[TOOL_CALLS] [{{"name": "f", "arguments": {{}}, "id": {known!r}}}]'
        assert [c.id for c in MISTRAL.parse(text.replace("'", '"')).calls] == [expected]


def test_the_message_of_a_turn() -> None:
    parsed = HERMES.parse('So.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    assert parsed.message == {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [
            {
                "type": "function",
                "id": "call00000",
                "function": {"name": "f", "arguments": {"x": 1}},
            }
        ],
    }


def test_closing_tags_in_a_json_string_do_not_end_a_call() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}\n</tool_call>'
    assert calls_in(HERMES, text) == [("f", {"x": "</tool_call><tool_call>"})]


def test_closing_tags_in_a_parameter_do_not_end_it() -> None:
    text = (
        "<tool_call><function=f><parameter=x>\n</parameter> </b>\n</parameter>\n"
        "<parameter=y>\n<p>\n</parameter></function></tool_call>"
    )
    assert calls_in(XML, text) == [("f", {"x": "</parameter> </b>", "y": "<p>"})]


def test_text_of_parameters_becomes_a_value_of_the_type_in_the_schema() -> None:
    def value(text: str, schema: dict[str, Any] | None) -> Any:
        properties = {} if schema is None else {"x": schema}
        function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
        call_text = (
            f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
        )
        [values] = {
            repr(calls_in(XML, call_text, tools=tools)[0][1]["x"])
            for tools in ([function], [{"type": "function", "function": function}])
        }
        return values

    for text, schema, expected in (
        ("5", None, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "number"}, 5),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("True", None, "True"),
        ("None", {"type": ["string", "null"]}, None),
        ("none", {"type": ["string", "null"]}, "none"),
        ("{'a': [True]}", {"type": "object"}, {"a": [True]}),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "string"}]}, {"a": 1}),
        ("[1, 2]", {"description": "no type"}, [1, 2]),
        ("{1, 2}", {"type": "array"}, "{1, 2}"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("NaN", {"type": "number"}, "NaN"),
    ):
        assert value(text, schema) == repr(expected), (text, schema)


def test_llama_calls_are_the_whole_turn() -> None:
    body = '{"name": "f", "parameters": {"x": 1}}'
    for text in (body, f"<|python_tag|>{body}", f"\n{body} ", f"{body};"):
        assert calls_in(LLAMA, text) == [("f", {"x": 1})]
    assert "write one call" in LLAMA.parse(f"{body}; {body}").error
    for answer in ('{"answer": 1}', "{not JSON", f"See {body}", '{"name": "Ada", "age": 36}', ""):
        assert LLAMA.parse(answer) == ParsedTurn(answer)


def test_mistral_variants() -> None:
    for text in (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}]',
        '[TOOL_CALLS]f[ARGS]{"x": [1]}',
        '[TOOL_CALLS] f [ARGS] {"x": [1]}',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": [1]}',
    ):
        assert calls_in(MISTRAL, text) == [("f", {"x": [1]})]
    assert MISTRAL.parse("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}").calls[0].id == "abcdefghi"
    assert MISTRAL.parse("[THINK]why[/THINK]So.[TOOL_CALLS]f[ARGS]{}").content == (
        "[THINK]why[/THINK]So."
    )


def test_gemma_values() -> None:
    text = (
        '<|tool_call>call:f{a: <|"|>x,}<|"|> , b:[1,-2.5e3, true,null],c:{<|"|>k:1<|"|>:{}} }'
        "<tool_call|>"
    )
    assert calls_in(GEMMA, text) == [
        ("f", {"a": "x,}", "b": [1, -2500.0, True, None], "c": {"k:1": {}}})
    ]


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>I could call to=functions.g.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"x": "<|"}'
    )
    parsed = HARMONY.parse(text)
    assert parsed == ParsedTurn(
        "One moment.",
        (ToolCall("f", {"x": "<|"}, "call00000"),),
        "",
        "I could call to=functions.g.",
    )
    assert parsed.message["content"] == ""  # the template prints one of both
    assert parsed.message["thinking"] == "I could call to=functions.g.\nOne moment."
    answer = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>4"
    )
    assert HARMONY.parse(answer) == ParsedTurn("4", reasoning="why")
    assert HARMONY.parse("plain") == ParsedTurn("plain")


def test_deepseek_calls_with_a_fence() -> None:
    begin, end, call_begin, call_end, sep = (
        f"<\uff5ctool\u2581{word}\uff5c>"
        for word in (
            "calls\u2581begin",
            "calls\u2581end",
            "call\u2581begin",
            "call\u2581end",
            "sep",
        )
    )
    one = f'{call_begin}function{sep}f\n```json\n{{"x": "```"}}\n```{call_end}'
    assert calls_in(DEEPSEEK, f"{begin}{one}\n{one}{end}") == [("f", {"x": "```"})] * 2


# --- reasoning


@pytest.mark.parametrize("reasoning", ["<think>\nI could write {}.\n</think>\n\n", "so {}</think>"])
def test_markup_in_reasoning_is_no_call(reasoning: str) -> None:
    """With an opening tag, or behind a generation prompt that has it."""
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    block = reasoning.replace("{}", one)
    assert HERMES.parse(f"{block}No.") == ParsedTurn(f"{block}No.")
    parsed = HERMES.parse(block + one)
    assert (parsed.content, len(parsed.calls), parsed.error) == (block.strip(), 1, "")
    assert HERMES.parse("<think><tool_call>{").error == ""


def test_later_tags_of_reasoning_are_text() -> None:
    one = '<tool_call>{"name": "f", "arguments": {"x": "<think>a</think>"}}</tool_call>'
    assert calls_in(HERMES, one) == [("f", {"x": "<think>a</think>"})]


# --- malformed calls

MALFORMED: dict[str, tuple[str, ...]] = {
    "hermes": (
        '<tool_call>{"name": "f", "arguments": {"x": 1}',
        '<tool_call>{"name": "f", "arguments": {"x": 1}}',
        '<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"na',
    ),
    "xml": (
        "<tool_call><function=f><parameter=x>1",
        "<tool_call><function=f><parameter=x>1</parameter></function>",
        "<tool_call><function=f><parameter=x>1</function></tool_call>",
        "<tool_call><function=><parameter=x>1</parameter></function></tool_call>",
        "<tool_call>f(x=1)</tool_call>",
        "<seed:tool_call><function=f></seed:tool_call>",
    ),
    "glm": (
        "<tool_call>f<arg_key>x</arg_key><arg_value>1",
        "<tool_call>f<arg_key>x</arg_key></tool_call>",
        "<tool_call></tool_call>",
        "<tool_call><arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
    ),
    "llama": (
        '{"name": "f", "parameters": {"x": 1}',
        '{"name": "f", "parameters": [1]}',
        '<|python_tag|>f.call(x="1")',
        '<|python_tag|>{"parameters": {}}',
        '{"name": "f", "parameters": {}} Done.',
        '{"name": "f", "parameters": {}}; {"name"',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {}',
        '[TOOL_CALLS] [{"name": "f"}]',
        '[TOOL_CALLS]f{"x": 1}',
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]",
    ),
    "gemma": (
        '<|tool_call>call:f{x:<|"|>a<|"|>}',
        "<|tool_call>call:f{x:<|tool_call>}<tool_call|>",
        "<|tool_call>call:f{x}<tool_call|>",
        "<|tool_call>call:f{x:1<tool_call|>",
        "<|tool_call>call:f{x:1 y:2}<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>f()<tool_call|>",
        "<start_function_call>call:f{x:<escape>a}<end_function_call>",
        "<|tool_call>call:f{x:" + "[" * 100_000,
    ),
    "harmony": (
        "<|channel|>commentary to=functions.f<|message|>{",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f<|message|>[1]",
        "<|channel|>commentary to=functions.f<|message|>{} {}",
        "<|channel|>commentary to=functions.<|message|>{}",
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}",
        "<|channel|>commentary to=functions.f",
    ),
    "deepseek": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f"
        "<\uff5ctool\u2581sep\uff5c>{}<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>f"
        "<\uff5ctool\u2581sep\uff5c>[]<\uff5ctool\u2581call\u2581end\uff5c>"
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
}


def test_every_format_has_malformed_calls_and_a_model() -> None:
    assert MALFORMED.keys() == FORMATS.keys() == {m.format for m in TOOL_MODELS.values()}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts],
    ids=lambda value: value[:60],
)  # fmt: skip
def test_malformed_calls_are_explained(name: str, text: str) -> None:
    parsed = FORMATS[name].parse(text)
    assert parsed.error
    assert len(parsed.error) < 400
    assert "\n" not in parsed.error.strip() or "\n" in text
    assert parsed.calls == ()
    assert parsed.content == text or name == "harmony"
    assert "<|" not in parsed.error or name == "gemma"
    assert "<|channel|>" not in parsed.message["content"]


def test_errors_say_what_to_write() -> None:
    def error(call_format: CallFormat, text: str) -> str:
        return call_format.parse(text).error

    assert "Expecting property name" in error(HERMES, MALFORMED["hermes"][2])
    assert 'write it as {"name"' in error(HERMES, '<tool_call>{"arguments": {}}</tool_call>')
    assert "write </tool_call> behind it" in error(HERMES, MALFORMED["hermes"][1])
    assert "must be a JSON object" in error(HERMES, MALFORMED["hermes"][7])
    assert "<function=tool_name>" in error(XML, "<tool_call>f(x=1)</tool_call>")
    assert "<arg_key>argument</arg_key>" in error(GLM, MALFORMED["glm"][1])
    assert "nothing behind it" in error(LLAMA, MALFORMED["llama"][4])
    assert "[ARGS]" in error(MISTRAL, '[TOOL_CALLS]f{"x": 1}')
    assert '<|"|>' in error(GEMMA, "<|tool_call>call:f{x:a b}<tool_call|>")
    assert "write them as a JSON object" in error(HARMONY, MALFORMED["harmony"][-1])
    assert "one at a time" in error(HARMONY, MALFORMED["harmony"][-2])
    assert "<|" not in error(HARMONY, "<|channel|>x to=functions.f<|message|>{} <|start|>")
    assert "write one call" in error(LLAMA, MALFORMED["llama"][-1])


@given(st.sampled_from(CALL_FORMATS), MARKUP_TEXT)
def test_any_text_is_parsed_without_an_exception(call_format: CallFormat, text: str) -> None:
    for tools in ((), TOOLS):
        parsed = call_format.parse(text, tools)
        assert not (parsed.calls and parsed.error)
        assert all(c.name and isinstance(c.arguments, dict) and c.id for c in parsed.calls)
        assert parsed.message["role"] == "assistant"


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_truncated_calls_are_no_calls(name: str) -> None:
    message = turn("assistant", "", tool_calls=[call(*ARGUMENTS["nested"])])
    call_format, text = FORMATS[TOOL_MODELS[name].format], text_of(name, message)
    complete = call_format.parse(text, TOOLS)
    for length in range(len(text.rstrip())):
        parsed = call_format.parse(text[:length], TOOLS)
        assert parsed.calls in ((), complete.calls)


def test_formats_are_not_mixed_up() -> None:
    """Text with the markup of one family is not a call of a family with other markup."""
    for name, other in product(TOOL_MODELS, CALL_FORMATS):
        if other.name == TOOL_MODELS[name].format:
            continue
        text = text_of(name, turn("assistant", "", tool_calls=[call("weather", {"city": "Paris"})]))
        parsed = other.parse(text, TOOLS)
        assert parsed.calls == () or {other.name, TOOL_MODELS[name].format} <= {
            "hermes",
            "glm",
            "xml",
        }
