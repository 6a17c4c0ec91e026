"""A column called rating holds thumbs or scores, which the whole column decides, and the audit tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import Source, load_rows, write
from tests.tiny import CHATML, tiny_tokenizer
from valence.data.audit import audit
from valence.data.audit_text import render
from valence.data.encode import Encoder
from valence.data.load import InMemory, Loaded, load, stream
from valence.errors import UserError
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
    assert loaded.formats == {loaded.files[0].path: "judged_messages"}
    assert loaded.ignored_columns == {}
    up = expected.count(True)
    assert loaded.files[0].notes == (f"rating read as thumbs: {up} up, {len(expected) - up} down",)


@pytest.mark.parametrize("ratings", [[1, 5, 3], [1, 2], [0, 1, -1], [0.5, 1], ["1", "4"], [1, 1, -2], [10, 100]])
def test_scores(ratings: list[Any], tmp_path: Path) -> None:
    loaded = load_rows(tmp_path, "scored", *rated(*ratings))
    assert scores(loaded) == [float(rating) for rating in ratings]
    assert labels(loaded) == [None] * len(ratings)
    low, high = min(map(float, ratings)), max(map(float, ratings))
    assert loaded.files[0].notes == (f"rating read as scores from {low:g} to {high:g}",)
    with pytest.raises(UserError, match="answers with a score and no label"):
        load_rows(tmp_path, "judgement", *rated(*ratings))


def test_a_1_of_a_scale_is_no_thumb_however_late_the_scale_shows(tmp_path: Path) -> None:
    rows = rated(*[1, 0] * 500, 4)
    assert set(scores(load_rows(tmp_path, "scored", *rows))) == {0.0, 1.0, 4.0}
    path = write(tmp_path / "rows.jsonl", *rows)
    for limited in (load([Source(path, limit=3)], "scored"), load([Source(path)], "scored", limit=3)):
        assert scores(limited) == [1.0, 0.0, 1.0]
    assert scores(load([InMemory(rows)], "scored", limit=2)) == [1.0, 0.0]
    assert scores(load([InMemory(iter(rows))], "scored"))[-1] == 4.0
    assert [e.score for _, e in stream(Source(path, limit=2)) if isinstance(e, Judgement)] == [1.0, 0.0]


@pytest.mark.parametrize("rating", [0, 1, "1", 1.0])
def test_one_rating_alone_is_not_guessed(rating: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl: every rating is [01], .*\n.*label: rating.*score: rating"):
        load_rows(tmp_path, "judgement", *rated(rating, rating))
    assert labels(load_rows(tmp_path, "judgement", *rated(rating), keys={"label": "rating"})) == [bool(int(rating))]
    assert scores(load_rows(tmp_path, "scored", *rated(rating), keys={"score": "rating"})) == [float(rating)]


def test_what_is_neither_is_a_bad_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:2: rating is 'meh', which is not a label"):
        load_rows(tmp_path, "judgement", *rated(1, "meh", -1))
    with pytest.raises(UserError, match=r"rows.jsonl:3: rating is 4, which is not a label"):
        load_rows(tmp_path, "judgement", *rated("good", "bad", 4))
    with pytest.raises(UserError, match=r"rows.jsonl:3: rating is 'meh', and must be a finite number"):
        load_rows(tmp_path, "scored", *rated(1, 5, "meh"))
    with pytest.raises(UserError, match=r"rows.jsonl:3: the row has no rating"):
        load_rows(tmp_path, "judgement", *rated(1, -1, None))


def test_a_rating_beside_a_label_a_score_or_a_pair_is_not_read(tmp_path: Path) -> None:
    loaded = load_rows(tmp_path, "judgement", *rated(1, 5, label=False))
    assert labels(loaded) == [False, False]
    assert (loaded.ignored_columns, loaded.files[0].notes) == ({"rating": 2}, ())
    assert scores(load_rows(tmp_path, "scored", *rated(1, -1, score=3))) == [3.0, 3.0]
    loaded = load_rows(tmp_path, "preference", {"prompt": "p", "chosen": "a", "rejected": "b", "rating": 1})
    assert isinstance(loaded.examples[0], Preference)


def test_a_rating_that_only_later_rows_have_is_no_demonstration(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}] * 30
    with pytest.raises(UserError, match=r"rows.jsonl:31: the row has a rating, and the file's first rows have none"):
        load_rows(tmp_path, "demonstration", *rows, *rated(-1))
    loaded = load_rows(tmp_path, "demonstration", *rows, *rated(-1), format="messages")
    assert len(loaded.examples) == 31
    assert all(isinstance(e, Demonstration) for e in loaded.examples)


def test_renamed_columns_and_other_formats_have_ratings(tmp_path: Path) -> None:
    rows = [{"q": "p", "completion": "a", "rating": rating} for rating in (1, -1)]
    assert labels(load_rows(tmp_path, "judgement", *rows, keys={"prompt": "q"})) == [True, False]
    rows = [{"prompt_ids": [1], "completion_ids": [2], "rating": rating} for rating in (1, -1)]
    assert labels(load_rows(tmp_path, "judgement", *rows)) == [True, False]


def test_a_0_beside_a_minus_1_is_no_label(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "a", "label": label} for label in (1, 0, 1, -1)]
    with pytest.raises(UserError, match=r"rows.jsonl:2: label is 0 here and -1 at .*rows.jsonl:4"):
        load_rows(tmp_path, "judgement", *rows)
    assert labels(load_rows(tmp_path, "judgement", *rows[:3])) == [True, False, True]
    assert labels(load_rows(tmp_path, "judgement", *rows[2:])) == [True, False]


def test_the_audit_tells_how_ratings_and_tables_were_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;completion;rating\nsun;a star;1\nmoon;a star;-1\n")
    loaded = load([Source(str(tmp_path / "rows.csv"))], "judgement")
    encoder = Encoder(tiny_tokenizer(CHATML), max_length=99)
    result = audit(loaded, encoder.encode_all(loaded.examples, loaded.sources), encoder)
    notes = ("fields are separated by semicolons", "rating read as thumbs: 1 up, 1 down")
    assert result.files[0].notes == notes
    assert result.to_dict()["files"][0]["notes"] == notes
    assert all(f"rows.csv: {note}\n" in render(result) for note in notes)
