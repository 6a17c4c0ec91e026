"""List the runs in a folder with their state, for `valence report`, and find how a run was started.

This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from valence.errors import UserError
from valence.files import missing_run
from valence.reports.formatting import duration, number, visible
from valence.storage import ChecksumError, holder, read_json, verify, verify_text

DEPTH = 4
"""Levels of folders in which runs are searched."""

TAIL = 2**16
"""Bytes read at the end of a log."""

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
    if not folder.is_dir():
        raise _not_a_folder(folder, "use a run folder, or a folder that contains runs")
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
    if names.get("run.json") is False:
        yield _line(folder)
    elif depth > 0:
        for name in sorted(
            name for name, is_folder in names.items() if is_folder and not name.startswith(".")
        ):
            yield from _lines(folder / name, depth - 1)


def _line(run: Path) -> RunLine:
    changed = max(_changed(run / name) for name in ("run.json", "metrics.jsonl", "checkpoints"))
    try:
        facts = verify(read_json(run / "run.json"))
        status = facts["status"]
        state = STATES.get(status, status)
        if not isinstance(state, str):
            raise TypeError
    except OSError as error:
        return RunLine(
            run,
            "unreadable",
            changed=changed,
            problem=f"run.json could not be read: {error.strerror}",
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RunLine(
            run,
            "unreadable",
            changed=changed,
            problem="run.json is damaged: the state of the run is unknown",
        )
    records, from_start = _last_records(run / "metrics.jsonl")
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
        method=method
        if isinstance(method := facts.get("method"), str)
        else _method(run / "config.yaml"),
        step=step,
        total=total,
        left=_left(records, from_start, total - step) if state == "running" and total else None,
        checkpoint=_newest_checkpoint(run / "checkpoints"),
        changed=changed,
        metrics=_metrics(records),
    )


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # not there yet
        return 0.0


def _last_records(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The complete records at the end of a log, and whether the log has no others."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return [], True
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
            if isinstance(record["step"], int):
                records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return records, size <= TAIL


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


def _method(config: Path) -> str:
    """The method in a config.yaml as runs write it, for a run.json without it."""
    try:
        match = re.search(
            r"^method: *(\S+)", config.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
    except OSError:
        return ""
    return match[1] if match else ""


def _newest_checkpoint(folder: Path) -> int | None:
    try:
        steps = [
            int(name[5:]) for name in os.listdir(folder) if re.fullmatch(r"step-[0-9]{1,18}", name)
        ]
    except OSError:
        return None
    return max(steps, default=None)


def _not_a_folder(path: Path, fix: str) -> UserError:
    if not path.exists():
        return missing_run(path, fix)
    return UserError("the path is a file", code="run-not-found", where=str(path), fix=fix)


def config_of(run_dir: Path) -> Path:
    """The recipe in a run's folder.

    Raises UserError if the folder is no run, or the recipe has changed.
    """
    config = run_dir / "config.yaml"
    if not run_dir.exists():
        raise missing_run(run_dir, "use a run folder")
    if not config.is_file():
        raise UserError(
            "the folder is not a run (config.yaml is missing)",
            code="run-not-found",
            where=str(run_dir),
            fix="use a run folder",
        )
    try:
        verify_text(config.read_bytes().decode("utf-8", errors="replace"))
    except OSError as error:
        fix = "make the file readable (chmod +r)"
        raise UserError(
            f"the recipe cannot be read ({error.strerror})",
            code="file-not-readable",
            where=str(config),
            fix=fix,
        ) from error
    except ChecksumError as error:
        fix = "restore the file; if you edited it on purpose, remove its last line"
        raise UserError(
            f"the recipe is damaged: {error}", code="recipe-damaged", where=str(config), fix=fix
        ) from error
    return config


def place_of_run(run_dir: Path) -> tuple[Path, Path | None]:
    """The recipe of a run, and the folder in which it was started, to which its paths are relative.

    Raises UserError if the folder is not a run.
    """
    if not run_dir.is_dir():
        raise _not_a_folder(run_dir, "use a run folder; for a recipe, run `valence train`")
    recipe = config_of(run_dir)
    try:
        place = verify(read_json(run_dir / "run.json"))["cwd"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return recipe, None  # damaged: the facts in a checkpoint are used
    return recipe, Path(place) if isinstance(place, str) else None
