"""Read several runs for a comparison, and decide what of them can be compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valence.errors import UserError
from valence.reports.charts import OF_A_ROUND, spent
from valence.reports.formatting import exact, flatten, visible
from valence.reports.rows import Json
from valence.reports.run_record import LOG, RunRecord, is_run, require_folder
from valence.reports.runs import RunLine, list_runs
from valence.statistics import finite

HEADLINES = (
    "reward/mean",
    "rewards/accuracies",
    "rewards/auc",
    "rewards/spearman",
    "rewards/margins",
    "loss",
    "kl",
)
"""Metrics of held-out rows in the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the compared runs.

    label: the shortest end of its path that identifies it. settings, origins: of its recipe, and
    the digests of its rows and its versions, by dotted name. records: of the log, by step.
    evaluations: metrics of held-out rows by step, without the prefix ``eval/``. test: those of the
    test rows. rows: of the last evaluation, by id. seconds: of training, None if unknown. gaps:
    what is missing.
    """

    label: str
    line: RunLine
    method: str
    settings: Mapping[str, Any]
    origins: Mapping[str, Any]
    records: tuple[Json, ...]
    evaluations: Mapping[int, Json]
    test: Json
    rows: Mapping[str, Json]
    seconds: float | None
    gaps: tuple[str, ...]

    @property
    def last(self) -> Json:
        """The metrics of the last evaluation."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    @property
    def step(self) -> int:
        return max(self.line.step, self.records[-1]["step"] if self.records else 0)

    def has_same_scale(self, other: ComparedRun, name: str) -> bool:
        """Whether a metric means the same in both runs: losses and implicit rewards depend on the
        method and its settings, scores on the reward.
        """
        if re.fullmatch(r"(\w+/)?(loss|rewards/(chosen|rejected|margins|error))(/.+)?", name):
            sections = ("method", "loss", "mix")
        elif re.fullmatch(r"(\w+/)?reward/.+", name):
            sections = ("reward",)
        else:
            return True
        settings, other_settings = (
            {n: exact(v) for n, v in run.settings.items() if n.split(".")[0] in sections}
            for run in (self, other)
        )
        return bool(self.settings and other.settings) and settings == other_settings


def has_same_scale(runs: Sequence[ComparedRun], name: str) -> bool:
    """Whether a metric means the same in all of these runs."""
    return all(runs[0].has_same_scale(run, name) for run in runs)


# Reading runs


def find_runs(places: Sequence[Path]) -> list[RunLine]:
    """The runs that these folders are or contain, each once: in the order given, those within one
    folder by name.

    Raises UserError for a path that is no folder or contains no run.
    """
    runs: dict[Path, RunLine] = {}
    for place in places:
        fix = "use a run folder, or a folder that contains runs"
        require_folder(place, fix, code="path-is-file")
        lines = sorted(list_runs(place), key=lambda line: line.path)
        if not lines and ((place / LOG).is_file() or is_run(place)):
            lines = [RunLine(place, "unreadable", problem="run.json is missing")]
        if not lines:
            raise UserError(
                "the folder is not a run and contains none",
                code="run-not-found",
                where=str(place),
                fix="use a run folder (`valence train` prints it), or a folder that contains runs",
            )
        for line in lines:
            runs.setdefault(line.path.resolve(), line)
    return list(runs.values())


def read_runs(lines: Sequence[RunLine]) -> list[ComparedRun]:
    """Read what a comparison needs. Only the rows of the last evaluation are kept in memory."""
    labels = shortest_labels([line.path for line in lines])
    return [
        _compared_run(label, line, RunRecord.read(line.path))
        for label, line in zip(labels, lines, strict=True)
    ]


def shortest_labels(paths: Sequence[Path]) -> list[str]:
    """For each path as many of its last parts as distinguish it from the others."""
    parts = [path.resolve().parts for path in paths]
    lengths = [1] * len(parts)
    while True:
        ends = [path[-length:] for path, length in zip(parts, lengths, strict=True)]
        counts = Counter(ends)
        longer = [i for i, end in enumerate(ends) if counts[end] > 1 and lengths[i] < len(parts[i])]
        if not longer:
            return [visible("/".join(end)) for end in ends]
        for i in longer:
            lengths[i] += 1


def _compared_run(label: str, line: RunLine, run: RunRecord) -> ComparedRun:
    evaluations = _evaluations(run)
    origins = {name: run.facts.get(name) for name in ("rows", "versions")}
    origins = {name: value for name, value in origins.items() if isinstance(value, Mapping)}
    seconds, times = run.facts.get("seconds"), trained_seconds(run.metrics)
    parts = [run.config, *(mix if isinstance(mix := run.config.get("mix"), list) else [])]
    methods = [str(p["method"]) for p in parts if isinstance(p, Mapping) and "method" in p]
    return ComparedRun(
        label=label,
        line=line,
        method=" + ".join(methods) or line.method,
        settings=dotted(run.config),
        origins={name: value for name, value in dotted(origins).items() if value != {}},
        records=run.metrics,
        evaluations=evaluations,
        test=run.test["metrics"] if run.test else {},
        rows={str(row["id"]): row for row in (run.last["rows"] if run.last else []) if "id" in row},
        seconds=float(seconds) if finite(seconds) else max(filter(None, times), default=None),
        gaps=tuple(_gaps(line, run, evaluations)),
    )


def _evaluations(run: RunRecord) -> dict[int, Json]:
    """The evaluations in the log; the first and the last as their files have them."""
    logged = {
        r["step"]: {n.removeprefix("eval/"): v for n, v in r.items() if n.startswith("eval/")}
        for r in run.metrics
    }
    evaluations: dict[int, Json] = {step: metrics for step, metrics in logged.items() if metrics}
    for evaluation in filter(None, (run.first, run.last)):
        step = evaluation["step"]
        evaluations[step] = {**evaluations.get(step, {}), **evaluation["metrics"]}
    return dict(sorted(evaluations.items()))


def _gaps(line: RunLine, run: RunRecord, evaluations: Mapping[int, Json]) -> Iterable[str]:
    """What the run lacks, one clause each."""
    if line.state not in ("done", "scored"):
        total = f" of {line.total}" if line.total else ""
        yield line.problem or f"it is not finished: {line.state} at step {line.step}{total}"
    if not run.config:
        yield "its settings are unknown (no complete config.yaml) and not compared"
    if not run.metrics:
        yield "its log is empty: it has no curves"
    if not evaluations:
        yield "it was not evaluated on held-out rows"
    elif run.last is None or run.last["step"] < max(evaluations):
        yield f"the rows of its last evaluation (step {max(evaluations)}) are missing"
    for name, value in (evaluations[max(evaluations)] if evaluations else {}).items():
        if not finite(value):
            yield f"its last eval/{name} is {exact(value)}"
    yield from run.problems


def trained_seconds(records: Sequence[Json]) -> list[float | None]:
    """For each record the seconds of training so far, in steps and in rounds, without evaluations
    and saves; None where the log does not tell.
    """
    total, times = 0.0, list[float | None]()
    for record, seconds in zip(records, spent(records), strict=True):
        total += sum(seconds.get(name, 0.0) for name in ("seconds", *OF_A_ROUND))
        times.append(total if "seconds" in seconds or not record["step"] else None)
    return times


def dotted(config: Json) -> dict[str, Any]:
    """Settings by dotted name, also within lists of mappings: ``data.train.0.path``."""
    settings: dict[str, Any] = {}
    for name, value in flatten(config).items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            settings |= dotted({f"{name}.{i}": item for i, item in enumerate(value)})
        else:
            settings[name] = value
    return settings


# What can be compared


def has_untrained(runs: Sequence[ComparedRun]) -> bool:
    """Whether some of the runs were evaluated only before their first step, and others later."""
    return len({max(run.evaluations) == 0 for run in runs if run.evaluations}) > 1


def has_same_rows(runs: Sequence[ComparedRun]) -> bool:
    """Whether the last evaluations, as far as their rows are known, have the same rows."""
    return len({frozenset(run.rows) for run in runs if run.rows}) <= 1


def has_same_test_rows(runs: Sequence[ComparedRun]) -> bool:
    """Whether the test rows are the same, as far as their digests are known."""
    digests = [
        frozenset((n, exact(v)) for n, v in run.origins.items() if n.startswith("rows.data.test."))
        for run in runs
        if run.test
    ]
    return len(set(filter(None, digests))) <= 1
