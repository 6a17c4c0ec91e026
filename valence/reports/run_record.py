"""The names of the files in a run's folder, and functions that read them for reports.

``RunRecord.read`` reads all of them and leaves out what is missing or damaged. The functions that
read a single file raise OSError, and ValueError for damage: ChecksumError if its checksum is wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

from valence.errors import UserError
from valence.files import missing_run
from valence.reports.formatting import audit_warnings
from valence.reports.rows import Json, bands_of
from valence.storage import KEY, ChecksumError, verify, verify_text

T = TypeVar("T")

RECIPE, FACTS, LOG = "config.yaml", "run.json", "metrics.jsonl"
AUDIT, SAMPLES, EVALUATIONS = "audit.json", "samples.json", "eval"
CHECKPOINTS, MODEL, REPORT = "checkpoints", "model", "report.html"

FILES = {"model": MODEL, "log": LOG, "report": REPORT}
"""What a run writes for its user, by title."""

TAIL = 2**16
"""Bytes read at the end of a log, for a list of runs."""

BETWEEN = 60
"""Evaluations between the first and the last whose rows are read: more bands than a curve needs."""

BETWEEN_BYTES = 2**26
"""Bytes of these evaluations, which take about a second to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
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
    def reads_feedback(self) -> bool:
        """Whether the teacher of a run with a teacher reads feedback, as that of hindsight does."""
        teacher = self.config.get("teacher")
        model = teacher.get("model") if isinstance(teacher, Mapping) else None
        return model in (None, "self") or self.config.get("method") == "hindsight"

    @classmethod
    def read(cls, run_dir: Path, until: int | None = None) -> Self:
        """Read a run's folder. until: last step whose evaluation is read.

        Files that are absent or damaged leave a gap; damage is listed in ``problems``.
        """
        if not run_dir.is_dir():
            raise missing_run(run_dir, "use the run.dir of a run")
        problems: list[str] = []

        def read(name: str, check: Callable[[Any], T], missing: T) -> T:
            return _read_or_note(run_dir / name, check, missing, problems)

        first, last, bands = _evaluations(run_dir / EVALUATIONS, problems, until)
        return cls(
            path=run_dir,
            config=read(RECIPE, _parse_yaml, {}),
            config_text=read(RECIPE, str, ""),
            audit=read(AUDIT, _check_audit, {}),
            metrics=_merged_log(run_dir / LOG, problems),
            first=first,
            last=last,
            bands=bands,
            trained=read(f"{EVALUATIONS}/train.json", _check_evaluation, None),
            test=read(f"{EVALUATIONS}/test.json", _check_evaluation, None),
            samples=read(SAMPLES, _check_samples, ()),
            facts=read(FACTS, _check_facts, {}),
            problems=tuple(dict.fromkeys(problems)),
        )

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


def _read_or_note(path: Path, check: Callable[[Any], T], missing: T, problems: list[str]) -> T:
    """The content of a file, or ``missing`` if it is absent or damaged. Damage is added to
    ``problems``. A file that is only wrong in its checksum is still used.
    """
    try:
        content, error = _load(path)
        if error:
            problems.append(f"{path.name} has changed since it was written (its checksum is wrong)")
        return check(content)
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} could not be read: {error}")
        return missing


# Single files


def read_facts(run_dir: Path) -> dict[str, Any]:
    """The content of run.json."""
    return _read(run_dir / FACTS, _check_facts)


def read_undamaged_facts(run_dir: Path) -> dict[str, Any]:
    """The content of run.json, empty if it is missing or damaged."""
    try:
        return read_facts(run_dir)
    except (OSError, ValueError):
        return {}


def read_samples(run_dir: Path) -> tuple[Json, ...]:
    """The completions of samples.json."""
    return _read(run_dir / SAMPLES, _check_samples)


def evaluation_file(step: int) -> str:
    """The name of the file with the evaluation of held-out rows after a step."""
    return f"{EVALUATIONS}/step-{step}.json"


def read_rows(run_dir: Path, step: int) -> list[Json]:
    """The held-out rows that were evaluated after a step."""
    return _read(run_dir / evaluation_file(step), _check_evaluation)["rows"]


def read_for_card(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts of a run and the audit of its training rows, empty without their files.

    Raises UserError if one of them is damaged.
    """
    facts = _undamaged(run_dir / FACTS, _check_facts)
    audit = _undamaged(run_dir / AUDIT, _check_audit)
    return facts, audit.get("train", {})


def _undamaged(path: Path, check: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return _read(path, check)
    except (OSError, ValueError) as error:
        raise UserError(
            f"this file is damaged ({error})",
            code="file-damaged",
            where=str(path),
            fix="restore the file, or remove it: the model card then lacks its content",
        ) from error


def _read(path: Path, check: Callable[[Any], T]) -> T:
    content, error = _load(path)
    if error:
        raise error
    return check(content)


def _load(path: Path) -> tuple[Any, ChecksumError | None]:
    """The content of a JSON file, or the text of another one, and the error if its checksum, or
    that of one of its rows, is wrong. Raises OSError, and ValueError for broken JSON.
    """
    text = path.read_bytes().decode("utf-8")
    try:
        content = json.loads(text) if path.suffix == ".json" else text
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    try:
        if isinstance(content, str):
            verify_text(content)
        for item in content if isinstance(content, list) else [content]:
            if isinstance(item, dict):
                verify(item)
    except ChecksumError as error:
        return content, error
    return content, None


# The recipe


def is_run(folder: str | Path) -> bool:
    return Path(folder, RECIPE).is_file()


def config_of(run_dir: Path) -> Path:
    """The recipe in a run's folder.

    Raises UserError if the folder is no run, or the recipe has changed.
    """
    config = run_dir / RECIPE
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

    The folder is None if run.json is missing or damaged. Raises UserError if the folder is not a
    run.
    """
    require_folder(run_dir, "use a run folder; for a recipe, run `valence train`")
    recipe = config_of(run_dir)
    place = read_undamaged_facts(run_dir).get(
        "cwd"
    )  # if damaged, the facts in a checkpoint are used
    return recipe, Path(place) if isinstance(place, str) else None


def require_folder(path: Path, fix: str, code: str = "run-not-found") -> None:
    """Raise UserError for a path that is not a folder. code: of the error for a file."""
    if not path.exists():
        raise missing_run(path, fix)
    if not path.is_dir():
        raise UserError("the path is a file", code=code, where=str(path), fix=fix)


def method_in_recipe(run_dir: Path) -> str:
    """The method in a config.yaml as runs write it, "" if it is missing."""
    try:
        text = (run_dir / RECIPE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"^method: *(\S+)", text, re.MULTILINE)
    return match[1] if match else ""


def newest_checkpoint(run_dir: Path) -> int | None:
    """The step of the newest checkpoint."""
    try:
        names = os.listdir(run_dir / CHECKPOINTS)
    except OSError:
        return None
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]{1,18}", name)]
    return max(steps, default=None)


# The log


def parse_log(content: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The record of each line with its number, from 1; None for an incomplete record."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            yield number, {**record, "step": int(record["step"])}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            yield number, None


def read_log(log: Path) -> list[dict[str, Any]]:
    """The complete records of a log, oldest first; empty without a log."""
    try:
        content = log.read_bytes()
    except OSError:
        return []
    return [record for _, record in parse_log(content) if record is not None]


def read_log_end(log: Path) -> tuple[list[dict[str, Any]], bool]:
    """The complete records at the end of a log, and whether the log has no others."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            content = file.read()
    except OSError:
        return [], True
    records = [record for _, record in parse_log(content) if record is not None]
    return records, size <= TAIL


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's log, oldest first, with non-finite numbers as floats; empty without a
    log.

    Raises UserError for a damaged record.
    """
    log = run_dir / LOG
    records: list[dict[str, Any]] = []
    for number, record in parse_log(log.read_bytes() if log.exists() else b""):
        if record is None:
            raise UserError(
                "the record is damaged",
                code="file-damaged",
                where=f"{log}:{number}",
                fix="resume the run, which repairs its log, or remove the line",
            )
        records.append({name: _as_number(value) for name, value in record.items()})
    return records


def _as_number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _merged_log(log: Path, problems: list[str]) -> tuple[Json, ...]:
    """Records by ascending step. Several lines of one step (evaluation, resumed run) are merged."""
    try:
        content = log.read_bytes() if log.exists() else b""
    except OSError as error:
        problems.append(f"{log.name} could not be read: {error}")
        return ()
    by_step: dict[int, dict[str, Any]] = {}
    num_lines = content.count(b"\n") + 1
    for number, record in parse_log(content):
        if record is not None:
            by_step.setdefault(record["step"], {}).update(record)
        else:
            last = " (the last line: the run was stopped while writing it)"
            problems.append(
                f"{log.name}:{number} is not a complete record and was left out"
                f"{last if number == num_lines else ''}"
            )
    return tuple(by_step[step] for step in sorted(by_step))


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
        first = _read_or_note(paths.pop(0), _check_evaluation, None, problems)
    while paths and last is None:
        last = _read_or_note(paths.pop(), _check_evaluation, None, problems)
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
    content, error = _load(path)
    if error:
        raise ValueError("its checksum is wrong")
    evaluation = _check_evaluation(content)
    return evaluation["step"], bands_of(evaluation["rows"])


# The expected content of each file. All functions raise ValueError for other content.


def _check_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return {name: item for name, item in value.items() if name != KEY}


def _check_samples(value: Any) -> tuple[Json, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("not a list of JSON objects")
    return tuple(value)


def _check_audit(value: Any) -> dict[str, Any]:
    audits = _check_object(value)
    if not all(isinstance(audit, dict) for audit in audits.values()):
        raise ValueError("not an audit with an object for each list of rows")
    return audits


def _check_facts(value: Any) -> dict[str, Any]:
    facts = _check_object(value)
    kinds = {
        "changed": list,
        "warnings": list,
        "notes": list,
        "versions": dict,
        "feedback_test": dict,
    }
    if not all(isinstance(facts.get(name, kind()), kind) for name, kind in kinds.items()):
        raise ValueError("not the facts of a run")
    return facts


def _check_evaluation(value: Any) -> Json:
    evaluation = _check_object(value)
    kinds = {"step": int, "metrics": dict, "rows": list}
    if not all(isinstance(evaluation.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("not an evaluation with step, metrics and rows")
    if not all(isinstance(row, dict) for row in evaluation["rows"]):
        raise ValueError("not an evaluation whose rows are objects")
    return evaluation


@lru_cache(maxsize=4)  # a run that ends reads its recipe several times
def _parse_yaml(text: str) -> Json:
    from ruamel.yaml import YAML, YAMLError

    try:
        value: Any = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value
