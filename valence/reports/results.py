"""What a finished run has written for its user, read from the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from valence.reports.rundata import read_run
from valence.reports.verdict import run_verdict

FILES = {"model": "model", "log": "metrics.jsonl", "report": "report.html"}
"""What a run writes for its user, by the word for it."""


def outputs(folder: Path) -> list[str]:
    """What held-out rows say about a finished run, then one line for each file or folder that it
    has for its user.
    """
    verdict = run_verdict(read_run(folder))
    lines = (
        [f"{verdict.headline}. {verdict.sentence}", verdict.advice]
        if verdict.state != "unmeasured"
        else []
    )
    return [
        *lines,
        *(
            f"{what:>7}  {folder / name}"
            for what, name in FILES.items()
            if (folder / name).exists()
        ),
    ]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's log, oldest first; numbers that are not finite as floats.

    Empty without a log.
    """
    try:
        lines = (folder / FILES["log"]).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [{name: _as_number(value) for name, value in json.loads(line).items()} for line in lines]


def _as_number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
