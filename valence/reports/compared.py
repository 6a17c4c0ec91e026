"""Several runs read for a comparison: where they lie, what each has, which settings differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valence.errors import UserError
from valence.reports.curves import OF_A_ROUND, spent
from valence.reports.formatting import exact, flatten, visible
from valence.reports.rundata import Json, RunData, read_run
from valence.reports.runs import RunLine, list_runs
from valence.reports.stats import finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the runs that are compared.

    label: the shortest end of its path that no other run has. recipe: settings by dotted name;
    made: digests of its rows, and versions, likewise. records: of the log, by step. evaluations:
    numbers of the held-out rows by step, names without ``eval/``.
    test: those of the test rows. rows: of the last evaluation, by id. seconds: it has trained for,
    None when nothing says so.
    gaps: what it lacks.
    """

    label: str
    line: RunLine
    method: str
    recipe: Mapping[str, Any]
    made: Mapping[str, Any]
    records: tuple[Json, ...]
    evaluations: Mapping[int, Json]
    test: Json
    rows: Mapping[str, Json]
    seconds: float | None
    gaps: tuple[str, ...]

    @property
    def last(self) -> Json:
        """The numbers of the last evaluation."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    @property
    def step(self) -> int:
        return max(self.line.step, self.records[-1]["step"] if self.records else 0)


def find_runs(places: Sequence[Path]) -> list[RunLine]:
    """The runs that these folders are or hold, each once: in the order given, those within one
    folder by name.

    Raises UserError for what is no folder, or holds no run.
    """
    found: dict[Path, RunLine] = {}
    for place in places:
        if not place.is_dir():
            is_file = place.exists()
            what = "this is a file" if is_file else "there is no such folder"
            code = "path-is-file" if is_file else "run-not-found"
            fix = "name a run's folder, or a folder that holds runs"
            raise UserError(what, code=code, where=str(place), fix=fix)
        lines = sorted(list_runs(place), key=lambda line: line.path)
        if not lines and ((place / "metrics.jsonl").is_file() or (place / "config.yaml").is_file()):
            lines = [RunLine(place, "unreadable", problem="run.json is missing")]
        if not lines:
            fix = "name a run's folder (`valence train` printed it), or a folder that holds runs"
            raise UserError(
                "the folder is no run, and holds none",
                code="run-not-found",
                where=str(place),
                fix=fix,
            )
        for line in lines:
            found.setdefault(line.path.resolve(), line)
    return list(found.values())


def read_compared(lines: Sequence[RunLine]) -> list[Compared]:
    """The runs with what a comparison needs of them; of their evaluations only the last one's rows
    are kept.
    """
    labels = shortest_labels([line.path for line in lines])
    return [
        _compared(label, line, read_run(line.path))
        for label, line in zip(labels, lines, strict=True)
    ]


def shortest_labels(paths: Sequence[Path]) -> list[str]:
    """Of each path as many of its last parts as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    lengths = [1] * len(parts)
    while True:
        ends = [own[-length:] for own, length in zip(parts, lengths, strict=True)]
        often = Counter(ends)
        longer = [i for i, end in enumerate(ends) if often[end] > 1 and lengths[i] < len(parts[i])]
        if not longer:
            return [visible("/".join(end)) for end in ends]
        for i in longer:
            lengths[i] += 1


def _compared(label: str, line: RunLine, run: RunData) -> Compared:
    evaluations = _evaluations(run)
    rows = run.last["rows"] if run.last else []
    versions, digests = run.run.get("versions"), run.run.get("rows")
    made = {
        "rows": digests if isinstance(digests, Mapping) else {},
        "versions": versions if isinstance(versions, Mapping) else {},
    }
    told = run.run.get("seconds")
    seconds = (
        float(told)
        if finite(told)
        else max((at for at in trained_seconds(run.metrics) if at), default=None)
    )
    return Compared(
        label=label,
        line=line,
        method=" + ".join(_methods(run.config)) or line.method,
        recipe=dotted(run.config),
        made={name: value for name, value in dotted(made).items() if value != {}},
        records=run.metrics,
        evaluations=evaluations,
        test=run.test["metrics"] if run.test else {},
        rows={str(row["id"]): row for row in rows if "id" in row},
        seconds=seconds,
        gaps=tuple(_gaps(line, run, evaluations)),
    )


def _methods(config: Json) -> list[str]:
    mix = config.get("mix")
    parts = [config, *(mix if isinstance(mix, list) else [])]
    return [str(part["method"]) for part in parts if isinstance(part, Mapping) and "method" in part]


def _evaluations(run: RunData) -> dict[int, Json]:
    """Those in the log; the first and the last as their files have them."""
    logged = {
        r["step"]: {n.removeprefix("eval/"): v for n, v in r.items() if n.startswith("eval/")}
        for r in run.metrics
    }
    found: dict[int, Json] = {step: numbers for step, numbers in logged.items() if numbers}
    for evaluation in filter(None, (run.first, run.last)):
        found[evaluation["step"]] = {**found.get(evaluation["step"], {}), **evaluation["metrics"]}
    return dict(sorted(found.items()))


def _gaps(line: RunLine, run: RunData, evaluations: Mapping[int, Json]) -> Iterable[str]:
    """What the run lacks, a clause each."""
    if line.state not in ("done", "scored"):
        of = f" of {line.total}" if line.total else ""
        yield line.problem or f"it is not finished: {line.state} at step {line.step}{of}"
    if not run.config:
        yield (
            "its settings are not known (no whole config.yaml): they are left out of the "
            "settings that differ"
        )
    if not run.metrics:
        yield "it has logged nothing: it has no curves"
    if not evaluations:
        yield "it was not evaluated on held-out rows"
    elif run.last is None or run.last["step"] < max(evaluations):
        yield f"the rows of its last evaluation (step {max(evaluations)}) are not there"
    for name, value in (evaluations[max(evaluations)] if evaluations else {}).items():
        if not finite(value):
            yield f"its last eval/{name} is {exact(value)}"
    yield from run.problems


def trained_seconds(records: Sequence[Json]) -> list[float | None]:
    """Of each record the seconds of training so far, in steps and in rounds, without evaluations
    and saves; None where the log does not say.
    """
    total, found = 0.0, []
    for record, seconds in zip(records, spent(records), strict=True):
        total += sum(seconds.get(name, 0.0) for name in ("seconds", *OF_A_ROUND))
        found.append(total if "seconds" in seconds or not record["step"] else None)
    return found


# --- Settings
# ------------------------------------------------------------------------------------------


def dotted(config: Json) -> dict[str, Any]:
    """Settings by dotted name, also within lists of mappings: ``data.train.0.path``."""
    found: dict[str, Any] = {}
    for name, value in flatten(config).items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            found |= dotted({f"{name}.{i}": item for i, item in enumerate(value)})
        else:
            found[name] = value
    return found


def differing(runs: Sequence[Compared]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs whose settings are known, then digests of rows
    and versions: by name, of each run the value as a recipe has it, empty where it has none.
    """
    return _differing([run.recipe for run in runs]) | _differing([run.made for run in runs])


def _differing(each: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    known = [settings for settings in each if settings]
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for settings in known for name in settings):
        if len({exact(settings[name]) if name in settings else None for settings in known}) > 1:
            found[name] = [exact(settings[name]) if name in settings else "" for settings in each]
    return found


def alike(runs: Sequence[Compared], *sections: str) -> bool:
    """Whether the runs are known to have the same settings in these sections."""
    own = [
        {n: exact(v) for n, v in run.recipe.items() if n.split(".")[0] in sections} for run in runs
    ]
    return all(run.recipe for run in runs) and all(settings == own[0] for settings in own)


def some_untrained(runs: Sequence[Compared]) -> bool:
    """Whether some of the runs were measured only before their first step, and others after."""
    return len({max(run.evaluations) == 0 for run in runs if run.evaluations}) > 1


def same_rows(runs: Sequence[Compared]) -> bool:
    """Whether the last evaluations, as far as their rows are known, were on the same rows."""
    return len({frozenset(run.rows) for run in runs if run.rows}) <= 1


def same_test_rows(runs: Sequence[Compared]) -> bool:
    """Whether the runs that were tested, as far as the digests of their rows are known, were so on
    the same rows.
    """
    own = [
        frozenset((n, exact(v)) for n, v in run.made.items() if n.startswith("rows.data.test."))
        for run in runs
        if run.test
    ]
    return len(set(filter(None, own))) <= 1
