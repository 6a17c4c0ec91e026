"""Common parts of the tests of scoring rows: rows of each kind, and functions that run the
commands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from valence import cli
from valence.jobs.row_job import Tally
from valence.jobs.score_rows import score_rows
from valence.options import ScoreOptions

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
FILES: dict[str, list[dict[str, Any]]] = {
    "judgement": [
        {"prompt": PROMPT, "completion": f"answer {i}", "label": i % 2 == 0, "who": i}
        for i in range(5)
    ],
    "preference": [
        {"prompt": f"question {i} ", "chosen": f"good {i} " * 3, "rejected": "bad"}
        for i in range(4)
    ],
    "demonstration": [
        {"messages": [*PROMPT, {"role": "assistant", "content": f"Paris {i}"}]} for i in range(3)
    ],
    "ranking": [
        {"prompt": "1 + 1 = ", "completions": ["2", "3 or so", "hello"], "scores": [2.5, 1, 0]}
        for _ in range(2)
    ],
    "scored": [{"prompt": f"hello {i} ", "completion": "world", "score": i / 2} for i in range(3)],
}
ALL = [f"{name}.jsonl" for name in FILES]


def write(name: str, rows: list[Any]) -> str:
    Path(name).write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return name


def read(name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def score(
    *data: str,
    target: str = "model",
    out: str = "out.jsonl",
    overrides: Sequence[str] = (),
    **options: Any,
) -> Tally:
    options = {"data": [*data] or ALL, "out": Path(out), **options}
    return score_rows(target, ScoreOptions(**options), overrides=overrides)


def invoke(*words: str) -> None:
    """Run a command in this process, without the handling of its errors: UserError is raised."""
    cli.app([*words], standalone_mode=False)


def score_all() -> bytes:
    score(out="whole.jsonl")
    return Path("whole.jsonl").read_bytes()
