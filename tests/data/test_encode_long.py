"""Rows that are too long: dropped, or truncated at the prompt or the completion, with a note."""

from __future__ import annotations

import pytest

from tests.data.encoding import HERE, answered, chat, encoded, encoder, notes, text, turn
from tests.tiny import tiny_tokenizer
from valence.data.encode import Unusable
from valence.types import Chat, Preference


def long_chat(turns: int = 5) -> Chat:
    contents = ("first " * 6, "answer one", "second " * 6, "answer two", "last")[:turns]
    return Chat((turn("system", "be kind"), *chat(*contents).messages))


def test_drop_omits_long_rows_with_a_note() -> None:
    row = answered("hello", "sun " * 30)
    longest = encoder().encode_all([row]).lengths[0].longest
    encoded(encoder(max_length=longest), row)
    enc = encoder(max_length=longest - 1)
    result = enc.encode_all([row])
    assert (result.units, result.unusable[0].dropped, result.unusable[0].kind) == (
        (),
        True,
        "too_long",
    )
    assert str(longest) in result.unusable[0].reason
    assert result.lengths[0].longest == longest  # known for dropped rows too


def test_cut_completion_takes_the_end_and_adds_no_end_of_turn() -> None:
    row = Preference(prompt=chat("hello"), chosen=chat("sun", first="assistant"),
                     rejected=chat("moon " * 40, first="assistant"), origin=HERE)  # fmt: skip
    full = encoded(encoder(), row)
    limit = len(full.prompt_ids) + 10
    enc = encoder(max_length=limit, long_rows="cut_completion")
    unit = encoded(enc, row)
    assert unit.prompt_ids == full.prompt_ids
    assert unit.answers[0] == full.answers[0]
    assert unit.answers[1].ids == full.answers[1].ids[:10]
    assert not unit.answers[1].complete
    assert unit.answers[1].ids[-1] not in enc.end_ids
    assert notes(enc, row) == {"cut_completion": 1}


def test_cut_completion_never_leaves_an_empty_answer() -> None:
    row = answered("sun " * 20, "moon")
    room = len(encoder().encode_prompt(row.prompt))
    assert (
        len(encoded(encoder(max_length=room + 1, long_rows="cut_completion"), row).answers[0].ids)
        == 1
    )
    result = encoder(max_length=room, long_rows="cut_completion").encode(row)
    assert isinstance(result, Unusable)
    assert result.dropped
    assert result.kind == "too_long"


def test_cut_prompt_takes_oldest_turns_and_keeps_system_and_last_user_turn() -> None:
    row = answered(long_chat(), chat("yes", first="assistant"))
    full = encoder().encode_all([row]).lengths[0].longest
    enc = encoder(max_length=full - 1, long_rows="cut_prompt")
    once = text(enc, encoded(enc, row).prompt_ids)
    assert "be kind" in once
    assert "first" not in once
    assert "answer one" not in once  # an answer goes with its question
    assert "second" in once
    shortest = encoder().encode_all(
        [answered(Chat((turn("system", "be kind"), turn("user", "last"))), row.completion)]
    )
    enc = encoder(max_length=shortest.lengths[0].longest, long_rows="cut_prompt")
    twice = encoded(enc, row)
    assert text(enc, twice.prompt_ids) == (
        "<|im_start|>system\nbe "
        "kind<|im_end|>\n<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n"
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
    full = encoded(encoder(tokenizer=tokenizer, as_chat=False), row)
    size = len(full.prompt_ids) + len(full.answers[0].ids)
    cut = encoded(
        encoder(tokenizer=tokenizer, max_length=size - 3, long_rows="cut_prompt", as_chat=False),
        row,
    )
    head = int(adds_bos)
    assert cut.prompt_ids == full.prompt_ids[:head] + full.prompt_ids[head + 3 :]
    assert cut.answers == full.answers
    room = len(full.answers[0].ids) + head
    assert isinstance(
        encoder(tokenizer=tokenizer, max_length=room, long_rows="cut_prompt").encode(row), Unusable
    )


def test_cut_prompt_treats_wrapped_text_as_a_chat() -> None:
    row = answered("sun " * 30, "moon")
    enc = encoder(max_length=30, long_rows="cut_prompt", as_chat=True)
    result = enc.encode(row)  # one user turn, which is never cut
    assert isinstance(result, Unusable)
    assert result.dropped
