"""What lies in a run's folder, read back for the page. Whatever is missing or torn is named and left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valence.errors import UserError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What was found in a run's folder; empty where there was nothing. ``problems``: what could not be read."""

    path: Path
    config: Json
    config_text: str
    audit: Json
    metrics: tuple[Json, ...]
    evaluations: tuple[Json, ...]
    test: Json | None
    samples: tuple[Json, ...]
    run: Json
    problems: tuple[str, ...]


def read_run(run_dir: Path) -> RunData:
    """Read a run's folder. Files that are absent or damaged leave a gap; damage is listed in ``problems``."""
    if not run_dir.is_dir():
        raise UserError("there is no such run folder", where=str(run_dir), fix="name the folder that run.dir named")
    problems: list[str] = []
    config_text = _read(run_dir / "config.yaml", str, "", problems)
    evaluations = [_read(path, _evaluation, None, problems) for path in run_dir.glob("eval/step-*.json")]
    return RunData(
        path=run_dir,
        config=_read(run_dir / "config.yaml", _yaml_object, {}, problems),
        config_text=config_text,
        audit=_read(run_dir / "audit.json", _audit_object, {}, problems),
        metrics=_read_metrics(run_dir / "metrics.jsonl", problems),
        evaluations=tuple(sorted(filter(None, evaluations), key=lambda e: e["step"])),
        test=_read(run_dir / "eval" / "test.json", _evaluation, None, problems),
        samples=_read(run_dir / "samples.json", _json_objects, (), problems),
        run=_read(run_dir / "run.json", _json_object, {}, problems),
        problems=tuple(dict.fromkeys(problems)),
    )


def _read(path: Path, parse: Callable[[str], Any], missing: Any, problems: list[str]) -> Any:
    """The parsed file, or ``missing`` when it is absent or (which is noted) damaged."""
    if not path.exists():
        return missing
    try:
        return parse(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read: {error}")
        return missing


def _json_object(text: str) -> Json:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _json_objects(text: str) -> tuple[Json, ...]:
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("not a list of JSON objects")
    return tuple(value)


def _audit_object(text: str) -> Json:
    value = _json_object(text)
    if not all(isinstance(found, dict) for found in value.values()):
        raise ValueError("not an audit with an object for each list of rows")
    return value


def _evaluation(text: str) -> Json:
    value = _json_object(text)
    kinds = {"step": int, "metrics": dict, "rows": list}
    if not all(isinstance(value.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("not an evaluation with step, metrics and rows")
    return value


def _yaml_object(text: str) -> Json:
    from ruamel.yaml import YAML, YAMLError

    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


def _read_metrics(path: Path, problems: list[str]) -> tuple[Json, ...]:
    """Records by ascending step; what a later line says of the same step (evaluation, a resumed run) is merged in."""
    by_step: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _json_object(line.decode("utf-8"))
            step = int(record["step"])
            by_step.setdefault(step, {}).update(record, step=step)
        except (ValueError, KeyError, TypeError):
            last = " (the last line: the run was stopped while writing it)" if place == len(lines) else ""
            problems.append(f"{path.name}:{place} is not a whole record and was left out{last}")
    return tuple(by_step[step] for step in sorted(by_step))


# --- HTML from data -------------------------------------------------------------------------------------------------
