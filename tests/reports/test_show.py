"""The display of a row: the row, the example, the tokens."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from tests.tiny import tiny_tokenizer
from valence.reports.show import PROMPT, TRAINED, pieces, show_encoded, show_example, show_row
from valence.types import (
    Chat,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Preference,
    Prompt,
    Ranking,
    TokenizedCompletion,
    TokenizedExample,
    content_id,
)
from valence.types import Origin as At

AT = At("rows.jsonl", 3)
TOKENIZER = tiny_tokenizer()
HOSTILE = "[bold red]x[/bold red] \x1b[31m \x07 \x9b \u202e \u200b \ud800 [/nothing]"


def shown(kind: RenderableType, *, colour: bool = False) -> str:
    out = StringIO()
    Console(
        file=out, width=300, force_terminal=colour, color_system="standard" if colour else None
    ).print(kind)
    return out.getvalue()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def encoded(
    *answers: TokenizedCompletion,
    prompt: str = "<|im_start|>user\nhello<|im_end|>\n",
    **rest: object,
) -> TokenizedExample:
    ids = ids_of(prompt)
    fields: dict[str, object] = {"kind": "judgement", "prompt_mask": (False,) * len(ids), **rest}
    return TokenizedExample(id="0123", origin=AT, prompt_ids=ids, answers=answers, **fields)  # type: ignore[arg-type]


def answer(text: str, trained: int | None = None) -> TokenizedCompletion:
    ids = ids_of(text)
    count = len(ids) if trained is None else trained
    return TokenizedCompletion(ids, tuple(i < count for i in range(len(ids))))


# Rows and examples


def test_a_row_shows_columns_types_and_values():
    text = shown(
        show_row({"prompt": "hello", "label": True, "score": None, "turns": [{"role": "user"}]}, AT)
    )
    assert "rows.jsonl:3" in text
    for line in (
        ["prompt", "str", "hello"],
        ["label", "bool", "true"],
        ["score", "NoneType", "null"],
    ):
        assert any(all(word in printed for word in line) for printed in text.splitlines())
    assert '"role": "user"' in text


CHAT = Chat(
    ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi", "name": "Ann"}),
    tools=({"type": "f"},),
)
EXAMPLES: list[tuple[Example, list[str]]] = [
    (
        Judgement(prompt="Why?", completion="Because.", label=False, origin=AT),
        ["rated answer", "Why?", "Because.", "label=False"],
    ),
    (
        Preference(prompt=CHAT, chosen="yes", rejected=Ids((7, 8)), margin=2.0, origin=AT),
        [
            "preference",
            "system",
            "be kind",
            '"name": "Ann"',
            '{"type": "f"}',
            "yes",
            "7 8",
            "margin=2.0",
        ],
    ),
    (
        Demonstration(
            prompt="a", completion=Chat(({"role": "assistant", "content": None},)), origin=AT
        ),
        ["demonstration", "assistant", "null"],
    ),
    (
        Ranking(prompt="a", completions=("b", "c"), scores=(1.0, 0.5), origin=AT),
        ["completion 1", "scores=(1.0, 0.5)"],
    ),
    (Prompt(prompt="a", info={"answer": 4}, origin=AT), ["prompt", "info={'answer': 4}"]),
]


@pytest.mark.parametrize(("example", "words"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_examples_show_every_part(example: Example, words: list[str]):
    text = shown(show_example(example))
    assert [word for word in [*words, "rows.jsonl:3", f"id={example.id}"] if word not in text] == []


def test_unknown_values_are_not_shown():
    assert "score" not in shown(show_example(EXAMPLES[0][0]))


def assert_tame(text: str) -> None:
    assert "[bold red]x[/bold red]" in text
    assert "[/nothing]" in text
    assert "<U+202E>" in text
    assert "<U+200B>" in text
    assert not set("\x1b\x07\x9b\u202e\u200b\ud800") & set(text)
    text.encode()


@pytest.mark.parametrize(
    "kind",
    [
        show_row({HOSTILE: HOSTILE}, At(HOSTILE, 1)),
        show_row({"a": [{HOSTILE: HOSTILE}]}),
        show_example(
            Judgement(prompt=HOSTILE, completion=HOSTILE, label=True, origin=At(HOSTILE, 1))
        ),
        show_example(
            Prompt(prompt=Chat(({"role": HOSTILE, "content": HOSTILE, "x": HOSTILE},)), origin=AT)
        ),
    ],
)
def test_data_cannot_steer_the_terminal(kind: RenderableType):
    assert_tame(shown(kind))


# Tokens


def test_tokens_show_blanks_line_ends_special_tokens_and_ids():
    unit = encoded(answer("hello,\tworld<|im_end|>"), label=True)
    text = shown(show_encoded(unit, TOKENIZER))
    assert "<|im_start|>user⏎" in text
    assert "hello,→world<|im_end|>" in text
    assert "hello·world" in shown(show_encoded(encoded(answer("hello world")), TOKENIZER))
    assert " ".join(map(str, unit.prompt_ids)) in text
    assert " ".join(map(str, unit.answers[0].ids)) in text
    assert "label=True" in text
    assert "rows.jsonl:3" in text


def test_counts_of_tokens_and_of_trained_tokens():
    unit = encoded(answer("hello world", trained=1))
    text = shown(show_encoded(unit, TOKENIZER))
    assert re.search(rf"rated answer\D+{unit.tokens}\b", text)
    assert re.search(rf"prompt: {len(unit.prompt_ids)}\b\D+\b0\b", text)
    assert re.search(rf"answer: {len(unit.answers[0].ids)}\b\D+\b1\b", text)


def test_both_sides_of_a_pair():
    def pair(*, complete: bool) -> str:
        cut = TokenizedCompletion(ids_of("no"), (True,) * len(ids_of("no")), complete=complete)
        return shown(
            show_encoded(encoded(answer("yes"), cut, kind="preference", margin=1.5), TOKENIZER)
        )

    text = pair(complete=False)
    assert text.index("chosen: ") < text.index("rejected: ")
    assert "margin=1.5" in text
    pairs = zip(text.splitlines(), pair(complete=True).splitlines(), strict=True)
    [(one, other)] = [both for both in pairs if both[0] != both[1]]
    assert one.startswith(other.rstrip(" -\n"))  # and that it was cut off
    assert one.startswith("rejected: ")


def test_a_prompt_has_no_answer_and_a_ranking_has_several():
    assert "answer:" not in shown(show_encoded(encoded(kind="prompt"), TOKENIZER))
    assert "answer 2: " in shown(
        show_encoded(encoded(*[answer("a")] * 3, kind="ranking"), TOKENIZER)
    )


def test_colours_mark_trained_tokens():
    unit = encoded(answer("A" + "B", trained=1), prompt="C")
    unit_text = shown(show_encoded(unit, TOKENIZER), colour=True)
    codes = {"C": "\x1b[2m", "A": "\x1b[32m", "B": "\x1b[4;33m"}
    assert (PROMPT, TRAINED) == ("dim", "green")
    assert [
        letter for letter, code in codes.items() if f"{code}{letter}\x1b[0m" not in unit_text
    ] == []


def test_trained_turns_inside_the_prompt_are_coloured():
    ids = ids_of("AB")
    unit = encoded(
        prompt="AB", prompt_mask=(False,) * (len(ids) - 1) + (True,), kind="demonstration"
    )
    assert "\x1b[4;32mB\x1b[0m" in shown(show_encoded(unit, TOKENIZER), colour=True)


@pytest.mark.parametrize("text", ["漢字 🙂 wörld", "a", "", "🙂🙂", "\ufffd!", "日本語のテキスト"])
def test_pieces_are_whole_characters_and_add_up(text: str):
    parts = list(pieces(answer(text), TOKENIZER))
    assert "".join(words for _, words in parts) == text
    assert all("\ufffd" not in words for _, words in parts) or "\ufffd" in text
    assert [i for piece, _ in parts for i in range(piece.start, piece.stop)] == list(
        range(len(ids_of(text)))
    )


def test_pieces_break_where_training_starts():
    ids = ids_of("漢")
    parts = list(pieces(TokenizedCompletion(ids, (False,) + (True,) * (len(ids) - 1)), TOKENIZER))
    assert parts[0][0] == slice(0, 1)


def test_an_unfinished_character_and_an_unknown_id_still_show():
    assert "\ufffd" in shown(
        show_encoded(encoded(TokenizedCompletion(ids_of("漢")[:2], (True, True))), TOKENIZER)
    )
    assert "<id 99999>" in shown(
        show_encoded(encoded(TokenizedCompletion((99999,), (True,))), TOKENIZER)
    )


def test_tokens_cannot_steer_the_terminal():
    text = shown(
        show_encoded(encoded(answer(HOSTILE.replace("\ud800", "")), source=HOSTILE), TOKENIZER)
    )
    assert "[bold·red]x[/bold·red]" in text
    assert not set("\x1b\x07\x9b\u202e\u200b\ud800") & set(text)


def test_nothing_is_changed():
    row = {"a": [{"b": 1}]}
    before = content_id(row)
    show_row(row)
    assert content_id(row) == before
