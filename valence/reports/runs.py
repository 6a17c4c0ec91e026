"""List the runs in a folder with their state, for `valence report`.

This module does not import torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from valence.reports.formatting import duration, number, visible
from valence.reports.run_record import (
    CHECKPOINTS,
    FACTS,
    LOG,
    method_in_recipe,
    newest_checkpoint,
    read_facts,
    read_log_end,
    require_folder,
)
from valence.storage import holder

DEPTH = 4
"""Levels of folders in which runs are searched."""

STATES = {"interrupted": "stopped", "failed": "failed", "done": "done", "scored": "scored"}
STYLES = {
    "running": "green",
    "stopped": "yellow",
    "killed": "red",
    "failed": "red",
    "unreadable": "red",
}

SHOWN = (
    ("loss",),
    ("eval/loss",),
    (
        "eval/rewards/accuracies",
        "eval/rewards/auc",
        "eval/rewards/spearman",
        "eval/rewards/margins",
        "rewards/accuracies",
        "rewards/auc",
        "rewards/spearman",
        "rewards/margins",
    ),
)
"""The first metric of each group that the log has is shown."""


@dataclass(frozen=True)
class RunLine:
    """The state of a run.

    state: running, stopped (interrupted), killed (marked as running, but no process has its lock),
    failed, done, scored, or unreadable, with the ``problem``. step: the last one logged. total:
    steps of the run. left: seconds for the remaining steps of a running run, without evaluations
    and saves. checkpoint: the step of the newest one. changed: seconds since 1970.
    """

    path: Path
    state: str
    method: str = ""
    step: int = 0
    total: int | None = None
    left: float | None = None
    checkpoint: int | None = None
    changed: float = 0.0
    metrics: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    problem: str | None = None


def list_runs(folder: Path) -> list[RunLine]:
    """The runs in a folder, or the run that it is, the last changed one first.

    Searches ``DEPTH`` levels, but not in runs, hidden folders and links. Raises UserError if there
    is no such folder.
    """
    require_folder(folder, "use a run folder, or a folder that contains runs")
    return sorted(_lines(folder, DEPTH), key=lambda line: (-line.changed, line.path))


def table(lines: Sequence[RunLine]) -> Table:
    """The runs as a table for the terminal."""
    result = Table(box=None, pad_edge=False)
    result.add_column("run", overflow="fold")
    for name in ("method", "state", "step", "left", "saved", "changed"):
        result.add_column(
            name, no_wrap=True, justify="right" if name in ("step", "left", "saved") else "left"
        )
    result.add_column("last metrics", overflow="fold")
    now = time.time()
    for line in lines:
        step = f"{line.step}/{line.total}" if line.total else str(line.step or "")
        left = duration(line.left) if line.left is not None else ""
        saved = "" if line.checkpoint is None else str(line.checkpoint)
        changed = f"{duration(max(0.0, now - line.changed))} ago" if line.changed else ""
        named = {name.replace("rewards/", ""): value for name, value in line.metrics.items()}
        numbers = "  ".join(
            f"{name} {number(v) if isinstance(v, float) else v}" for name, v in named.items()
        )
        cells = (
            str(line.path),
            line.method,
            line.state,
            step,
            left,
            saved,
            changed,
            line.problem or numbers,
        )
        texts = [Text(visible(cell)) for cell in cells]
        texts[2].stylize(STYLES.get(line.state, ""))
        result.add_row(*texts)
    return result


def as_json(lines: Sequence[RunLine]) -> list[dict[str, Any]]:
    """The runs as plain values: ``changed`` as ISO time, non-finite metrics as text."""
    return [
        {
            "path": str(line.path),
            "state": line.state,
            "problem": line.problem,
            "method": line.method or None,
            "step": line.step,
            "total_steps": line.total,
            "seconds_left": line.left,
            "checkpoint": line.checkpoint,
            "changed": datetime.fromtimestamp(line.changed, UTC).isoformat(timespec="seconds")
            if line.changed
            else None,
            "metrics": dict(line.metrics),
        }
        for line in lines
    ]


def _lines(folder: Path, depth: int) -> Iterator[RunLine]:
    try:
        with os.scandir(folder) as entries:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError as error:
        yield RunLine(
            folder, "unreadable", problem=f"the folder could not be read: {error.strerror}"
        )
        return
    if names.get(FACTS) is False:
        yield _line(folder)
    elif depth > 0:
        for name in sorted(
            name for name, is_folder in names.items() if is_folder and not name.startswith(".")
        ):
            yield from _lines(folder / name, depth - 1)


def _line(run: Path) -> RunLine:
    changed = max(_changed(run / name) for name in (FACTS, LOG, CHECKPOINTS))
    try:
        facts = read_facts(run)
    except OSError as error:
        problem = f"run.json could not be read: {error.strerror}"
        return RunLine(run, "unreadable", changed=changed, problem=problem)
    except ValueError:
        facts = {}
    status = facts.get("status")
    if not isinstance(status, str):
        problem = "run.json is damaged: the state of the run is unknown"
        return RunLine(run, "unreadable", changed=changed, problem=problem)
    state = STATES.get(status, status)
    records, from_start = read_log_end(run / LOG)
    if status in ("running", "interrupted", "failed"):
        process = holder(run)
        if process is not None and process.alive:
            state = "running"
        elif status == "running":
            state = "killed"
    logged = records[-1]["step"] if records else 0
    steps, total = (
        value if isinstance(value := facts.get(name), int) else None
        for name in ("steps", "total_steps")
    )
    step = logged if steps is None or status == "running" else steps
    return RunLine(
        path=run,
        state=state,
        method=method if isinstance(method := facts.get("method"), str) else method_in_recipe(run),
        step=step,
        total=total,
        left=_left(records, from_start, total - step) if state == "running" and total else None,
        checkpoint=newest_checkpoint(run),
        changed=changed,
        metrics=_metrics(records),
    )


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # not there yet
        return 0.0


def _left(records: Sequence[Mapping[str, Any]], from_start: bool, steps: int) -> float | None:
    """Seconds for the steps at the speed of the records; None if it is unknown."""
    timed = [
        (r["step"], r["seconds"]) for r in records if isinstance(r.get("seconds"), float | int)
    ]
    if not timed:
        return None
    # The seconds of a record are those since the record before it.
    first, *rest = [(0, 0.0), *timed] if from_start else timed
    done = timed[-1][0] - first[0]
    return max(0, steps) * sum(seconds for _, seconds in rest) / done if done > 0 else None


def _metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float | str]:
    latest: dict[str, Any] = {}
    for record in records:
        latest |= record
    names = [
        next((name for name in group if isinstance(latest.get(name), float | int | str)), None)
        for group in SHOWN
    ]
    return {
        name: latest[name] if isinstance(latest[name], str) else float(latest[name])
        for name in names
        if name
    }
