"""A feedback tool for tests: its export, its reader, and its place in the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.data.importers.sources import SOURCES, FeedbackSource
from valence.types import Message, Origin

NAME = "chat_log"
MODULE = f"valence.data.importers.{NAME}"


def entry(number: int, vote: Any = True, **changes: Any) -> dict[str, Any]:
    """A line of the export: the vote of another rater on another completion."""
    return {
        "id": f"v{number}",
        "at": 1000 + number,
        "rater": f"person{number}@example.org",
        "question": f"question {number}",
        "answer": f"answer {number}",
        "message": f"m{number}",
        "vote": vote,
        "model": "tiny",
    } | changes


def write_export(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in entries))
    return str(path)


def read(paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    for path in paths:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            yield _vote(json.loads(line), Origin(path, number), options)


def _vote(row: dict[str, Any], origin: Origin, options: ReadOptions) -> Vote | Skipped:
    verdicts = ("vote", "score", "winner", "better")
    is_rated = any(row.get(name) is not None for name in verdicts)
    if not is_rated and not (options.includes_unlabelled and row.get("next")):
        return Skipped("no_vote", origin, row["answer"])
    other: Message | None = (
        {"role": "assistant", "content": row["other"]} if row.get("other") else None
    )
    return Vote(
        source=NAME,
        id=row["id"] if is_rated else f"{row['id']}/follow_up",
        updated_at=row["at"],
        rater=row["rater"],
        is_machine=row.get("machine", False),
        prompt=({"role": "user", "content": row["question"]},) if row["question"] else (),
        completion={"role": "assistant", "content": row["answer"]},
        message=row["message"],
        parent=row.get("parent", ""),
        label=row["vote"],
        score=row.get("score"),
        other=other,
        winner=row.get("winner"),
        correction=row.get("better"),
        comment=row.get("comment", ""),
        tags=tuple(row.get("tags", ())),
        follow_up=row.get("next", ""),
        model=row["model"],
        other_model=row.get("other_model", ""),
        origin=origin,
    )


def install() -> None:
    """Put the tool into the table, until this process ends."""
    module = ModuleType(MODULE)
    module.read = read  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    SOURCES[NAME] = FeedbackSource(
        module=NAME,
        description="a log of chats",
        files="a log",
        columns=("question answer vote",),
        options=SOURCES["argilla"].options + " score-name",
    )


def install_until_undone(patch: pytest.MonkeyPatch) -> None:
    """Put the tool into the table, until ``patch`` is undone."""
    patch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    patch.setitem(SOURCES, NAME, SOURCES["open_webui"])
    install()


@pytest.fixture
def chat_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool in the table, until the test ends."""
    install_until_undone(monkeypatch)
