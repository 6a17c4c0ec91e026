"""Exports in files, and the votes of their readers in a form that is easy to compare."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from valence.data.importers.records import Reader, ReadOptions, Skipped, Vote

DEFAULT = ReadOptions()
REAL = Path(__file__).parent / "real"


def write_json(path: Path, value: object) -> str:
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def write_jsonl(path: Path, rows: Iterable[object]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def read_all(reader: Reader, *paths: str, options: ReadOptions = DEFAULT) -> list[Any]:
    """The items that a reader yields, each as ``compact`` returns it."""
    return [compact(item) for item in reader(list(paths), options)]


def only_vote(reader: Reader, *paths: str, options: ReadOptions = DEFAULT) -> Vote:
    (vote,) = reader(list(paths), options)
    assert isinstance(vote, Vote)
    return vote


def compact(item: Vote | Skipped) -> Any:
    """The reason of what is skipped. Of a vote: the texts of the prompt, the completion, and the
    verdict, which is a label, a score, or the winner and the other completion.
    """
    if isinstance(item, Skipped):
        return item.reason
    prompt = " | ".join(f"{turn['role'][0]}: {turn['content']}" for turn in item.prompt)
    verdict: object = item.label if item.label is not None else item.score
    if item.other is not None:
        verdict = (item.winner, item.other["content"])
    return prompt, item.completion["content"], verdict
