"""A column named rating contains thumbs or scores. All its values decide which, and the audit
reports it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import Source, load_rows, write
from tests.errors import raises_error
from tests.tiny import CHATML, tiny_tokenizer
from valence.data.audit import audit
from valence.data.audit_text import render
from valence.data.encode import Encoder
from valence.data.load import InMemory, Loaded, load, stream
from valence.data.sources import DELIMITERS
from valence.types import Demonstration, Judgement, Preference

TURNS = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi!"}]


def rated(*ratings: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"messages": TURNS, "rating": rating, **more} for rating in ratings]


def labels(loaded: Loaded) -> list[bool | None]:
    return [e.label for e in loaded.examples if isinstance(e, Judgement)]


def scores(loaded: Loaded) -> list[float | None]:
    return [e.score for e in loaded.examples if isinstance(e, Judgement)]


@pytest.mark.parametrize(("ratings", "expected"), [
    ([1, -1, 1], [True, False, True]),
    ([-1, -1], [False, False]),
    ([1, 0], [True, False]),
    (["1", "-1"], [True, False]),
    ([1.0, 0.0], [True, False]),
    (["thumbsUp", "thumbsDown"], [True, False]),
    ([True, False], [True, False]),
    (["good", 1, "0"], [True, True, False]),
    (["positive"], [True]),
])  # fmt: skip
def test_thumbs(ratings: list[Any], expected: list[bool], tmp_path: Path) -> None:
    loaded = load_rows(tmp_path, "judgement", *rated(*ratings))
    assert labels(loaded) == expected
    assert [file.format for file in loaded.files] == ["judged_messages"]
    assert loaded.ignored_columns == {}
    up = expected.count(True)
    [note] = loaded.files[0].notes
    assert re.fullmatch(rf"rating .*\bthumbs\b\D*{up} up\D*{len(expected) - up} down", note)


@pytest.mark.parametrize(
    "ratings", [[1, 5, 3], [1, 2], [0, 1, -1], [0.5, 1], ["1", "4"], [1, 1, -2], [10, 100]]
)
def test_scores(ratings: list[Any], tmp_path: Path) -> None:
    loaded = load_rows(tmp_path, "scored", *rated(*ratings))
    assert scores(loaded) == [float(rating) for rating in ratings]
    assert labels(loaded) == [None] * len(ratings)
    low, high = min(map(float, ratings)), max(map(float, ratings))
    [note] = loaded.files[0].notes
    assert re.match(r"rating .*\bscores\b", note)
    assert re.findall(r"-?[\d.]+", note) == [f"{low:g}", f"{high:g}"]
    with raises_error("kind-mismatch", fix="scores_to_judgements"):
        load_rows(tmp_path, "judgement", *rated(*ratings))


def test_a_1_of_a_scale_is_no_thumb_however_late_the_scale_shows(tmp_path: Path) -> None:
    rows = rated(*[1, 0] * 500, 4)
    assert set(scores(load_rows(tmp_path, "scored", *rows))) == {0.0, 1.0, 4.0}
    path = write(tmp_path / "rows.jsonl", *rows)
    for limited in (
        load([Source(path, limit=3)], "scored"),
        load([Source(path)], "scored", limit=3),
    ):
        assert scores(limited) == [1.0, 0.0, 1.0]
    assert scores(load([InMemory(rows)], "scored", limit=2)) == [1.0, 0.0]
    assert scores(load([InMemory(iter(rows))], "scored"))[-1] == 4.0
    assert [e.score for _, e in stream(Source(path, limit=2)) if isinstance(e, Judgement)] == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize("rating", [0, 1, "1", 1.0])
def test_one_rating_alone_is_not_guessed(rating: Any, tmp_path: Path) -> None:
    with raises_error("rating-ambiguous", where="rows.jsonl", fix="label: rating") as raised:
        load_rows(tmp_path, "judgement", *rated(rating, rating))
    assert f"{float(rating):g}" in raised.error.message
    assert "score: rating" in str(raised.error.fix)
    assert labels(load_rows(tmp_path, "judgement", *rated(rating), keys={"label": "rating"})) == [
        bool(int(rating))
    ]
    assert scores(load_rows(tmp_path, "scored", *rated(rating), keys={"score": "rating"})) == [
        float(rating)
    ]


@pytest.mark.parametrize(
    ("kind", "ratings", "line", "code", "value"),
    [
        ("judgement", (1, "meh", -1), 2, "row-label-invalid", "'meh'"),
        ("judgement", ("good", "bad", 4), 3, "row-label-invalid", "4"),
        ("scored", (1, 5, "meh"), 3, "row-number-invalid", "'meh'"),
        ("judgement", (1, -1, None), 3, "row-rating-missing", "rating"),
    ],
)
def test_a_rating_that_is_neither_thumb_nor_score_is_a_bad_row(
    kind: str, ratings: tuple[Any, ...], line: int, code: str, value: str, tmp_path: Path
) -> None:
    with raises_error(code, where=f"rows.jsonl:{line}") as raised:
        load_rows(tmp_path, kind, *rated(*ratings))
    assert "rating" in raised.error.message
    assert value in raised.error.message


def test_a_rating_in_a_row_with_a_label_a_score_or_a_pair_is_ignored(tmp_path: Path) -> None:
    loaded = load_rows(tmp_path, "judgement", *rated(1, 5, label=False))
    assert labels(loaded) == [False, False]
    assert (loaded.ignored_columns, loaded.files[0].notes) == ({"rating": 2}, ())
    assert scores(load_rows(tmp_path, "scored", *rated(1, -1, score=3))) == [3.0, 3.0]
    loaded = load_rows(
        tmp_path, "preference", {"prompt": "p", "chosen": "a", "rejected": "b", "rating": 1}
    )
    assert isinstance(loaded.examples[0], Preference)


def test_a_rating_that_only_later_rows_have_is_no_demonstration(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}] * 30
    with raises_error("row-format-differs", where="rows.jsonl:31", fix="format: messages"):
        load_rows(tmp_path, "demonstration", *rows, *rated(-1))
    loaded = load_rows(tmp_path, "demonstration", *rows, *rated(-1), format="messages")
    assert len(loaded.examples) == 31
    assert all(isinstance(e, Demonstration) for e in loaded.examples)


def test_renamed_columns_and_other_formats_have_ratings(tmp_path: Path) -> None:
    rows = [{"q": "p", "completion": "a", "rating": rating} for rating in (1, -1)]
    assert labels(load_rows(tmp_path, "judgement", *rows, keys={"prompt": "q"})) == [True, False]
    rows = [{"prompt_ids": [1], "completion_ids": [2], "rating": rating} for rating in (1, -1)]
    assert labels(load_rows(tmp_path, "judgement", *rows)) == [True, False]


def test_a_0_in_a_column_with_a_minus_1_is_ambiguous(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "a", "label": label} for label in (1, 0, 1, -1)]
    with raises_error("label-zero-ambiguous", where="rows.jsonl:2") as raised:
        load_rows(tmp_path, "judgement", *rows)
    assert "rows.jsonl:4" in raised.error.message
    assert labels(load_rows(tmp_path, "judgement", *rows[:3])) == [True, False, True]
    assert labels(load_rows(tmp_path, "judgement", *rows[2:])) == [True, False]


def test_the_audit_reports_how_ratings_and_tables_were_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;completion;rating\nsun;a star;1\nmoon;a star;-1\n")
    loaded = load([Source(str(tmp_path / "rows.csv"))], "judgement")
    encoder = Encoder(tiny_tokenizer(CHATML), max_length=99)
    result = audit(loaded, encoder.encode_all(loaded.examples, loaded.sources), encoder)
    notes = loaded.files[0].notes
    assert result.files[0].notes == notes
    assert DELIMITERS[";"] in notes[0]
    assert "rating" in notes[1]
    assert len(notes) == 2
    assert result.to_dict()["files"][0]["notes"] == notes
    assert all(f"rows.csv: {note}\n" in render(result) for note in notes)
