"""An assistant turn with weight 0, as OpenAI's rows have it, is context: it is not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.encoding import encoded, encoder, text, trained
from tests.data.rows import load_rows
from valence.data.encode import Encoder
from valence.types import TokenizedCompletion, TokenizedExample


def turns(*weights: int | None) -> list[dict[str, Any]]:
    """An exchange of each weight, whose answers are `sun 0`, `sun 1`, ..."""
    return [
        turn
        for i, weight in enumerate(weights)
        for turn in (
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": f"sun {i}"}
            | ({} if weight is None else {"weight": weight}),
        )
    ]


def unit_of(enc: Encoder, folder: Path, *weights: int | None) -> TokenizedExample:
    [example] = load_rows(folder, "demonstration", {"messages": turns(*weights)}).examples
    return encoded(enc, example)


def trained_text(enc: Encoder, unit: TokenizedExample) -> str:
    """The trained text of the prompt and the answer."""
    [answer] = unit.answers
    return trained(enc, TokenizedCompletion(unit.prompt_ids, unit.prompt_mask)) + trained(
        enc, answer
    )


@pytest.mark.parametrize(("weights", "numbers"), [
    ((1, 1, 1), [0, 1, 2]),
    ((None, None, None), [0, 1, 2]),
    ((0, 1, 1), [1, 2]),
    ((1, 0, None), [0, 2]),
    ((0, 0, 1), [2]),
    ((1, 1, 0), [0, 1]),
    ((0, 1, 0), [1]),
    ((1, 0, 0), [0]),
])  # fmt: skip
def test_only_turns_with_weight_are_in_the_mask(
    weights: tuple[int, ...], numbers: list[int], tmp_path: Path
) -> None:
    enc = encoder(train_on="assistant")
    unit = unit_of(enc, tmp_path, *weights)
    assert trained_text(enc, unit) == "".join(f"sun {n}<|im_end|>" for n in numbers)
    full = text(enc, unit.prompt_ids + unit.answers[0].ids)
    assert [f"sun {n}" in full for n in range(len(weights))] == [
        n <= numbers[-1] for n in range(len(weights))
    ]


def test_by_default_the_last_turn_with_weight_is_the_answer(tmp_path: Path) -> None:
    enc = encoder()
    assert trained_text(enc, unit_of(enc, tmp_path, 1, 1, 1)) == "sun 2<|im_end|>"
    assert trained_text(enc, unit_of(enc, tmp_path, 1, 1, 0)) == "sun 1<|im_end|>"


def test_a_turn_without_weight_inside_an_answer(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "moon", "weight": 0}
    row = {
        "prompt": [{"role": "user", "content": "hello"}],
        "completion": [
            call,
            {"role": "tool", "content": "earth"},
            {"role": "assistant", "content": "sun"},
        ],
        "label": True,
    }
    [example] = load_rows(tmp_path, "judgement", row).examples
    enc = encoder()
    [answer] = encoded(enc, example).answers
    assert trained(enc, answer) == "sun<|im_end|>"
    assert "moon" in text(enc, answer.ids)


def test_the_weights_of_turns_tell_rows_apart(tmp_path: Path) -> None:
    rows = [{"messages": turns(*weights)} for weights in ((1, 1), (None, 1), (0, 1))]
    plain, same, other = load_rows(tmp_path, "demonstration", *rows).examples
    assert plain.id == same.id != other.id
