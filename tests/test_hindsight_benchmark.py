"""The rows and measurements of the hindsight benchmark."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.hindsight.closing_question import closing_question_of
from benchmarks.hindsight.marked_spans import MarkedAnswer, marked_answers


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Every word with the space before it is a token, and so is every other character."""
    inner = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


def test_each_span_is_one_part_of_its_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    answers = marked_answers()
    assert len({answer.question for answer in answers}) == len(answers) == 20
    for answer in answers:
        assert answer.answer.count(answer.span) == 1, answer
        assert set(answer.marks(tokenizer)) == {False, True}, answer


@pytest.mark.parametrize(
    ("span", "marks"),
    [
        ("1970", [False, False, True, False]),  # its token starts with the space before it
        ("1970.", [False, False, True, True]),
        ("In", [True, False, False, False]),
    ],
)
def test_tokens_that_share_a_character_with_the_span_are_marked(
    tokenizer: PreTrainedTokenizerFast, span: str, marks: list[bool]
) -> None:
    answer = MarkedAnswer("", "", "In July 1970.", span, "")
    assert answer.marks(tokenizer) == marks


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is blue. Do you like it?", "Do you like it?"),
        ('You asked: "Do you like it?"\n', "Do you like it?"),
        ("- Blue\n- Why?", "- Why?"),
        ("Do you like it? It is blue.", None),
        ("", None),
    ],
)
def test_a_closing_question_is_the_last_sentence(answer: str, expected: str | None) -> None:
    assert closing_question_of(answer) == expected
