"""Benchmarks of both models: the result files of lm-eval, the LM Evaluation Harness."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from valence.errors import UserError

RESULT_FILES = "results_*.json"
"""Files that lm-eval writes to a folder."""
STDERR = "_stderr"
FIX = "run lm_eval on both models with the same tasks and options"
NORMAL_95 = 1.96
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Memory address of a function in a task's settings, which differs between calls of lm_eval."""


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A metric of a task for both models.

    metric: with the filter of the replies, if it has one. low, high: the 95 % interval of the
    difference; None if lm-eval gives no standard errors, or gives 0, because all answers have the
    same score. higher_is_better: None if unknown.
    """

    task: str
    metric: str
    baseline: float
    candidate: float
    low: float | None
    high: float | None
    higher_is_better: bool | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.candidate - self.baseline}


def read_benchmarks(baseline: Path, candidate: Path) -> list[BenchmarkResult]:
    """Compare the results of two models, from a file of each one or the newest file of a folder.

    The interval of a difference is that of independent results, with the standard errors of
    lm-eval. Both models answer the same questions, so it is wider than a paired one in general.

    Raises UserError for other files, and for results of different tasks or options.
    """
    paths = [_result_file(path) for path in (baseline, candidate)]
    contents = [_read(path) for path in paths]
    settings = [dict(_settings(content)) for content in contents]
    for name in dict.fromkeys([*settings[0], *settings[1]]):
        values = [side.get(name) for side in settings]
        if values[0] != values[1]:
            shown = [json.dumps(value, default=str)[:60] for value in values]
            raise UserError(
                f"the results differ in {name}: {shown[0]} (baseline) and {shown[1]} (candidate)",
                code="benchmarks-differ",
                where=str(paths[1]),
                fix=FIX,
            )
    return [*_results(contents[0], contents[1])]


def _result_file(path: Path) -> Path:
    """The file itself, or the newest result file of a folder."""
    if not path.is_dir():
        return path
    files = sorted(path.rglob(RESULT_FILES), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UserError(
            f"the folder has no {RESULT_FILES}",
            code="benchmarks-missing",
            where=str(path),
            fix="pass the folder that lm_eval got as --output_path, or a result file in it",
        )
    return files[-1]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the file cannot be read ({error})",
            code="file-not-readable",
            where=str(path),
            fix="pass a result file of lm_eval, results_DATE.json",
        ) from error
    tables = ("results", "configs", "versions", "n-samples")
    if not isinstance(content, dict) or not all(isinstance(content.get(t), dict) for t in tables):
        raise UserError(
            "the file is not a result file of lm-eval",
            code="benchmarks-foreign",
            where=str(path),
            fix="pass a result file of lm_eval, results_DATE.json",
        )
    return content


def _settings(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of everything that must be equal for both models."""
    yield "tasks", sorted(content["results"])
    for task, config in content["configs"].items():
        # metadata contains the arguments of the model
        for name, value in config.items():
            if name != "metadata":
                yield f"{task}.{name}", ADDRESS.sub("", json.dumps(value, sort_keys=True))
        yield f"{task}.version", content["versions"].get(task)
        yield f"{task}.samples", content["n-samples"].get(task)
    run = content.get("config", {})
    for name in ("gen_kwargs", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed"):
        yield name, run.get(name)
    yield "system_instruction", content.get("system_instruction")
    yield "fewshot_as_multiturn", content.get("fewshot_as_multiturn")
    yield "apply_chat_template", bool(content.get("chat_template"))


def _results(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any]
) -> Iterator[BenchmarkResult]:
    for task, values in baseline["results"].items():
        others = candidate["results"][task]
        directions = baseline.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith(STDERR):
                continue
            numbers = [_number(value), _number(others.get(key))]
            if numbers[0] is None or numbers[1] is None:
                continue
            low = high = None
            error_key = f"{metric}{STDERR},{filter_name}"
            errors = [_number(values.get(error_key)) or 0.0, _number(others.get(error_key)) or 0.0]
            if all(errors):
                difference, margin = numbers[1] - numbers[0], NORMAL_95 * math.hypot(*errors)
                low, high = difference - margin, difference + margin
            name = metric if filter_name == "none" else f"{metric} ({filter_name})"
            is_higher = directions.get(metric)
            yield BenchmarkResult(task, name, numbers[0], numbers[1], low, high, is_higher)


def _number(value: object) -> float | None:
    """The value, or None if it is no finite number; lm-eval writes "N/A" as well."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
