"""Rows that a program holds, as DataFrames, data sets, lists and paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

from tests.data.rows import JUDGED, write
from tests.errors import raises_error
from valence.data.load import InMemory, load, sources_from
from valence.data.objects import as_overrides, rows_from
from valence.types import Judgement, Origin

ROWS = [
    {"prompt": "p", "completion": "a", "label": True},
    {"prompt": "q", "completion": "b", "label": False},
]
EXAMPLES = [
    Judgement(
        prompt=str(row["prompt"]),
        completion=str(row["completion"]),
        label=bool(row["label"]),
        origin=Origin("x", n),
    )
    for n, row in enumerate(ROWS)
]


@pytest.mark.parametrize("make", [
    list, tuple, iter, pd.DataFrame, datasets.Dataset.from_list,
    lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
    lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    lambda rows: (row for row in rows),
    lambda rows: pd.DataFrame(rows, index=[7, 7]),
    lambda _: EXAMPLES,
])  # fmt: skip
def test_supported_containers_of_rows(make: Any) -> None:
    loaded = load(sources_from(make(ROWS)), "judgement")
    results = [
        (e.prompt, e.completion, e.label) for e in loaded.examples if isinstance(e, Judgement)
    ]
    assert results == [("p", "a", True), ("q", "b", False)]
    assert (sum(file.rows for file in loaded.files), loaded.bad) == (2, ())


def test_a_frame_of_numpy_values(tmp_path: Path) -> None:
    # as a parquet file is read into a frame
    turns = np.array([{"role": "user", "content": "q"}], dtype=object)
    frame = pd.DataFrame(
        {
            "prompt": [turns, turns, turns],
            "completion": ["a", "b", "c"],
            "label": [1.0, 0.0, np.nan],
            "score": np.array([0.5, np.nan, 1], dtype=np.float32),
            "weight": pd.array([1, None, 2], dtype="Int64"),
            "at": pd.to_datetime(["2026-01-01", None, None]),
        }
    )
    loaded = load([InMemory(frame)], "judgement", on_bad_row="skip")
    assert [(e.label, e.score, e.weight) for e in loaded.examples if isinstance(e, Judgement)] == [
        (True, 0.5, 1.0),
        (False, None, 1.0),
    ]
    assert [(bad.origin.line, bad.code) for bad in loaded.bad] == [(3, "row-rating-missing")]
    assert "label" in loaded.bad[0].reason
    assert loaded.ignored_columns == {"at": 1}


SPLITS = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})


@pytest.mark.parametrize(
    ("wrong", "code"),
    [(3, "rows-type"), (None, "rows-type"), (JUDGED, "rows-type"), (SPLITS, "split-missing")],
)
def test_unsupported_containers_of_rows(wrong: Any, code: str) -> None:
    with raises_error(code, where="rows") as raised:
        load(sources_from(wrong), "judgement")
    assert raised.error.fix


def test_two_columns_of_one_name_are_refused() -> None:
    with raises_error("column-duplicate", where="rows") as raised:
        rows_from(pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]))
    assert "'prompt'" in raised.error.message


def test_paths_are_read_as_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, JUDGED) for name in ("a.jsonl", "b.jsonl")]
    for value, count in (
        (paths[0], 1),
        (Path(paths[0]), 1),
        (paths, 2),
        (tuple(map(Path, paths)), 2),
    ):
        loaded = load(sources_from(value), "judgement")
        assert [str(e.origin) for e in loaded.examples] == [f"{path}:1" for path in paths[:count]]
    with raises_error("file-not-found", where="nothing.jsonl"):
        load(sources_from(tmp_path / "nothing.jsonl"), "judgement")


def test_paths_become_settings_and_rows_stay_rows() -> None:
    rows, words = as_overrides(
        {"train": Path("a b.jsonl"), "eval": ROWS, "test": None}, ["train.seed=1"]
    )
    assert rows == {"eval": ROWS, "test": None}
    assert words[0] == "train.seed=1"
    [(name, value)] = [word.split("=", 1) for word in words[1:]]
    assert (name, json.loads(value)) == ("data.train", ["a b.jsonl"])
