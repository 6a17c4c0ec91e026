"""Examples to tokens: prefixes, masks, ends of turns, long rows, and rows that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.tiny import BOS, CHATML, CHATML_TOOLS, INST, LAST_UNSTRIPPED, NO_END, tiny_tokenizer
from valence.data.encode import Encoder, Unusable
from valence.data.template import ChatTemplate, fallback_template
from valence.errors import UserError
from valence.types import (
    Answer,
    Chat,
    Content,
    Demonstration,
    Encoded,
    Ids,
    Judgement,
    Origin,
    Preference,
    Prompt,
    Ranking,
)

HERE = Origin("rows.jsonl", 1)


def turn(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*contents: str, first: str = "user") -> Chat:
    """Turns that alternate between user and assistant."""
    other = {"user": "assistant", "assistant": "user"}
    return Chat(tuple(turn(first if i % 2 == 0 else other[first], c) for i, c in enumerate(contents)))


def answered(prompt: Content, completion: Content) -> Judgement:
    return Judgement(prompt=prompt, completion=completion, label=True, origin=HERE)


def encoder(template: str | None = CHATML, *, max_length: int = 1000, tokenizer: Any = None, **options: Any) -> Encoder:
    return Encoder(tokenizer or tiny_tokenizer(template), max_length=max_length, **options)


def encoded(enc: Encoder, example: Any) -> Encoded:
    unit = enc.encode(example)
    assert isinstance(unit, Encoded), unit
    return unit


def bad(enc: Encoder, example: Any, kind: str) -> Unusable:
    result = enc.encode(example)
    assert isinstance(result, Unusable), result
    assert (result.kind, result.dropped) == (kind, False)
    assert result.origin == example.origin
    assert result.reason
    assert result.fix
    return result


def notes(enc: Encoder, *examples: Any) -> dict[str, int]:
    return {name: len(rows) for name, rows in enc.encode_all(examples).notes.items()}


def trained(enc: Encoder, answer: Answer) -> str:
    return text(enc, tuple(i for i, m in zip(answer.ids, answer.mask, strict=True) if m))


def text(enc: Encoder, ids: tuple[int, ...]) -> str:
    return str(enc.tokenizer.decode(list(ids)))


# --- chat rows


def test_chat_row_is_prompt_with_header_then_answer_up_to_its_end_of_turn() -> None:
    enc = encoder()
    unit = encoded(enc, answered(chat("hello"), chat("the sun", first="assistant")))
    assert text(enc, unit.prompt_ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert text(enc, unit.answers[0].ids) == "the sun<|im_end|>"  # and not the newline that ChatML prints behind it
    assert unit.answers[0].mask == (True,) * len(unit.answers[0].ids)
    assert unit.answers[0].complete
    assert not any(unit.prompt_mask)
    assert unit.answers[0].ids[-1] in enc.end_ids


@pytest.mark.parametrize(
    ("template", "chatml", "answer"),
    [
        (CHATML, True, "the sun<|im_end|>"),
        (BOS, True, "the sun<|im_end|>"),
        (INST, False, " the sun </s>"),
        (NO_END, False, "the sun</s>"),
        (None, True, "the sun<|im_end|>"),
        (None, False, "the sun</s>"),
        (CHATML.replace("<|im_end|>' + '\n'", "</s>' + '\n<|im_end|>'"), True, "the sun</s>"),
    ],
)
def test_answers_end_where_the_template_ends_a_turn(template: str | None, chatml: bool, answer: str) -> None:
    enc = encoder(tokenizer=tiny_tokenizer(template, chatml_tokens=chatml))
    unit = encoded(enc, answered(chat("hello"), chat("the sun", first="assistant")))
    assert text(enc, unit.answers[0].ids) == answer
    assert trained(enc, unit.answers[0]) == answer
    assert unit.answers[0].ids[-1] in enc.end_ids


def test_template_without_end_of_turn_gets_eos_and_a_note() -> None:
    enc = encoder(tokenizer=tiny_tokenizer(NO_END, chatml_tokens=False))
    row = answered(chat("hello"), chat("the sun", first="assistant"))
    assert notes(enc, row)["end_of_turn_added"] == 1
    assert "end_of_turn_added" not in notes(encoder(), row)
    assert enc.end_ids == (enc.tokenizer.eos_token_id,)


def test_both_sides_of_a_pair_share_the_prompt_and_keep_their_order() -> None:
    enc = encoder()
    pair = Preference(
        prompt=chat("hello"), chosen=chat("good", first="assistant"), rejected=chat("bad", first="assistant"),
        margin=0.5, weight=2.0, origin=HERE,
    )  # fmt: skip
    unit = encoded(enc, pair)
    assert [text(enc, a.ids) for a in unit.answers] == ["good<|im_end|>", "bad<|im_end|>"]
    assert unit.prompt_ids == enc.encode_prompt(pair.prompt)
    assert (unit.kind, unit.margin, unit.weight, unit.id, unit.origin) == ("preference", 0.5, 2.0, pair.id, HERE)


def test_pair_with_one_unusable_side_is_unusable() -> None:
    enc = encoder(max_length=40)
    pair = Preference(prompt="hello", chosen="good", rejected="bad " * 50, origin=HERE)
    dropped = enc.encode(pair)
    assert isinstance(dropped, Unusable)
    assert dropped.dropped
    bad(enc, replace(pair, rejected=""), "empty_answer")


def test_every_kind_keeps_its_columns() -> None:
    enc = encoder()
    judged = encoded(enc, Judgement(prompt="a", completion="b", label=False, score=0.25, weight=3.0, origin=HERE))
    assert (judged.kind, judged.label, judged.scores, judged.weight) == ("judgement", False, (0.25,), 3.0)
    ranked = encoded(enc, Ranking(prompt="a", completions=("b", "c", "d"), scores=(1.0, 0.0, 2.0), origin=HERE))
    assert (ranked.kind, len(ranked.answers), ranked.scores) == ("ranking", 3, (1.0, 0.0, 2.0))
    assert encoded(enc, Demonstration(prompt="a", completion="b", origin=HERE)).kind == "demonstration"
    asked = encoded(enc, Prompt(prompt=chat("a"), origin=HERE))
    assert (asked.kind, asked.answers) == ("prompt", ())
    assert asked.prompt_ids == enc.encode_prompt(chat("a"))
    assert enc.encode(Prompt(prompt="a", origin=HERE), "f.jsonl").source == "f.jsonl"


words = st.text(alphabet="ab .\n<|é☃_", min_size=1, max_size=12).map(lambda s: f"x{s}y")


odd_turns = st.lists(words, min_size=1, max_size=5).map(lambda c: c[: len(c) - 1 + len(c) % 2])


@settings(max_examples=60, deadline=None)
@given(odd_turns, odd_turns)
@pytest.mark.parametrize("template", [CHATML, INST, BOS, NO_END])
def test_training_sees_what_sampling_sees(template: str, before: list[str], after: list[str]) -> None:
    enc = encoder(template)
    prompt, completion = chat(*before), chat(*after, first="assistant")
    unit = encoded(enc, answered(prompt, completion))
    answer = unit.answers[0]
    assert unit.prompt_ids == enc.encode_prompt(prompt)
    whole = enc.template.render((*prompt.messages, *completion.messages), ask=False)
    appended = str(enc.tokenizer.eos_token) if template == NO_END else ""
    assert text(enc, unit.prompt_ids + answer.ids) == whole.removesuffix(enc.template.turn_end.after) + appended
    assert len(answer.ids) == len(answer.mask)
    assert answer.mask[0]
    assert answer.mask[-1]
    for said in after[::2]:
        assert said in trained(enc, answer)


def test_prompt_that_renders_differently_alone_is_a_bad_row_that_says_how() -> None:
    enc = encoder(LAST_UNSTRIPPED)
    result = bad(enc, answered(chat("hello "), chat("sun", first="assistant")), "not_a_prefix")
    assert "' <|im_end|>" in result.reason
    assert "'<|im_end|>" in result.reason
    encoded(enc, answered(chat("hello"), chat("sun", first="assistant")))


def test_several_turns_as_completion_train_on_the_assistant_only() -> None:
    enc = encoder(CHATML_TOOLS)
    call = turn("assistant", tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}])
    completion = Chat((call, turn("tool", "42"), turn("assistant", "it is 42")))
    unit = encoded(enc, answered(chat("what?"), completion))
    said = trained(enc, unit.answers[0])
    assert said == '[{"function": {"name": "f", "arguments": {"x": 1}}}]<|im_end|>it is 42<|im_end|>'
    assert "<|im_start|>tool\n42<|im_end|>" in text(enc, unit.answers[0].ids)


def test_tools_reach_the_template() -> None:
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    prompt = replace(chat("hello"), tools=tools)
    row = answered(prompt, chat("sun", first="assistant"))
    enc = encoder(CHATML_TOOLS)
    assert '"look"' in text(enc, encoded(enc, row).prompt_ids)
    assert notes(enc, row) == {}
    assert notes(encoder(CHATML), row) == {"tools_ignored": 1}


def test_demonstrations_can_train_on_every_assistant_turn() -> None:
    prompt = chat("hello", "good day", "sun?", "a star", "moon?")
    row = Demonstration(prompt=prompt, completion=chat("no", first="assistant"), origin=HERE)
    for template in (CHATML, INST, BOS):
        enc = encoder(template, train_on="assistant")
        unit = encoded(enc, row)
        assert unit.prompt_ids == enc.encode_prompt(row.prompt)
        said = trained(enc, Answer(unit.prompt_ids, unit.prompt_mask))
        assert said.replace(" ", "") == "goodday<|im_end|>astar<|im_end|>"
        assert not any(encoded(encoder(template), row).prompt_mask)
    enc = encoder(CHATML, train_on="assistant")
    judged = answered(row.prompt, row.completion)
    assert not any(encoded(enc, judged).prompt_mask)


def test_training_on_turns_that_render_differently_later_is_a_bad_row() -> None:
    enc = encoder(LAST_UNSTRIPPED, train_on="assistant")
    row = Demonstration(prompt=chat("a", "b ", "c"), completion=chat("d", first="assistant"), origin=HERE)
    assert "turn 2" in bad(enc, row, "not_a_prefix").reason
    greeting = Chat((turn("assistant", "welcome"), turn("user", "a")))
    unit = encoded(enc, replace(row, prompt=greeting))  # a greeting answers nothing, and is not trained on
    assert not any(unit.prompt_mask)


# --- the template


def test_fallback_is_chatml_with_an_end_that_is_one_token() -> None:
    prompt = chat("hello", "good day", "sun?")
    own, fallback = encoder(CHATML), encoder(None)
    assert own.template.fallback is None
    assert fallback.encode_prompt(prompt) == own.encode_prompt(prompt)
    other = tiny_tokenizer(None, chatml_tokens=False)
    template = fallback_template(other)
    assert text(encoder(tokenizer=other), encoder(tokenizer=other).encode_prompt(chat("hello"))) == (
        "<|im_start|>user\nhello</s>\n<|im_start|>assistant\n"
    )
    other.chat_template = template  # as an exported tokenizer has it
    assert encoder(tokenizer=other).encode_prompt(prompt) == encoder(
        tokenizer=tiny_tokenizer(None, chatml_tokens=False)
    ).encode_prompt(prompt)
    with pytest.raises(UserError, match="no end-of-sequence token"):
        fallback_template(tiny_tokenizer(None, chatml_tokens=False, eos=False))


@pytest.mark.parametrize("template", [BOS, None])
def test_one_bos_when_both_template_and_tokenizer_have_it(template: str | None) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=True)
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


def test_text_merging_over_the_boundary_is_noted_and_kept_apart() -> None:
    enc = encoder()
    row = answered("capi", "tal of")
    assert len(enc.vocab.ids("capital of")) < len(enc.vocab.ids("capi")) + len(enc.vocab.ids("tal of"))
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
    silent = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="does not print the assistant's answer"):
        ChatTemplate(tiny_tokenizer(silent)).turn_end  # noqa: B018
    bad(encoder(silent), row, "not_printed")
    with pytest.raises(UserError, match="cannot print"):
        ChatTemplate(tiny_tokenizer("{{ raise_exception('never') }}")).turn_end  # noqa: B018


# --- rows that a template cannot take


@pytest.mark.parametrize(
    ("template", "prompt", "completion", "kind"),
    [
        (CHATML, Chat((turn("alien", "hello"),)), chat("sun", first="assistant"), "unknown_role"),
        (INST, Chat((turn("system", "be kind"),)), chat("sun", first="assistant"), "template_refuses"),
        (CHATML, Chat((turn("user"),)), chat("sun", first="assistant"), "template_refuses"),
        (CHATML, Chat(()), chat("sun", first="assistant"), "template_refuses"),
        (CHATML, chat("hello"), chat("", first="assistant"), "empty_answer"),
        (CHATML, chat("hello"), chat(" \n", first="assistant"), "empty_answer"),
        (CHATML, chat("hello"), "", "empty_answer"),
        (CHATML, chat("hello"), chat("sun", "and?", first="assistant"), "not_an_answer"),
        (CHATML, chat("hello"), chat("sun"), "not_an_answer"),
        (CHATML, chat("hello"), Chat((turn("assistant", tool_calls=[{"name": "f"}]),)), "not_printed"),
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
)  # fmt: skip
def test_bad_rows(template: str, prompt: Content, completion: Content, kind: str) -> None:
    bad(encoder(template), answered(prompt, completion), kind)


def test_role_that_the_template_names_is_known() -> None:
    template = CHATML.replace("m['role']", "('critic' if m['role'] == 'critic' else m['role'])")
    row = answered(Chat((turn("critic", "hello"),)), chat("sun", first="assistant"))
    encoded(encoder(template), row)
    bad(encoder(CHATML), row, "unknown_role")


def test_turns_that_the_template_leaves_out_are_a_bad_row() -> None:
    only_two = CHATML.replace("{{ '<|im_start|>'", "{% if m['role'] in ['user', 'assistant'] %}{{ '<|im_start|>'", 1)
    only_two = only_two.replace("{% endfor %}", "{% endif %}{% endfor %}")
    prompt = Chat((turn("system", "be kind"), turn("user", "hello")))
    row = answered(prompt, chat("sun", first="assistant"))
    assert "leaves out turn 1 (system)" in bad(encoder(only_two), row, "not_printed").reason
    upper = CHATML.replace("m['content']", "(m['content'] | upper if m['role'] == 'system' else m['content'])")
    encoded(encoder(upper), row)  # rewritten, and so read


# --- text rows


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_row_has_the_tokenizers_bos_before_and_eos_behind(adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    enc = encoder(tokenizer=tokenizer)
    unit = encoded(enc, answered("hello", " world"))
    assert unit.prompt_ids == tuple(tokenizer("hello")["input_ids"])
    assert unit.prompt_ids == enc.encode_prompt("hello")
    assert (unit.prompt_ids[0] == tokenizer.bos_token_id) is adds_bos
    assert text(enc, unit.answers[0].ids) == " world<|im_end|>"
    assert all(unit.answers[0].mask)
    assert unit.answers[0].ids[-1] == tokenizer.eos_token_id


def test_text_that_has_bos_or_eos_already_gets_no_second() -> None:
    enc = encoder(tokenizer=tiny_tokenizer(adds_bos=True))
    row = answered("<s>hello", "world<|im_end|>")
    unit = encoded(enc, row)
    assert unit.prompt_ids == enc.encode_prompt("hello")
    assert unit.answers[0].ids.count(enc.tokenizer.eos_token_id) == 1
    assert notes(enc, row) == {"bos_in_text": 1, "special_tokens_in_text": 1}


def test_empty_text_prompt_becomes_bos_else_eos_else_a_bad_row() -> None:
    row = answered("", "world")
    tokenizer = tiny_tokenizer(adds_bos=True)
    assert encoded(encoder(tokenizer=tokenizer), row).prompt_ids == (tokenizer.bos_token_id,)
    for bos in (True, False):
        tokenizer = tiny_tokenizer(bos=bos)
        enc = encoder(tokenizer=tokenizer)
        stand_in = tokenizer.bos_token_id if bos else tokenizer.eos_token_id
        assert encoded(enc, row).prompt_ids == enc.encode_prompt("") == (stand_in,)
        assert notes(enc, row) == {"empty_prompt": 1}
    enc = encoder(tokenizer=tiny_tokenizer(bos=False, eos=False))
    bad(enc, row, "empty_prompt")
    with pytest.raises(UserError, match="empty"):
        enc.encode_prompt("")
    with pytest.raises(UserError, match="end-of-sequence"):
        enc.encode(answered("hello", "world"))


def test_as_chat_wraps_text_and_leaves_ids_alone() -> None:
    enc = encoder(as_chat=True)
    as_text = encoded(enc, answered("hello", "world"))
    as_turns = encoded(enc, answered(chat("hello"), chat("world", first="assistant")))
    assert (as_text.prompt_ids, as_text.answers) == (as_turns.prompt_ids, as_turns.answers)
    assert enc.encode_prompt("hello") == as_text.prompt_ids
    assert encoded(enc, answered(Ids((5, 6)), Ids((7,)))).prompt_ids == (5, 6)
    mixed = encoded(encoder(), answered("hello", chat("world", first="assistant")))
    assert (mixed.prompt_ids, mixed.answers) == (as_turns.prompt_ids, as_turns.answers)


def test_ids_are_taken_as_they_are() -> None:
    enc = encoder()
    unit = encoded(enc, answered(Ids((5, 6, 7)), Ids((8, 9))))
    assert unit.prompt_ids == (5, 6, 7)
    assert unit.answers == (Answer((8, 9), (True, True), complete=False),)
    ended = encoded(enc, answered(Ids((5,)), Ids((8, enc.end_ids[0]))))
    assert ended.answers[0].complete


# --- long rows


def long_chat(turns: int = 5) -> Chat:
    contents = ("first " * 6, "answer one", "second " * 6, "answer two", "last")[:turns]
    return Chat((turn("system", "be kind"), *chat(*contents).messages))


def test_drop_leaves_long_rows_out_and_says_so() -> None:
    row = answered("hello", "sun " * 30)
    longest = encoder().encode_all([row]).lengths[0].longest
    encoded(encoder(max_length=longest), row)
    enc = encoder(max_length=longest - 1)
    result = enc.encode_all([row])
    assert (result.units, result.unusable[0].dropped, result.unusable[0].kind) == ((), True, "too_long")
    assert str(longest) in result.unusable[0].reason
    assert result.lengths[0].longest == longest  # known for dropped rows too


def test_cut_completion_takes_the_end_and_adds_no_end_of_turn() -> None:
    row = Preference(prompt=chat("hello"), chosen=chat("sun", first="assistant"),
                     rejected=chat("moon " * 40, first="assistant"), origin=HERE)  # fmt: skip
    whole = encoded(encoder(), row)
    limit = len(whole.prompt_ids) + 10
    enc = encoder(max_length=limit, long_rows="cut_completion")
    unit = encoded(enc, row)
    assert unit.prompt_ids == whole.prompt_ids
    assert unit.answers[0] == whole.answers[0]
    assert unit.answers[1].ids == whole.answers[1].ids[:10]
    assert not unit.answers[1].complete
    assert unit.answers[1].ids[-1] not in enc.end_ids
    assert notes(enc, row) == {"cut_completion": 1}


def test_cut_completion_never_leaves_an_empty_answer() -> None:
    row = answered("sun " * 20, "moon")
    room = len(encoder().encode_prompt(row.prompt))
    assert len(encoded(encoder(max_length=room + 1, long_rows="cut_completion"), row).answers[0].ids) == 1
    result = encoder(max_length=room, long_rows="cut_completion").encode(row)
    assert isinstance(result, Unusable)
    assert result.dropped
    assert "prompt alone" in result.reason


def test_cut_prompt_takes_oldest_turns_and_keeps_system_and_last_user_turn() -> None:
    row = answered(long_chat(), chat("yes", first="assistant"))
    full = encoder().encode_all([row]).lengths[0].longest
    enc = encoder(max_length=full - 1, long_rows="cut_prompt")
    once = text(enc, encoded(enc, row).prompt_ids)
    assert "be kind" in once
    assert "first" not in once
    assert "answer one" not in once  # an answer goes with its question
    assert "second" in once
    shortest = encoder().encode_all([answered(Chat((turn("system", "be kind"), turn("user", "last"))), row.completion)])
    enc = encoder(max_length=shortest.lengths[0].longest, long_rows="cut_prompt")
    twice = encoded(enc, row)
    assert text(enc, twice.prompt_ids) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(enc, twice.answers[0].ids) == "yes<|im_end|>"
    assert twice.answers[0].complete
    result = encoder(max_length=shortest.lengths[0].longest - 1, long_rows="cut_prompt").encode(row)
    assert isinstance(result, Unusable)
    assert result.dropped


def test_cut_prompt_gives_both_sides_of_a_pair_the_same_prompt() -> None:
    yes, no = chat("yes", first="assistant"), chat("no " * 8, first="assistant")
    row = Preference(prompt=long_chat(), chosen=yes, rejected=no, origin=HERE)
    full = encoder().encode_all([row]).lengths[0]
    enc = encoder(max_length=full.longest - 1, long_rows="cut_prompt")
    unit = encoded(enc, row)
    assert len(unit.prompt_ids) < full.prompt
    assert [len(a.ids) for a in unit.answers] == list(full.answers)
    assert unit.tokens == 2 * len(unit.prompt_ids) + sum(full.answers)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_cut_prompt_takes_the_left_of_text_and_keeps_bos(adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    row = answered("one two three four five", " six")
    whole = encoded(encoder(tokenizer=tokenizer), row)
    size = len(whole.prompt_ids) + len(whole.answers[0].ids)
    cut = encoded(encoder(tokenizer=tokenizer, max_length=size - 3, long_rows="cut_prompt"), row)
    head = int(adds_bos)
    assert cut.prompt_ids == whole.prompt_ids[:head] + whole.prompt_ids[head + 3 :]
    assert cut.answers == whole.answers
    room = len(whole.answers[0].ids) + head
    assert isinstance(encoder(tokenizer=tokenizer, max_length=room, long_rows="cut_prompt").encode(row), Unusable)


def test_cut_prompt_treats_wrapped_text_as_a_chat() -> None:
    row = answered("sun " * 30, "moon")
    enc = encoder(max_length=30, long_rows="cut_prompt", as_chat=True)
    result = enc.encode(row)  # one user turn, which is never cut
    assert isinstance(result, Unusable)
    assert result.dropped


def test_all_rows_in_order_with_their_sources() -> None:
    enc = encoder(max_length=20)
    rows = [
        replace(answered("hello", c), origin=Origin("f", i))
        for i, c in enumerate(["one", "", "two " * 20, "three<pad>"], start=1)
    ]
    result = enc.encode_all(rows, ["f", "f", "g", "g"])
    assert [u.origin.line for u in result.units] == [1, 4]
    assert [u.source for u in result.units] == ["f", "g"]
    unusable = [(u.origin.line, u.kind, u.source) for u in result.unusable]
    assert unusable == [(2, "empty_answer", "f"), (3, "too_long", "g")]
    assert result.notes == {"special_tokens_in_text": (Origin("f", 4),)}
    assert result == enc.encode_all(rows, ["f", "f", "g", "g"])


def test_training_on_every_turn_of_text_is_noted() -> None:
    text_row = Demonstration(prompt="sun?", completion="a star", origin=HERE)
    chat_row = Demonstration(prompt=chat("sun?"), completion=chat("a star", first="assistant"), origin=HERE)
    enc = encoder(train_on="assistant")
    assert notes(enc, text_row, chat_row) == {"text_has_no_turns": 1}
    assert notes(enc, answered("sun?", "a star")) == {}
    assert notes(encoder(), text_row) == {}
