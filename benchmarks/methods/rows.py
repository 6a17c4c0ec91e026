"""Write real rows to files: 300 thumbs, 300 pairs and 999 demonstrations of a published data set,
and film reviews.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods.cases import Rows
from examples.demo import assets

HELD_OUT = {"thumbs": 32, "pairs": 24, "shown": 24, "films": 48, "stars": 48}
TRAINED = 128
LETTERS = {"thumbs": 1200, "pairs": 2500, "shown": 700}
"""Longest row (letters), so that a run takes a minute."""
FILES = {"thumbs": "kto_en_demo.json", "pairs": "dpo_en_demo.json", "shown": "alpaca_en_demo.json"}


def write(kind: Rows, folder: Path) -> tuple[Path, Path]:
    """Write a file with training rows and one with held-out rows."""
    if kind in FILES:
        rows: list[Any] = json.loads(
            (assets.llamafactory_data() / FILES[kind]).read_text(encoding="utf-8")
        )
        rows = [row for row in rows if len(json.dumps(row)) < LETTERS[kind]]
        if kind == "thumbs":
            ups, downs = ([row for row in rows if row["label"] is tag] for tag in (True, False))
            rows = [row for both in zip(ups, downs, strict=False) for row in both]
    else:
        rows = [
            film(text, liked, kind) for text, liked in assets.film_reviews(HELD_OUT[kind] + TRAINED)
        ]
    held_out = HELD_OUT[kind]
    return _written(folder / f"{kind}.jsonl", rows[held_out:][:TRAINED]), _written(
        folder / f"{kind}_held.jsonl", rows[:held_out]
    )


def film(text: str, liked: bool, kind: Rows) -> dict[str, Any]:
    """A row with the end of a review, where most reviewers state their opinion."""
    end = text if len(text) <= 400 else "... " + text[-400:].split(" ", 1)[1]
    verdict = {"score": 1 + liked} if kind == "stars" else {"label": liked}
    return {"prompt": "A film review: ", "completion": end, **verdict}


def _written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
