"""Exports written by tests, and the votes that a reader returns for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from valence.data.importers.records import Reader, ReadOptions, Skipped, Vote

Rows = Sequence[Mapping[str, Any]]


def write_jsonl(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_csv(path: Path, rows: Rows) -> str:
    """Objects and lists are written as JSON into their cells."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow([json.dumps(c) if isinstance(c, dict | list) else c for c in cells])
    return str(path)


def write_parquet(path: Path, rows: Rows) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return str(path)


def results(
    reader: Reader, paths: list[str], options: ReadOptions | None = None
) -> list[Vote | Skipped]:
    return list(reader(paths, options or ReadOptions()))


def only_vote(reader: Reader, paths: list[str], options: ReadOptions | None = None) -> Vote:
    (vote,) = results(reader, paths, options)
    assert isinstance(vote, Vote), vote
    return vote


def only_reason(reader: Reader, paths: list[str], options: ReadOptions | None = None) -> str:
    (skipped,) = results(reader, paths, options)
    assert isinstance(skipped, Skipped), skipped
    return skipped.reason


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
