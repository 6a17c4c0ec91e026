"""Tool results behind sampled turns: the tokens are those of the chat template, and sampled tokens
stay as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.data.encoding import HERE, turn
from tests.data.tool_models import (
    MARKUP_TEXT,
    TOOL_MODELS,
    call,
    results_of,
    stop_ids,
    tool,
    tool_tokenizer,
)
from tests.tiny import NO_END, tiny_tokenizer
from valence.data.encode import Encoder
from valence.data.template import ChatTemplate, chatml_template
from valence.data.tool_calls import call_format_of
from valence.data.vocab import RowError
from valence.types import Chat, Demonstration, TokenizedExample

TOOLS = (tool("weather", city="string"), tool("add", a="integer", b="integer"))
Conversation = list[dict[str, Any]]


def encoder_of(name: str) -> Encoder:
    return Encoder(
        tool_tokenizer(name),
        max_length=20_000,
        stop_ids=stop_ids(name),
        chat_template_kwargs=TOOL_MODELS[name].kwargs,
    )


def conversation_of(name: str) -> tuple[Conversation, Conversation]:
    """A prompt, and what follows: turns with calls and their results, then an answer."""
    model = TOOL_MODELS[name]
    thought = {model.reasoning: "I should look."} if model.reasoning else {}
    # Harmony drops reasoning in front of calls, and only reasoning makes the offline path train on
    # the channel of an answer.
    last_thought = {"thinking": "Now I know."} if model.format == "harmony" else thought
    prompt = [turn("system", "be kind"), turn("user", "How warm is Zürich, and 2 + 2?")]
    first = [call("weather", {"city": "Zürich"})]
    second = [
        call("add", {"a": 2, "b": 2}, "call00001"),
        call("weather", {"city": 'a "quoted" city\'s\nname'}, "call00002"),
    ][: model.num_calls]
    contents = ['{"degrees": 21.5}', "unknown city: 温度"]
    turns = [
        turn("assistant", "", tool_calls=first, **thought),
        *results_of(first, "4 degrees"),
        turn("assistant", "", tool_calls=second, **thought),
        *results_of(second, *contents[: model.num_calls]),
        turn("assistant", "It is cold.", **last_thought),
    ]
    return prompt if model.system else prompt[1:], turns


class Reference:
    """A second implementation: transformers prints and tokenizes whole conversations."""

    def __init__(self, name: str) -> None:
        self.tokenizer: Any = tool_tokenizer(name)
        self.kwargs = dict(TOOL_MODELS[name].kwargs)

    def text(self, messages: Conversation, *, ask: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=list(TOOLS), add_generation_prompt=ask, tokenize=False, **self.kwargs
        )

    def ids(self, messages: Conversation, *, ask: bool) -> list[int]:
        ids: Any = self.tokenizer.apply_chat_template(
            messages, tools=list(TOOLS), add_generation_prompt=ask, tokenize=True,
            return_dict=False, **self.kwargs,
        )  # fmt: skip
        return list(ids)

    def sampled(self, messages: Conversation, i: int, end: str) -> list[int]:
        """What a model generates for turn i: what the template prints behind its generation
        prompt, and the end token.
        """
        prompt, text = (
            self.text(messages[:i], ask=True),
            self.text(messages[: i + 1], ask=False),
        )
        assert text.startswith(prompt)
        body = text[len(prompt) :]
        body = body[: body.index(end)] if end in body else body
        return self.tokenizer.encode(body + end, add_special_tokens=False)


def play(name: str) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation as online training sees them, and which were sampled."""
    model, enc, reference = TOOL_MODELS[name], encoder_of(name), Reference(name)
    prompt, turns = conversation_of(name)
    chat = Chat(tuple(prompt), TOOLS)
    ids = list(enc.encode_prompt(chat))
    mask = [False] * len(ids)
    i = 0
    while i < len(turns):
        end = model.call_end if "tool_calls" in turns[i] else model.answer_end
        sampled = reference.sampled([*prompt, *turns], len(prompt) + i, end)
        ids += sampled
        mask += [True] * len(sampled)
        results = 0
        while i + 1 + results < len(turns) and turns[i + 1 + results]["role"] == "tool":
            results += 1
        i += 1 + results
        if results:
            suffix = enc.encode_tool_suffix(chat, turns[:i], results)
            ids += suffix
            mask += [False] * len(suffix)
    return ids, mask


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_tokens_of_an_online_conversation_are_those_of_the_whole_conversation(name: str) -> None:
    model, reference = TOOL_MODELS[name], Reference(name)
    prompt, turns = conversation_of(name)
    expected = reference.ids([*prompt, *turns], ask=False)
    ids, mask = play(name)
    if model.answer_end == "<|user|>":  # which the template prints only before the next user turn
        assert reference.tokenizer.decode(ids[-1:]) == "<|user|>"
        ids, mask = ids[:-1], mask[:-1]
    assert ids == expected[: len(ids)]
    assert reference.tokenizer.decode(expected[len(ids) :]) == model.after
    assert mask[-1]


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_sampled_tokens_are_those_that_offline_training_trains_on(name: str) -> None:
    prompt, turns = conversation_of(name)
    row = Demonstration(
        prompt=Chat(tuple(prompt), TOOLS), completion=Chat(tuple(turns)), origin=HERE
    )
    unit = encoder_of(name).encode(row)
    assert isinstance(unit, TokenizedExample), unit
    [answer] = unit.answers
    ids, mask = play(name)
    assert list(unit.prompt_ids + answer.ids) == ids
    assert [False] * len(unit.prompt_ids) + list(answer.mask) == mask


def test_a_suffix_has_the_tokens_that_follow_the_end_token_in_the_conversation() -> None:
    """Also with a tokenizer that writes a word differently where a text starts."""
    tokenizer = tiny_tokenizer()
    backend: Any = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Prepend("_")  # as Llama 2 puts a space there
    tokenizer.chat_template = chatml_template(tokenizer)
    enc = Encoder(tokenizer, max_length=1000)
    prompt, turns = conversation_of("chatml")
    ids = enc.encode_tool_suffix(Chat(tuple(prompt), TOOLS), turns[:2], 1)
    conversation = enc.encode_prompt(Chat((*prompt, *turns[:2]), TOOLS))
    assert conversation[-len(ids) :] == ids
    assert conversation[-len(ids) - 1] == tokenizer.eos_token_id
    assert "4 degrees" in tokenizer.decode(list(ids))


# --- where a sampled turn ends


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_the_suffix_starts_behind_the_end_token_without_the_stops_of_the_model(name: str) -> None:
    """The template alone shows where a turn ends."""
    prompt, turns = conversation_of(name)
    bare = ChatTemplate(tool_tokenizer(name), TOOL_MODELS[name].kwargs)
    full = encoder_of(name).template
    end, suffix = bare.split_tool_suffix([*prompt, *turns[:2]], 1, TOOLS)
    if TOOL_MODELS[name].format == "glm":  # in which the next turn's first token is a stop
        assert suffix == "<|observation|>" + full.tool_suffix([*prompt, *turns[:2]], 1, TOOLS)
    else:
        assert end == TOOL_MODELS[name].call_end
        assert suffix == full.tool_suffix([*prompt, *turns[:2]], 1, TOOLS)


def test_an_answer_may_end_with_another_token_than_the_template_prints() -> None:
    """Harmony prints ``<|end|>`` where the model stops at ``<|return|>``."""
    messages = [turn("user", "hello"), turn("assistant", "good day"), turn("user", "go on")]
    end, suffix = encoder_of("gpt-oss").template.split_tool_suffix(messages, 1)
    assert end == "<|end|>"
    assert suffix == "<|start|>user<|message|>go on<|end|><|start|>assistant"


def test_the_content_of_results_does_not_decide_where_the_turn_ends() -> None:
    for name in ("qwen2.5", "glm-4.6", "gemma"):
        prompt, turns = conversation_of(name)
        template = encoder_of(name).template
        end = TOOL_MODELS[name].call_end
        for content in ("}", "c", f"a{end}b", "sentinelanswer", ""):
            messages = [*prompt, turns[0], {**turns[1], "content": content}]
            text = template.tool_suffix(messages, 1, TOOLS)
            [expected] = {
                template.tool_suffix([*prompt, turns[0], {**turns[1], "content": "X"}], 1, TOOLS)
            }
            assert text == expected.replace("X", content)


def test_the_body_of_a_sampled_turn_does_not_matter() -> None:
    """Qwen3 drops reasoning of earlier turns, and prints an empty block in the last one only."""
    prompt, turns = conversation_of("qwen3")
    template = encoder_of("qwen3").template
    expected = template.tool_suffix([*prompt, *turns[:2]], 1, TOOLS)
    for content in ("", "<think>why</think>", "text", "<|im_end|>", "</tool_call>"):
        changed = turn("assistant", content, tool_calls=turns[0]["tool_calls"])
        assert template.tool_suffix([*prompt, changed, turns[1]], 1, TOOLS) == expected


# --- refusals


def messages_with_result() -> Conversation:
    prompt, turns = conversation_of("chatml")
    return [*prompt, *turns[:4]]


def refusal(source: str, messages: Conversation, results: int = 1) -> RowError:
    with pytest.raises(RowError) as caught:
        ChatTemplate(tiny_tokenizer(source)).tool_suffix(messages, results)
    assert caught.value.fix
    return caught.value


def printed(content: str, before: str = "") -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + before
        + "{{ " + content + " }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )  # fmt: skip


BODY = "m.content + (m.tool_calls | tojson if m.tool_calls else '')"


def test_a_template_that_appends_only_is_accepted() -> None:
    template = ChatTemplate(tiny_tokenizer(printed(BODY)))
    messages = messages_with_result()[:4]
    assert template.tool_suffix(messages, 1) == (
        "\n<|im_start|>tool\n4 degrees<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_numbers_turns_is_refused() -> None:
    error = refusal(
        printed(BODY, "{{ '%d of %d ' % (loop.index, messages | length) }}"),
        messages_with_result()[:4],
    )
    assert error.kind == "not_a_prefix"
    assert "before turn 3" in error.reason


def test_a_template_that_drops_earlier_assistant_turns_is_refused() -> None:
    dropped = f"(({BODY}) if m.role != 'assistant' or loop.last else '')"
    for messages in (
        messages_with_result()[:4],
        [turn("user", "hello"), turn("assistant", "good day"), turn("user", "go on")],
    ):
        error = refusal(printed(dropped), messages)
        assert error.kind == "not_printed"
        assert "(assistant)" in error.reason


def test_a_template_that_drops_turns_before_the_last_result_is_refused() -> None:
    body = f"(({BODY}) if m.role != 'tool' or loop.index > messages | length - 2 else '')"
    messages = messages_with_result()
    ChatTemplate(tiny_tokenizer(printed(body))).tool_suffix(messages[:4], 1)
    prompt, turns = conversation_of("chatml")
    assert refusal(printed(body), [*prompt, *turns[:3], turns[3]]).kind == "not_a_prefix"


def test_a_template_that_leaves_out_results_is_refused() -> None:
    body = f"({BODY} if m.role != 'tool' else '')"
    messages = messages_with_result()[:4]
    for content in ("4 degrees", "a"):
        error = refusal(printed(body), [*messages[:3], {**messages[3], "content": content}])
        assert error.kind == "not_printed"
        assert "turn 4 (tool)" in error.reason
    only_last = f"({BODY} if m.role != 'tool' or loop.last else '')"
    prompt, turns = conversation_of("chatml")
    assert refusal(printed(only_last), [*prompt, *turns[2:5]], 2).kind == "not_printed"


def test_a_suffix_that_depends_on_the_turn_before_is_refused() -> None:
    source = printed(BODY, "{{ loop.previtem.content | length if loop.previtem }}")
    messages = [turn("user", "hello"), turn("assistant", "good day"), turn("user", "go on")]
    assert refusal(source, messages).kind == "not_a_prefix"


def test_results_must_follow_an_assistant_turn() -> None:
    template = ChatTemplate(tiny_tokenizer())
    for results in (0, 1, 3):
        with pytest.raises(ValueError, match="must follow an assistant turn"):
            template.tool_suffix([turn("user", "a"), turn("user", "b")], results)


def test_a_template_without_tokens_for_the_end_of_a_turn_is_read_all_the_same() -> None:
    messages = [turn("user", "hello"), turn("assistant", "good day"), turn("user", "go on")]
    template = ChatTemplate(tiny_tokenizer(NO_END, chatml_tokens=False))
    assert template.split_tool_suffix(messages, 1) == ("", "\nuser: go on\nassistant: ")


def test_mistral_nemo_with_a_system_turn_is_refused() -> None:
    """It prints the system turn only before the last message."""
    _, turns = conversation_of("mistral-nemo")
    prompt = [turn("system", "be kind"), turn("user", "hello")]
    with pytest.raises(RowError, match="differently"):
        encoder_of("mistral-nemo").template.tool_suffix([*prompt, *turns[:2]], 1, TOOLS)


# --- malformed calls

AS_USER = {"llama": False, "gpt-oss": True, "gemma": True, "function-gemma": True}


@pytest.mark.parametrize("name", TOOL_MODELS)
def test_an_error_is_answered_in_a_turn_that_the_template_prints(name: str) -> None:
    prompt, _ = conversation_of(name)
    template = encoder_of(name).template
    call_format = call_format_of(template.source(TOOLS))
    assert call_format is not None
    malformed = call_format.parse("<tool_call>{]").message
    messages = [*prompt, malformed]
    if name == "mistral-nemo":  # which prints the tools again before the last user turn
        with pytest.raises(RowError):
            template.answer_of_error(messages, "write JSON", TOOLS)
        return
    answer = template.answer_of_error(messages, "write JSON", TOOLS)
    assert answer["role"] == ("user" if AS_USER.get(name) else "tool")
    suffix = template.tool_suffix([*messages, answer], 1, TOOLS)
    assert "write JSON" in suffix
    assert template.render([*messages, answer], TOOLS, ask=True).endswith(suffix)


@given(st.sampled_from(sorted(TOOL_MODELS.keys() - {"mistral-nemo"})), MARKUP_TEXT)
def test_any_sampled_text_can_be_answered(name: str, text: str) -> None:
    """By the results of its calls, or by an error; what was sampled does not change the suffix."""
    prompt, turns = conversation_of(name)
    template = encoder_of(name).template
    call_format = call_format_of(template.source(TOOLS))
    assert call_format is not None
    parsed = call_format.parse(text, TOOLS)
    messages = [*prompt, parsed.message]
    if parsed.calls:
        calls = parsed.message["tool_calls"]
        suffix = template.tool_suffix(
            [*messages, *results_of(calls, *["4 degrees"] * len(calls))], len(calls), TOOLS
        )
        expected = template.tool_suffix([*prompt, *turns[:2]], 1, TOOLS)
        if len(calls) == 1:
            assert suffix == expected.replace("weather", parsed.calls[0].name)
        assert suffix.count("4 degrees") == len(calls)
    else:
        answer = template.answer_of_error(messages, "write JSON", TOOLS)
        suffix = template.tool_suffix([*messages, answer], 1, TOOLS)
        other = [*prompt, turn("assistant", "hello"), answer]
        assert suffix == template.tool_suffix(other, 1, TOOLS)
