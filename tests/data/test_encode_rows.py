"""Rows of chat, text and token ids as tokens: prefixes, masks, ends of turns, columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.encoding import (
    HERE,
    answered,
    bad,
    chat,
    encoded,
    encoder,
    notes,
    text,
    trained,
    turn,
)
from tests.errors import raises_error
from tests.tiny import BOS, CHATML, CHATML_TOOLS, INST, LAST_UNSTRIPPED, NO_END, tiny_tokenizer
from valence.data.encoded_set import Unusable
from valence.types import (
    Chat,
    Demonstration,
    Ids,
    Judgement,
    Origin,
    Preference,
    Prompt,
    Ranking,
    Sampled,
    TokenizedCompletion,
)

# --- chat rows


def test_chat_row_is_prompt_with_header_then_answer_up_to_its_end_of_turn() -> None:
    enc = encoder()
    unit = encoded(enc, answered(chat("hello"), chat("the sun", first="assistant")))
    assert (
        text(enc, unit.prompt_ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    # and not the newline that ChatML prints behind it
    assert text(enc, unit.answers[0].ids) == "the sun<|im_end|>"
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
        (CHATML.replace("<|im_end|>' + '\n'", "</s>' + '\n<|im_end|>'"), True, "the sun</s>"),
    ],
)
def test_answers_end_where_the_template_ends_a_turn(
    template: str | None, chatml: bool, answer: str
) -> None:
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
        prompt=chat("hello"),
        chosen=chat("good", first="assistant"),
        rejected=chat("bad", first="assistant"),
        margin=0.5,
        weight=2.0,
        origin=HERE,
    )
    unit = encoded(enc, pair)
    assert [text(enc, a.ids) for a in unit.answers] == ["good<|im_end|>", "bad<|im_end|>"]
    assert unit.prompt_ids == enc.encode_prompt(pair.prompt)
    assert (unit.kind, unit.margin, unit.weight, unit.id, unit.origin) == (
        "preference",
        0.5,
        2.0,
        pair.id,
        HERE,
    )


def test_pair_with_one_unusable_side_is_unusable() -> None:
    enc = encoder(max_length=40)
    pair = Preference(prompt="hello", chosen="good", rejected="bad " * 50, origin=HERE)
    dropped = enc.encode(pair)
    assert isinstance(dropped, Unusable)
    assert dropped.dropped
    bad(enc, replace(pair, rejected=""), "empty_answer")


def test_every_kind_keeps_its_columns() -> None:
    enc = encoder()
    judged = encoded(
        enc, Judgement(prompt="a", completion="b", label=False, score=0.25, weight=3.0, origin=HERE)
    )
    assert (judged.kind, judged.label, judged.scores, judged.weight) == (
        "judgement",
        False,
        (0.25,),
        3.0,
    )
    ranked = encoded(
        enc, Ranking(prompt="a", completions=("b", "c", "d"), scores=(1.0, 0.0, 2.0), origin=HERE)
    )
    assert (ranked.kind, len(ranked.answers), ranked.scores) == ("ranking", 3, (1.0, 0.0, 2.0))
    assert (
        encoded(enc, Demonstration(prompt="a", completion="b", origin=HERE)).kind == "demonstration"
    )
    request = encoded(enc, Prompt(prompt=chat("a"), origin=HERE))
    assert (request.kind, request.answers) == ("prompt", ())
    assert request.prompt_ids == enc.encode_prompt(chat("a"))
    assert enc.encode(Prompt(prompt="a", origin=HERE), "f.jsonl").source == "f.jsonl"


words = st.text(alphabet="ab .\n<|é☃_", min_size=1, max_size=12).map(lambda s: f"x{s}y")


odd_turns = st.lists(words, min_size=1, max_size=5).map(lambda c: c[: len(c) - 1 + len(c) % 2])


@settings(max_examples=60, deadline=None)
@given(odd_turns, odd_turns)
@pytest.mark.parametrize("template", [CHATML, INST, BOS, NO_END])
def test_training_and_sampling_encode_the_same_tokens(
    template: str, before: list[str], after: list[str]
) -> None:
    enc = encoder(template)
    prompt, completion = chat(*before), chat(*after, first="assistant")
    unit = encoded(enc, answered(prompt, completion))
    answer = unit.answers[0]
    assert unit.prompt_ids == enc.encode_prompt(prompt)
    full = enc.template.render((*prompt.messages, *completion.messages), ask=False)
    appended = str(enc.tokenizer.eos_token) if template == NO_END else ""
    assert (
        text(enc, unit.prompt_ids + answer.ids)
        == full.removesuffix(enc.template.turn_end.after) + appended
    )
    assert len(answer.ids) == len(answer.mask)
    assert answer.mask[0]
    assert answer.mask[-1]
    for message in after[::2]:
        assert message in trained(enc, answer)


def test_prompt_that_renders_differently_once_answered_is_trained_on_as_it_is_sampled() -> None:
    enc = encoder(LAST_UNSTRIPPED)
    row = answered(chat("hello "), chat("sun", first="assistant"))
    unit = encoded(enc, row)
    assert unit.prompt_ids == enc.encode_prompt(chat("hello "))
    assert (
        text(enc, unit.prompt_ids) == "<|im_start|>user\nhello <|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained(enc, unit.answers[0]) == text(enc, unit.answers[0].ids) == "sun<|im_end|>"
    assert notes(enc, row) == {"rewritten_prompt": 1}
    assert notes(enc, answered(chat("hello"), chat("sun", first="assistant"))) == {}


def test_turns_after_a_prompt_that_renders_differently_are_a_bad_row() -> None:
    enc = encoder(LAST_UNSTRIPPED)
    result = bad(
        enc,
        answered(chat("hello "), chat("sun", "and?", "moon", first="assistant")),
        "not_a_prefix",
    )
    assert "' <|im_end|>" in result.reason
    assert "'<|im_end|>" in result.reason


def test_several_turns_as_completion_train_on_the_assistant_only() -> None:
    enc = encoder(CHATML_TOOLS)
    call = turn("assistant", tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}])
    completion = Chat((call, turn("tool", "42"), turn("assistant", "it is 42")))
    unit = encoded(enc, answered(chat("what?"), completion))
    message = trained(enc, unit.answers[0])
    assert (
        message
        == '[{"function": {"name": "f", "arguments": {"x": 1}}}]<|im_end|>it is 42<|im_end|>'
    )
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
        message = trained(enc, TokenizedCompletion(unit.prompt_ids, unit.prompt_mask))
        assert message.replace(" ", "") == "goodday<|im_end|>astar<|im_end|>"
        assert not any(encoded(encoder(template), row).prompt_mask)
    enc = encoder(CHATML, train_on="assistant")
    judged = answered(row.prompt, row.completion)
    assert not any(encoded(enc, judged).prompt_mask)


def test_turns_that_render_differently_later_are_trained_on_one_by_one() -> None:
    enc = encoder(LAST_UNSTRIPPED, train_on="assistant")
    row = Demonstration(
        prompt=chat("a", "b ", "c"), completion=chat("d", first="assistant"), origin=HERE
    )
    assert "turn 2" in bad(enc, row, "not_a_prefix").reason  # as one example
    result = enc.encode_all([row])
    assert [trained(enc, unit.answers[0]) for unit in result.units] == [
        "b <|im_end|>",
        "d<|im_end|>",
    ]
    assert result.notes == {"split_turns": (HERE,)}
    assert [turn.id for turn in result.turn_examples] == [unit.id for unit in result.units]
    tokens = {
        name: Ids((5,), Sampled((), vocabulary="unknown"), getattr(row, name))
        for name in ("prompt", "completion")
    }
    again = enc.encode_all([replace(row, **tokens)])
    assert [unit.answers for unit in again.units] == [unit.answers for unit in result.units]
    greeting = Chat((turn("assistant", "welcome"), turn("user", "a")))
    # a greeting answers nothing, and is not trained on
    unit = encoded(enc, replace(row, prompt=greeting))
    assert not any(unit.prompt_mask)


# --- text rows


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_row_has_the_tokenizers_bos_before_and_eos_behind(adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    enc = encoder(tokenizer=tokenizer, as_chat=False)
    unit = encoded(enc, answered("hello", " world"))
    assert unit.prompt_ids == tuple(tokenizer("hello")["input_ids"])
    assert unit.prompt_ids == enc.encode_prompt("hello")
    assert (unit.prompt_ids[0] == tokenizer.bos_token_id) is adds_bos
    assert text(enc, unit.answers[0].ids) == " world<|im_end|>"
    assert all(unit.answers[0].mask)
    assert unit.answers[0].ids[-1] == tokenizer.eos_token_id


def test_text_that_has_bos_or_eos_already_gets_no_second() -> None:
    enc = encoder(tokenizer=tiny_tokenizer(adds_bos=True), as_chat=False)
    row = answered("<s>hello", "world<|im_end|>")
    unit = encoded(enc, row)
    assert unit.prompt_ids == enc.encode_prompt("hello")
    assert unit.answers[0].ids.count(enc.tokenizer.eos_token_id) == 1
    assert notes(enc, row) == {"bos_in_text": 1, "special_tokens_in_text": 1}


def test_empty_text_prompt_becomes_bos_else_eos_else_a_bad_row() -> None:
    row = answered("", "world")
    tokenizer = tiny_tokenizer(adds_bos=True)
    assert encoded(encoder(tokenizer=tokenizer, as_chat=False), row).prompt_ids == (
        tokenizer.bos_token_id,
    )
    for bos in (True, False):
        tokenizer = tiny_tokenizer(bos=bos)
        enc = encoder(tokenizer=tokenizer, as_chat=False)
        stand_in = tokenizer.bos_token_id if bos else tokenizer.eos_token_id
        assert encoded(enc, row).prompt_ids == enc.encode_prompt("") == (stand_in,)
        assert notes(enc, row) == {"empty_prompt": 1}
    enc = encoder(tokenizer=tiny_tokenizer(bos=False, eos=False), as_chat=False)
    bad(enc, row, "empty_prompt")
    with raises_error("row-empty-prompt"):
        enc.encode_prompt("")
    with raises_error("end-token-missing", fix="model.tokenizer"):
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


def test_token_ids_are_used_unchanged() -> None:
    enc = encoder()
    unit = encoded(enc, answered(Ids((5, 6, 7)), Ids((8, 9))))
    assert unit.prompt_ids == (5, 6, 7)
    assert unit.answers == (TokenizedCompletion((8, 9), (True, True), complete=False),)
    ended = encoded(enc, answered(Ids((5,)), Ids((8, enc.end_ids[0]))))
    assert ended.answers[0].complete


def test_training_on_every_turn_of_text_is_noted() -> None:
    text_row = Demonstration(prompt="sun?", completion="a star", origin=HERE)
    chat_row = Demonstration(
        prompt=chat("sun?"), completion=chat("a star", first="assistant"), origin=HERE
    )
    enc = encoder(train_on="assistant", as_chat=False)
    assert notes(enc, text_row, chat_row) == {"text_has_no_turns": 1}
    assert notes(enc, answered("sun?", "a star")) == {}
    assert notes(encoder(), text_row) == {}


# --- all rows


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
