"""Read the folder of a run for its report. Missing and damaged files are named and left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from valence.files import missing_run
from valence.reports.formatting import audit_warnings
from valence.reports.rows import Json, margin, rewards_by_class
from valence.statistics import quantile
from valence.storage import KEY, ChecksumError, verify, verify_text

T = TypeVar("T")

FILES = {"model": "model", "log": "metrics.jsonl", "report": "report.html"}
"""What a run writes for its user, by title."""

BETWEEN = 60
"""Evaluations between the first and the last whose rows are read: more bands than a curve needs."""

BETWEEN_BYTES = 2**26
"""Bytes of these evaluations, which take about a second to read."""

OUTER = (0.1, 0.9)
"""The quantiles of an evaluation's rows between which a band is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The content of a run's folder; empty where a file is missing.

    ``problems``: what could not be read. ``facts``: run.json.

    ``first``, ``last``: the evaluations of held-out rows, the same one when there is only one.
    ``bands``: by step the outer quantiles of an evaluation's rewards: ``{"chosen":
    (low, high), "margins": ..., ...}``. ``trained``: training rows, measured after training.
    """

    path: Path
    config: Json
    config_text: str
    audit: Json
    metrics: tuple[Json, ...]
    first: Json | None
    last: Json | None
    bands: Mapping[int, Mapping[str, tuple[float, float]]]
    trained: Json | None
    test: Json | None
    samples: tuple[Json, ...]
    facts: Json
    problems: tuple[str, ...]

    @property
    def audit_warnings(self) -> list[str]:
        """The warnings of the audit, one line each."""
        return [
            f"{name}: {warning}"
            for name, audit in self.audit.items()
            for warning in _warnings_of(audit)
        ]


def _warnings_of(audit: Json) -> list[str]:
    try:
        return audit_warnings(audit)
    except (
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # audit.json is valid, but from another program
        return [f"its findings in audit.json could not be read ({type(error).__name__}: {error})"]


def read_run(run_dir: Path, until: int | None = None) -> RunData:
    """Read a run's folder. until: last step whose evaluation is read.

    Files that are absent or damaged leave a gap; damage is listed in ``problems``.
    """
    if not run_dir.is_dir():
        raise missing_run(run_dir, "use the run.dir of a run")
    problems: list[str] = []
    first, last, bands = _evaluations(run_dir / "eval", problems, until)
    return RunData(
        path=run_dir,
        config=_read(run_dir / "config.yaml", _yaml_object, {}, problems),
        config_text=_read(run_dir / "config.yaml", str, "", problems),
        audit=_read(run_dir / "audit.json", _audit_object, {}, problems),
        metrics=_read_metrics(run_dir / "metrics.jsonl", problems),
        first=first,
        last=last,
        bands=bands,
        trained=_read(run_dir / "eval" / "train.json", _evaluation, None, problems),
        test=_read(run_dir / "eval" / "test.json", _evaluation, None, problems),
        samples=_read(run_dir / "samples.json", _json_objects, (), problems),
        facts=_read(run_dir / "run.json", _run_object, {}, problems),
        problems=tuple(dict.fromkeys(problems)),
    )


def _read(path: Path, parse: Callable[[str], T], missing: T, problems: list[str]) -> T:
    """The parsed file, or ``missing`` if it is absent or damaged. Damage is added to ``problems``.

    A file that is only wrong in its checksum is still used.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        if has_changed(text):
            problems.append(f"{path.name} has changed since it was written (its checksum is wrong)")
        return parse(text)
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} could not be read: {error}")
        return missing


# Evaluations


def _evaluations(
    folder: Path, problems: list[str], until: int | None
) -> tuple[Json | None, Json | None, dict[int, dict[str, tuple[float, float]]]]:
    """The first and the last readable evaluation, and the bands of these and of some between."""
    try:
        files = list(folder.glob("step-*.json"))
    except OSError as error:
        problems.append(f"{folder} could not be read: {error}")
        files = []
    steps = {
        path: int(match[1])
        for path in files
        if (match := re.fullmatch(r"step-(\d{1,18})", path.stem))
        and (until is None or int(match[1]) <= until)
    }
    paths = sorted(steps, key=lambda path: steps[path])
    first = last = None
    while paths and first is None:
        first = _read(paths.pop(0), _evaluation, None, problems)
    while paths and last is None:
        last = _read(paths.pop(), _evaluation, None, problems)
    last = last or first
    bands = {e["step"]: bands_of(e["rows"]) for e in (first, last) if e}
    for path in _some(paths):
        try:
            stat = path.stat()
            step, band = _bands(path, stat.st_mtime_ns, stat.st_size)
            bands[step] = band
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path.name} could not be read: {error}")
    return first, last, dict(sorted(bands.items()))


def _some(paths: Sequence[Path]) -> Sequence[Path]:
    """Evenly spread evaluations within the limits."""
    if not paths:
        return ()
    total = sum(map(_size, paths))
    limit = min(BETWEEN, len(paths) * BETWEEN_BYTES // max(total, 1))
    return paths[:: -(-len(paths) // limit)] if limit else ()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed meanwhile
        return 0


@lru_cache(maxsize=4 * BETWEEN)
def _bands(path: Path, _changed: int, _size: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """Cached, because the page of a running run is written repeatedly.

    Raises OSError and ValueError.
    """
    text = path.read_bytes().decode("utf-8")
    if has_changed(text):
        raise ValueError("its checksum is wrong")
    evaluation = _evaluation(text)
    return evaluation["step"], bands_of(evaluation["rows"])


def bands_of(rows: Sequence[Json]) -> dict[str, tuple[float, float]]:
    """The outer quantiles of the rows' rewards, by the metric's word for their class."""
    words = {"thumbs up": "chosen", "thumbs down": "rejected"}
    rewards = {words.get(name, name): values for name, values in rewards_by_class(rows).items()}
    rewards["margins"] = [m for row in rows if (m := margin(row)) is not None]
    return {
        name: (quantile(values, OUTER[0]), quantile(values, OUTER[1]))
        for name, values in rewards.items()
        if values
    }


# Parsing. All functions raise ValueError for unexpected content.


def has_changed(text: str) -> bool:
    """Whether the checksum of a file, or of one of its rows, is wrong.

    Raises ValueError for broken JSON.
    """
    try:
        if not text.lstrip().startswith(("{", "[")):
            verify_text(text)
            return False
        value = json.loads(text)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                verify(item)
    except ChecksumError:
        return True
    return False


def _json_object(text: str) -> Json:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return {name: item for name, item in value.items() if name != KEY}


def _json_objects(text: str) -> tuple[Json, ...]:
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("not a list of JSON objects")
    return tuple(value)


def _audit_object(text: str) -> Json:
    value = _json_object(text)
    if not all(isinstance(audit, dict) for audit in value.values()):
        raise ValueError("not an audit with an object for each list of rows")
    return value


def _run_object(text: str) -> Json:
    value = _json_object(text)
    kinds = {"changed": list, "warnings": list, "notes": list, "versions": dict}
    if not all(isinstance(value.get(name, kind()), kind) for name, kind in kinds.items()):
        raise ValueError("not the facts of a run")
    return value


def _evaluation(text: str) -> Json:
    value = _json_object(text)
    kinds = {"step": int, "metrics": dict, "rows": list}
    if not all(isinstance(value.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("not an evaluation with step, metrics and rows")
    if not all(isinstance(row, dict) for row in value["rows"]):
        raise ValueError("not an evaluation whose rows are objects")
    return value


def _yaml_object(text: str) -> Json:
    from ruamel.yaml import YAML, YAMLError

    try:
        value: Any = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


def _read_metrics(path: Path, problems: list[str]) -> tuple[Json, ...]:
    """Records by ascending step. Several lines of one step (evaluation, resumed run) are merged."""
    by_step: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error}")
        return ()
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _json_object(line.decode("utf-8"))
            step = int(record["step"])
            by_step.setdefault(step, {}).update(record, step=step)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            last = (
                " (the last line: the run was stopped while writing it)"
                if place == len(lines)
                else ""
            )
            problems.append(f"{path.name}:{place} is not a complete record and was left out{last}")
    return tuple(by_step[step] for step in sorted(by_step))


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's log, oldest first, with non-finite numbers as floats; empty without a
    log.
    """
    try:
        lines = (run_dir / FILES["log"]).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [{name: _as_number(value) for name, value in json.loads(line).items()} for line in lines]


def _as_number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
