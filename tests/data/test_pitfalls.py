"""Mistakes of other systems with data that no other test of this folder covers (see
dev/pitfalls.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import load_rows
from tests.tiny import CHATML, tiny_tokenizer
from valence.batching.micro_batches import make_micro_batch
from valence.data.audit import audit
from valence.data.encode import Encoder
from valence.data.sampler import Sampler
from valence.types import TokenizedExample

PAIRS = [
    {
        "prompt": f"question {i}",
        "chosen": f"good answer {i}",
        "rejected": f"a bad answer {i}",
        "margin": 0.0,
    }
    for i in range(200)
]


def encoded(
    folder: Path, kind: str, rows: list[dict[str, Any]], convert: str | None = None
) -> tuple[TokenizedExample, ...]:
    loaded = load_rows(folder, kind, *rows, convert=convert)
    return (
        Encoder(tiny_tokenizer(CHATML), max_length=256)
        .encode_all(loaded.examples, loaded.sources)
        .units
    )


def test_pairs_that_became_judgements_are_mixed_in_every_step(tmp_path: Path) -> None:
    """Not a block of chosen and then a block of rejected answers."""
    rows = encoded(tmp_path, "judgement", PAIRS, convert="pairs_to_judgements")
    sampler = Sampler(rows, 16)
    labels = [
        [sampler.units[i].label for i in sampler.step(k)[0]] for k in range(sampler.steps_per_epoch)
    ]
    assert [len(step) for step in labels] == [16] * 25
    assert all(set(step) == {True, False} for step in labels)


@pytest.mark.parametrize("word", ["false", "False", "no", "", "rejected", "0"])
def test_no_word_is_a_thumbs_up_because_it_is_not_empty(word: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "label": word},
        {"prompt": "c", "completion": "d", "label": True},
    ]
    loaded = load_rows(tmp_path, "judgement", *rows, on_bad_row="skip")
    assert [e.label for e in loaded.examples if e.prompt == "a"] in ([False], [])  # type: ignore[union-attr]
    assert len(loaded.examples) + len(loaded.bad) == 2


def test_end_of_sequence_in_the_context_is_seen(tmp_path: Path) -> None:
    """The end-of-turn token of earlier turns stays a token like any other: there is no padding, and
    no mask made of ids.
    """
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello!"},
        {"role": "user", "content": "moon"},
    ]
    (unit,) = encoded(
        tmp_path, "judgement", [{"prompt": turns, "completion": "star", "label": True}]
    )
    end = tiny_tokenizer(CHATML).eos_token_id
    assert unit.prompt_ids.count(end) == 3
    batch = make_micro_batch([unit])
    assert tuple(batch.tokens.tolist()) == unit.prompt_ids + unit.answers[0].ids
    assert batch.loss_mask.tolist() == [False] * len(unit.prompt_ids) + [True] * len(
        unit.answers[0].ids
    )
    assert batch.tokens[-1] == end
    assert batch.loss_mask[-1]


@pytest.mark.parametrize("long_rows", ["drop", "cut_completion", "cut_prompt"])
def test_no_stub_of_a_long_row_is_left_and_none_vanishes_uncounted(
    long_rows: str, tmp_path: Path
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": " ".join(["moon"] * i)}],
            "completion": " ".join(["sun"] * j),
            "label": True,
        }
        for i in (1, 30, 90)
        for j in (1, 30, 90)
    ]
    loaded = load_rows(tmp_path, "judgement", *rows)
    encoder = Encoder(tiny_tokenizer(CHATML), max_length=60, long_rows=long_rows)  # type: ignore[arg-type]
    result = encoder.encode_all(loaded.examples, loaded.sources)
    assert len(result.units) + len(result.unusable) == len(rows)
    (file,) = audit(loaded, result, encoder).files
    assert sum(file.classes.values()) + file.too_long == len(rows)
    assert file.too_long > 0
    full = {
        u.id: u
        for u in Encoder(tiny_tokenizer(CHATML), max_length=10_000)
        .encode_all(loaded.examples)
        .units
    }
    for unit in result.units:
        (answer,) = unit.answers
        assert answer.ids
        assert any(answer.mask)
        (before,) = full[unit.id].answers
        if long_rows != "cut_completion":
            assert answer == before
        if long_rows == "drop":
            assert unit.prompt_ids == full[unit.id].prompt_ids
        if answer.ids != before.ids:
            assert not answer.complete
            assert answer.ids == before.ids[: len(answer.ids)]
            assert answer.ids[-1] != tiny_tokenizer(CHATML).eos_token_id
