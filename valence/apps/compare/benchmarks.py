"""Benchmarks of both models: the results of lm-eval, the LM Evaluation Harness."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from valence.errors import UserError
from valence.statistics import deviation
from valence.storage import read_json

RESULT_FILES = "results_*.json"
"""Files that lm-eval writes to a folder."""
STDERR = "_stderr"
FIX = "run the same version of lm_eval on both models, with the same tasks and options"
NORMAL_95 = 1.96
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Memory address of a function in a task's settings, which differs between calls of lm_eval."""


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A metric of a task for both models.

    metric: with the filter of the replies, if it has one. The standard errors are those of lm-eval;
    None without one. low, high: the 95 % interval of the difference; None if it is unknown, or if
    its standard error is 0. is_paired: whether the interval is computed from the differences on the
    questions. higher_is_better: None if unknown.
    """

    task: str
    metric: str
    baseline: float
    candidate: float
    baseline_stderr: float | None
    candidate_stderr: float | None
    low: float | None
    high: float | None
    is_paired: bool
    higher_is_better: bool | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.candidate - self.baseline}


def read_benchmarks(baseline: Path, candidate: Path) -> list[BenchmarkResult]:
    """Compare the results of two models, from a file of each one or the newest file of a folder.

    Raises UserError for other files, and for results of different tasks or options.
    """
    paths = [_result_file(path) for path in (baseline, candidate)]
    contents = [{**(content := _read(path)), "samples": _samples(path, content)} for path in paths]
    return compare_results(contents[0], contents[1], str(paths[1]))


def compare_results(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any], where: str
) -> list[BenchmarkResult]:
    """Compare the results of two models, as lm-eval returns and writes them.

    where: the place of the candidate's results. With the samples of both models, the interval of a
    difference is paired: mean(d) +- 1.96 sd(d) / sqrt(n), with d [n] the differences on the
    questions (Miller 2024, arXiv 2411.00640, section 4.2). Without, it is that of independent
    results, which is wider in general.

    Raises UserError for results of different tasks, options or questions.
    """
    settings = [dict(_settings(content)) for content in (baseline, candidate)]
    for name in dict.fromkeys([*settings[0], *settings[1]]):
        values = [side.get(name) for side in settings]
        if values[0] != values[1]:
            shown = [json.dumps(value, default=str)[:60] for value in values]
            raise UserError(
                f"the results differ in {name}: {shown[0]} (baseline) and {shown[1]} (candidate)",
                code="benchmarks-differ",
                where=where,
                fix=FIX,
            )
    _check_questions(baseline, candidate, where)
    return [*_results(baseline, candidate)]


def _check_questions(baseline: Mapping[str, Any], candidate: Mapping[str, Any], where: str) -> None:
    """Raise UserError if the samples of both models are on different questions."""
    samples = [content.get("samples", {}) for content in (baseline, candidate)]
    for task in samples[0].keys() & samples[1].keys():
        hashes = [
            {(sample["doc_id"], sample.get("doc_hash")) for sample in side[task]}
            for side in samples
        ]
        if hashes[0] != hashes[1]:
            raise UserError(
                f"the two models answered different questions from {task}",
                code="benchmarks-differ",
                where=where,
                fix="evaluate both models again with the same version of the task's data set",
            )


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
        content = read_json(path)
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


def _samples(path: Path, content: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task, from the files that lm-eval writes next to its results with
    ``--log_samples``.
    """
    date = path.stem.removeprefix("results_")
    samples: dict[str, list[dict[str, Any]]] = {}
    for task in content["configs"]:
        file = path.with_name(f"samples_{task}_{date}.jsonl")
        if file.is_file():
            try:
                lines = file.read_text(encoding="utf-8").split("\n")
                samples[task] = [json.loads(line) for line in lines if line]
            except (OSError, ValueError) as error:
                raise UserError(
                    f"the file cannot be read ({error})",
                    code="file-not-readable",
                    where=str(file),
                    fix="remove it, or evaluate the model again",
                ) from error
    return samples


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
            error_key = f"{metric}{STDERR},{filter_name}"
            errors = [_number(values.get(error_key)), _number(others.get(error_key))]
            scores = [
                _scores(content, task, metric, filter_name, number)
                for content, number in ((baseline, numbers[0]), (candidate, numbers[1]))
            ]
            error = 0.0
            is_paired = False
            if scores[0] is not None and scores[1] is not None:
                is_paired, error = True, _paired_error(scores[0], scores[1])
            elif errors[0] and errors[1]:
                error = math.hypot(errors[0], errors[1])
            low = high = None
            if error:
                difference, margin = numbers[1] - numbers[0], NORMAL_95 * error
                low, high = difference - margin, difference + margin
            name = metric if filter_name == "none" else f"{metric} ({filter_name})"
            yield BenchmarkResult(
                task=task,
                metric=name,
                baseline=numbers[0],
                candidate=numbers[1],
                baseline_stderr=errors[0],
                candidate_stderr=errors[1],
                low=low,
                high=high,
                is_paired=is_paired,
                higher_is_better=directions.get(metric),
            )


def _scores(
    content: Mapping[str, Any], task: str, metric: str, filter_name: str, value: float
) -> dict[tuple[str, int], float] | None:
    """The score of each question, by its subtask and number; of a group, those of all subtasks.

    None: they are not stored, or their mean is not the value of the metric, such as that of a
    perplexity or of a group that weights its subtasks equally.
    """
    scores: dict[tuple[str, int], float] = {}
    for subtask in _subtasks(content, task):
        for sample in content.get("samples", {}).get(subtask, ()):
            if sample.get("filter", "none") == filter_name:
                score = sample.get(metric)
                score = float(score) if isinstance(score, bool) else _number(score)
                if score is None:
                    return None
                scores[subtask, sample["doc_id"]] = score
    if len(scores) < 2 or not math.isclose(
        math.fsum(scores.values()) / len(scores), value, rel_tol=1e-6, abs_tol=1e-9
    ):
        return None
    return scores


def _subtasks(content: Mapping[str, Any], task: str) -> list[str]:
    """The tasks of a group, without groups; of a task, the task itself."""
    children = content.get("group_subtasks", {}).get(task, ())
    return [name for child in children for name in _subtasks(content, child)] or [task]


def _paired_error(
    baseline: Mapping[tuple[str, int], float], candidate: Mapping[tuple[str, int], float]
) -> float:
    """The standard error of the mean difference of two scores of the same questions."""
    differences = [candidate[key] - score for key, score in baseline.items()]
    return deviation(differences) / math.sqrt(len(differences))


def _number(value: object) -> float | None:
    """The value, or None if it is no finite number; lm-eval writes "N/A" as well."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
