"""The chat template and the tokenizer's special tokens: defaults, notes, and unusable rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from tests.data.encoding import answered, bad, chat, encoded, encoder, notes, text, turn
from tests.data.tool_models import call, results_of, tool
from tests.errors import raises_error
from tests.tiny import BOS, CHATML, INST, tiny_tokenizer
from valence.data.template import ChatTemplate, chatml_template, with_template
from valence.types import Chat, Content, Ids

# --- the template


def test_chatml_by_name_ends_a_turn_with_one_token() -> None:
    prompt = chat("hello", "good day", "sun?")
    bare = tiny_tokenizer(None)
    named = encoder(tokenizer=with_template(bare, "chatml"))
    assert named.encode_prompt(prompt) == encoder(CHATML).encode_prompt(prompt)
    assert bare.chat_template is None  # the tokenizer that was given is not changed
    other = with_template(tiny_tokenizer(None, chatml_tokens=False), "chatml")
    assert text(
        encoder(tokenizer=other), encoder(tokenizer=other).encode_prompt(chat("hello"))
    ) == ("<|im_start|>user\nhello</s>\n<|im_start|>assistant\n")
    with raises_error("end-token-missing", fix="model.tokenizer"):
        chatml_template(tiny_tokenizer(None, chatml_tokens=False, eos=False))


def plain_chatml(messages: list[dict[str, Any]], *, ask: bool, end: str = "<|im_end|>") -> str:
    """ChatML without tools."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}{end}\n" for m in messages]
    return "".join(turns) + ("<|im_start|>assistant\n" if ask else "")


@pytest.mark.parametrize("ask", [False, True])
def test_chatml_without_tools_prints_the_turns_alone(ask: bool) -> None:
    system, question, answer = (
        turn("system", " be kind\n"),
        turn("user", "hi"),
        turn("assistant", ""),
    )
    for messages in (
        [question],
        [system, question],
        [system, question, answer],
        [question, answer, question, system, turn("other", "x"), answer],
        [system, question, {**answer, "content": "a", "tool_calls": [], "reasoning": "b"}],
    ):
        for tokenizer, end in ((tiny_tokenizer(), "<|im_end|>"), (OTHER_END, "</s>")):
            template = ChatTemplate(with_template(tokenizer, "chatml"))
            expected = plain_chatml(messages, ask=ask, end=end)
            assert template.render(messages, ask=ask) == expected
    begins = ChatTemplate(with_template(tiny_tokenizer(None, adds_bos=True), "chatml"))
    assert begins.render([question], ask=ask) == "<s>" + plain_chatml([question], ask=ask)


@pytest.mark.parametrize("ask", [False, True])
def test_chatml_prints_tools_as_qwen_does(ask: bool) -> None:
    qwen = (Path(__file__).parent / "templates" / "qwen2.5.jinja").read_text(encoding="utf-8")
    reference = ChatTemplate(tiny_tokenizer(qwen))
    chatml = ChatTemplate(with_template(tiny_tokenizer(), "chatml"))
    tools = (tool("f", x="string"), tool("größe"))
    calls = [call("f", {"x": 'a\n"ü"'}), call("größe", {}, "call00001")]
    system, question = turn("system", "be kind"), turn("user", "hi")
    called = [turn("assistant", "So.", tool_calls=calls), *results_of(calls, "1", "zwölf")]
    silent = [turn("assistant", "", tool_calls=calls[:1]), *results_of(calls[:1], "")]
    for messages in (
        [system, question],
        [system, question, *called],
        [system, question, *called, *silent, turn("assistant", "done"), question, *silent],
        [system, question, *called[:1]],
        [system, question, turn("assistant", None, tool_calls=calls), *called[1:2]],
    ):
        for offered in ((), tools):
            expected = reference.render(messages, offered, ask=ask)
            assert chatml.render(messages, offered, ask=ask) == expected
    text = chatml.render([question], tools, ask=ask)
    assert text.startswith("<|im_start|>system\n# Tools\n\nYou may call one or more functions")
    assert text.endswith(plain_chatml([question], ask=ask))
    as_text = {**calls[0], "function": {"name": "f", "arguments": '{"x": 1}'}}
    printed = chatml.render([question, turn("assistant", None, tool_calls=[as_text])], ask=ask)
    assert '{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in printed
    assert chatml.reads_tools(tools)


OTHER_END = tiny_tokenizer(None, chatml_tokens=False)


def test_chats_without_a_template_are_bad_rows_that_name_the_setting() -> None:
    row = answered(chat("hello"), chat("sun", first="assistant"))
    assert "data.chat_template: chatml" in str(bad(encoder(None), row, "no_template").fix)
    mixed = answered("hello", chat("sun", first="assistant"))
    bad(encoder(None), mixed, "no_template")
    assert encoder(None).end_ids == (tiny_tokenizer(None).eos_token_id,)


@pytest.mark.parametrize("template", [BOS, None])
def test_one_bos_when_both_template_and_tokenizer_have_it(template: str | None) -> None:
    tokenizer = with_template(
        tiny_tokenizer(template, adds_bos=True), None if template else "chatml"
    )
    enc = encoder(tokenizer=tokenizer)
    ids = enc.encode_prompt(chat("hello"))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert notes(enc, answered(chat("hello"), chat("sun", first="assistant"))) == {}


def test_double_bos_that_a_row_brings_along_is_noted() -> None:
    enc = encoder("{{ bos_token }}{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    assert notes(enc, answered(chat("<s>hello"), chat("sun", first="assistant")))["double_bos"] == 1
    assert notes(enc, answered(Ids((1, 1, 9)), Ids((9, 4)))) == {"double_bos": 1}


def test_special_tokens_written_in_a_row_are_noted() -> None:
    enc = encoder()
    answer = chat("sun", first="assistant")
    assert notes(enc, answered(chat("hello"), answer)) == {}
    for row in (
        answered(chat("hello<|im_end|>"), answer),
        answered(chat("hello"), chat("sun</s>moon", first="assistant")),
        answered("hello<pad>", "sun"),
    ):
        assert notes(enc, row) == {"special_tokens_in_text": 1}


def test_text_with_a_bos_that_opens_turns_is_not_wrapped_again() -> None:
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.bos_token = "<|im_start|>"  # as in SmolLM2
    result = bad(encoder(tokenizer=tokenizer), answered(rendered, "sun"), "template_in_text")
    assert "data.as_chat: false" in str(result.fix)
    encoded(encoder(tokenizer=tokenizer, as_chat=False), answered(rendered, "sun"))


def test_a_bos_that_only_starts_the_text_may_be_written_in_a_prompt() -> None:
    assert "<s>" not in ChatTemplate(tiny_tokenizer(BOS)).markers
    encoded(encoder(BOS), answered("<s>hello", "sun"))  # an HTML tag


def test_text_merging_over_the_boundary_is_noted_and_kept_apart() -> None:
    enc = encoder(as_chat=False)
    row = answered("capi", "tal of")
    assert len(enc.vocab.ids("capital of")) < len(enc.vocab.ids("capi")) + len(
        enc.vocab.ids("tal of")
    )
    assert notes(enc, row) == {"boundary_merges": 1}
    unit = encoded(enc, row)
    assert unit.prompt_ids == enc.encode_prompt("capi")
    assert text(enc, unit.answers[0].ids) == "tal of<|im_end|>"
    assert notes(enc, answered("hello", " world")) == {}


def test_tokenizers_that_mark_the_start_of_a_text_do_not_mark_the_start_of_an_answer() -> None:
    tokenizer = tiny_tokenizer(INST, chatml_tokens=False)
    backend: Any = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Prepend("_")  # as Llama 2 puts a space there
    enc = encoder(tokenizer=tokenizer)
    for row in (answered("hello", " sun"), answered(chat("hello"), chat("sun", first="assistant"))):
        assert "_" in text(enc, enc.vocab.ids(" sun"))
        assert "_" in text(enc, encoded(enc, row).prompt_ids)
        assert "_ sun" not in text(enc, encoded(enc, row).answers[0].ids)
        assert notes(enc, row) == {}


def test_broken_templates_are_the_users_mistake_not_the_rows() -> None:
    row = answered(chat("hello"), chat("sun", first="assistant"))
    silent = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% "
        "endfor %}"
    )
    with raises_error("chat-template-no-answer", fix="model.tokenizer"):
        ChatTemplate(tiny_tokenizer(silent)).turn_end  # noqa: B018
    with raises_error("chat-template-no-answer"):
        encoder(silent).encode(row)
    never = "{{ raise_exception('never') }}"
    with raises_error("chat-template-failed", fix="model.tokenizer") as raised:
        ChatTemplate(tiny_tokenizer(never)).turn_end  # noqa: B018
    assert "never" in raised.error.message
    with raises_error("chat-template-failed"):
        encoder(never).encode(row)
    other = pickle.loads(pickle.dumps(raised.error))  # as a tokenizer process sends it
    assert (str(other), other.facts) == (str(raised.error), raised.error.facts)


# --- rows that a template cannot take


@pytest.mark.parametrize(
    ("template", "prompt", "completion", "kind"),
    [
        (CHATML, Chat((turn("alien", "hello"),)), chat("sun", first="assistant"), "unknown_role"),
        (
            INST,
            Chat((turn("system", "be kind"),)),
            chat("sun", first="assistant"),
            "template_refuses",
        ),
        (CHATML, Chat((turn("user"),)), chat("sun", first="assistant"), "template_refuses"),
        (CHATML, Chat(()), chat("sun", first="assistant"), "template_refuses"),
        (CHATML, chat("hello"), chat("", first="assistant"), "empty_answer"),
        (CHATML, chat("hello"), chat(" \n", first="assistant"), "empty_answer"),
        (CHATML, chat("hello"), "", "empty_answer"),
        (CHATML, chat("hello"), chat("sun", "and?", first="assistant"), "not_an_answer"),
        (CHATML, chat("hello"), chat("sun"), "not_an_answer"),
        (
            CHATML,
            chat("hello"),
            Chat((turn("assistant", tool_calls=[{"name": "f"}]),)),
            "not_printed",
        ),
        (CHATML, chat("hello"), Ids((5, 6)), "mixed_content"),
        (CHATML, Ids((5, 6)), "sun", "mixed_content"),
        (CHATML, "hello", Ids((5, 6)), "mixed_content"),
        (CHATML, "hello", "", "empty_answer"),
        (CHATML, "hello", "   ", "empty_answer"),
        (CHATML, "hello", "half \ud83d of a pair", "not_unicode"),
        (CHATML, chat("half \ud83d of a pair"), chat("sun", first="assistant"), "not_unicode"),
        (CHATML, Ids((5, 400)), Ids((5,)), "id_out_of_range"),
        (CHATML, Ids((5,)), Ids((-1,)), "id_out_of_range"),
        (CHATML, Ids(()), Ids((5,)), "empty_prompt"),
        (CHATML, Ids((5,)), Ids(()), "empty_answer"),
    ],
)
def test_bad_rows(template: str, prompt: Content, completion: Content, kind: str) -> None:
    bad(encoder(template), answered(prompt, completion), kind)


def test_role_that_the_template_names_is_known() -> None:
    template = CHATML.replace("m['role']", "('critic' if m['role'] == 'critic' else m['role'])")
    row = answered(Chat((turn("critic", "hello"),)), chat("sun", first="assistant"))
    encoded(encoder(template), row)
    bad(encoder(CHATML), row, "unknown_role")


def test_turns_that_the_template_leaves_out_are_a_bad_row() -> None:
    only_two = CHATML.replace(
        "{{ '<|im_start|>'", "{% if m['role'] in ['user', 'assistant'] %}{{ '<|im_start|>'", 1
    )
    only_two = only_two.replace("{% endfor %}", "{% endif %}{% endfor %}")
    prompt = Chat((turn("system", "be kind"), turn("user", "hello")))
    row = answered(prompt, chat("sun", first="assistant"))
    reason = bad(encoder(only_two), row, "not_printed").reason
    assert "turn 1 (system)" in reason
    upper = CHATML.replace(
        "m['content']", "(m['content'] | upper if m['role'] == 'system' else m['content'])"
    )
    encoded(encoder(upper), row)  # rewritten, and so read
