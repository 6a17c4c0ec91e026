"""The result of a sweep: which configuration is best, and whether that is more than noise.

Configurations are compared by the mean of the objective over seeds. The difference of two is paired
by seed. Its interval is Student's, at a level that holds for the differences of all pairs of
configurations together (Bonferroni): which of them is the best is chosen by the same values, so the
comparisons with it are the largest of all pairs. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from rich.table import Table

from valence.apps.sweep.grid import label_of, short_names
from valence.apps.sweep.objective import VERDICT_METRICS
from valence.apps.sweep.state import PAGE, TRIALS, SweepState, Trial
from valence.reports.charts import esc, figure
from valence.reports.comparison_charts import STROKES, line_style
from valence.reports.formatting import duration, exact, number, text, visible
from valence.reports.page import MARK
from valence.reports.rendering import Charts, plotly_js, render_page
from valence.reports.run_record import RunRecord
from valence.reports.verdict import run_verdict
from valence.statistics import deviation, finite, mean, student_interval
from valence.storage import atomic_write

CONFIDENCE = 0.95
MIN_SEEDS = 3
"""Seeds that the advice asks for: Student's quantile is 12.7 with two, and 4.3 with three."""
MAX_CURVES = 24
NAMES = {"waiting": "not started", "running": "interrupted", "stopped": "stopped early"}


@dataclass(frozen=True)
class Candidate:
    """A configuration with the trials of all seeds.

    mean: of the objective over seeds, None unless all are done.
    """

    values: Mapping[str, Any]
    trials: tuple[Trial, ...]
    is_default: bool

    @property
    def label(self) -> str:
        return label_of(self.values)

    @property
    def is_complete(self) -> bool:
        return all(trial.state == "done" for trial in self.trials)

    def by_seed(self, name: str = "value") -> dict[int, float]:
        """A result of each finished trial."""
        values = {t.seed: getattr(t, name) for t in self.trials if t.state == "done"}
        return {seed: value for seed, value in values.items() if value is not None}

    @property
    def mean(self) -> float | None:
        return mean(self.by_seed().values()) if self.is_complete else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the objective over two or more seeds."""
        values = list(self.by_seed().values())
        return deviation(values) if len(values) > 1 else None

    @property
    def note(self) -> str:
        """What the table says about the configuration besides its values."""
        parts = ["the recipe"] if self.is_default else []
        for state in ("failed", "stopped", "running", "waiting"):
            seeds = [str(t.seed) for t in self.trials if t.state == state]
            if seeds:
                parts.append(f"{NAMES.get(state, state)}: seed {', '.join(seeds)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Difference:
    """By how much one configuration is better than another, paired by seed.

    low, high: interval of the mean difference, None if the noise is unknown.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def exceeds_noise(self) -> bool | None:
        """None if the noise is unknown."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0

    def as_dict(self) -> dict[str, Any]:
        bounds = {"mean": self.mean, "low": self.low, "high": self.high}
        return {**bounds, "exceeds_noise": self.exceeds_noise}


def difference(
    one: Mapping[int, float], other: Mapping[int, float], sign: int, comparisons: int
) -> Difference:
    """The difference of two configurations from their values by seed.

    sign: 1 if larger values are better, else -1. comparisons: for which the intervals hold
    together. The noise is unknown with fewer than two common seeds, and if the difference is the
    same for all of them although it is not 0. At least one seed is common.
    """
    values = [sign * (one[seed] - other[seed]) for seed in one if seed in other]
    middle = math.fsum(values) / len(values)
    spread = max(values) - min(values)
    if len(values) < 2 or (spread <= 1e-9 * max(map(abs, values)) and middle != 0):
        return Difference(middle, None, None)
    low, high = student_interval(values, 1 - (1 - CONFIDENCE) / max(1, comparisons))
    return Difference(middle, low, high)


def candidates(state: SweepState) -> list[Candidate]:
    """The configurations: complete ones from the best to the worst, the recipe's first among equal
    ones, then the others in the order of the grid.
    """
    groups: dict[tuple[int | None, str], list[Trial]] = {}
    for trial in state.included:  # a search may suggest the same values twice
        groups.setdefault((trial.number, trial.key), []).append(trial)
    unsorted = [
        Candidate(trials[0].values, tuple(trials), trials[0].is_default)
        for trials in groups.values()
    ]

    def place(candidate: Candidate) -> tuple[bool, float, bool]:
        value = candidate.mean
        is_default = candidate.is_default and value is not None
        return value is None, 0.0 if value is None else -state.sign * value, not is_default

    return sorted(unsorted, key=place)


def compute_results(state: SweepState) -> dict[str, Any]:
    """The results as JSON values, which do not depend on times and interruptions."""
    ranked = candidates(state)
    complete = [c for c in ranked if c.mean is not None]
    best = complete[0] if complete else None
    comparisons = math.comb(len(complete), 2)
    rows: list[dict[str, Any]] = []
    for candidate in ranked:
        behind = None
        if best is not None and candidate is not best and candidate.mean is not None:
            behind = difference(best.by_seed(), candidate.by_seed(), state.sign, comparisons)
        rows.append(
            {
                "label": candidate.label,
                "values": dict(candidate.values),
                "is_default": candidate.is_default,
                "by_seed": {str(seed): value for seed, value in candidate.by_seed().items()},
                "mean": candidate.mean,
                "deviation": candidate.deviation,
                "behind_best": behind and behind.as_dict(),
                "runs": [f"{TRIALS}/{trial.name}" for trial in candidate.trials],
                "note": candidate.note,
            }
        )
    return {
        "best": best and best.label,
        "comparisons": comparisons,
        "confidence": CONFIDENCE,
        "configurations": rows,
        "test": _test_confirmation(state, complete),
        "held_out_interval": _held_out_interval(state, best),
        "conclusions": conclusions(state, ranked),
        "failed": [{"trial": t.name, "reason": t.reason} for t in _in(state, "failed")],
        "stopped": [{"trial": t.name, "reason": t.reason} for t in _in(state, "stopped")],
        "not_part": [t.name for t in state.trials if not t.included],
    }


def _in(state: SweepState, name: str) -> list[Trial]:
    return [trial for trial in state.included if trial.state == name]


def _held_out_interval(state: SweepState, best: Candidate | None) -> dict[str, Any] | None:
    """The interval of the best configuration's objective over held-out rows, for its first seed."""
    if best is None or state.objective not in VERDICT_METRICS[1:]:
        return None
    run_dir = state.run_dir(best.trials[0])
    verdict = run_verdict(RunRecord.read(run_dir)) if run_dir.is_dir() else None
    if verdict is None or verdict.low is None:
        return None
    return {
        "low": verdict.low,
        "high": verdict.high,
        "rows": verdict.count,
        "no_change": verdict.baseline,
        "verdict": verdict.state,
    }


def _test_confirmation(state: SweepState, complete: Sequence[Candidate]) -> dict[str, Any] | None:
    """The objective on test rows of the best configuration and of the recipe's, which no choice
    has used.
    """
    default = next((c for c in complete if c.is_default), None)
    if not complete or not complete[0].by_seed("test"):
        return None
    best = complete[0].by_seed("test")
    result: dict[str, Any] = {"best": mean(best.values())}
    others = {} if default in (None, complete[0]) else default.by_seed("test")
    if best.keys() & others.keys():
        result["recipe"] = mean(others.values())
        result["difference"] = difference(best, others, state.sign, 1).as_dict()
    return result


# Sentences


def conclusions_of(state: SweepState) -> list[str]:
    return conclusions(state, candidates(state))


def conclusions(state: SweepState, ranked: Sequence[Candidate]) -> list[str]:
    """What the sweep shows, one sentence or two each."""
    complete = [c for c in ranked if c.mean is not None]
    if not complete:
        return ["No configuration has finished with all of its seeds."]
    best, *others = complete
    assert best.mean is not None
    num_seeds = len(best.trials)
    seeds = f"mean of {num_seeds} seeds" if num_seeds > 1 else "one seed"
    lines = [f"Best: {best.label}, with {state.objective} {number(best.mean)} ({seeds})."]
    if equal := [other.label for other in others if other.mean == best.mean]:
        lines.append(f"Exactly the same value: {'; '.join(equal)}.")
    if len(complete) < len(ranked):
        lines.append(f"Only {len(complete)} of {len(ranked)} configurations have finished.")
    if best.is_default and others:
        lines.append("These are the values of the recipe: the sweep gives no reason to change it.")
    comparisons = math.comb(len(complete), 2)
    differences = [
        (other, difference(best.by_seed(), other.by_seed(), state.sign, comparisons))
        for other in others
    ]
    if num_seeds == 1:
        if others:
            lines.append(
                "With one seed the noise of training is unknown, so this may be chance. To measure "
                f"it, rerun the same command with --seeds {MIN_SEEDS}."
            )
    else:
        lines += _against_noise(differences)
    if default := next((d for c, d in differences if c.is_default), None):
        lines.append(_against_default(default))
    elif not best.is_default:
        lines.append(
            "The recipe's values were not tried (--no-baseline), or have not finished, so that the "
            "best is not compared with them."
        )
    if others:
        lines.append(
            f"The best of {len(complete)} is chosen because its value is high, partly by luck: "
            "expect less on new rows."
        )
        lines.append(_confirmation(state, complete))
    if rows := _held_out_interval(state, best):
        lines.append(
            f"Seeds do not cover the choice of held-out rows: over these {number(rows['rows'])} "
            f"rows, the 95 % interval of the best configuration with seed {best.trials[0].seed} is "
            f"{number(rows['low'])} to {number(rows['high'])}."
        )
        if rows["verdict"] != "improved":
            lines.append(_no_improvement(rows))
    return lines


def _no_improvement(rows: Mapping[str, Any]) -> str:
    if rows["verdict"] == "form":
        return (
            "Length and form of the answers alone may explain this: the held-out rows do not show "
            "that any configuration improves the model beyond them."
        )
    position = "includes" if rows["verdict"] == "unclear" else "lies below"
    return (
        f"This interval {position} {number(rows['no_change'])}, the value before training: the "
        "held-out rows do not show that any configuration improves the model."
    )


def _against_noise(differences: Sequence[tuple[Candidate, Difference]]) -> list[str]:
    """Which configurations the best one exceeds by more than the noise of seeds."""
    worse = [c.label for c, d in differences if d.exceeds_noise]
    within = [c.label for c, d in differences if d.exceeds_noise is False]
    unknown = [c.label for c, d in differences if d.exceeds_noise is None]
    lines: list[str] = []
    if within:
        lines.append(
            f"Within seed noise of the best, and not distinguishable from it: {'; '.join(within)}."
        )
    if worse:
        lines.append(f"Worse than the best by more than seed noise: {'; '.join(worse)}.")
    if unknown:
        lines.append(
            f"The same difference with every seed, so that its noise cannot be estimated: "
            f"{'; '.join(unknown)}."
        )
    return lines


def _against_default(behind: Difference) -> str:
    middle = f"{number(behind.mean)} better than the recipe's values"
    if behind.low is None or behind.high is None:
        return f"The best is {middle}; whether that is more than noise is unknown."
    interval = f"({_interval(behind)}, for all comparisons together)"
    if behind.exceeds_noise:
        return f"The best is {middle} {interval}: more than seed noise."
    return f"The best is {middle} {interval}: within seed noise, no reason to change the recipe."


def _confirmation(state: SweepState, complete: Sequence[Candidate]) -> str:
    test = _test_confirmation(state, complete)
    if test is None:
        return (
            "To confirm it, evaluate the best and the recipe's run on rows that no choice has "
            "used: name them under data.test before a sweep, or run valence evaluate RUN --data "
            "FILE."
        )
    line = f"On the test rows, which no choice has used, the best has {number(test['best'])}"
    if "recipe" not in test:
        return f"{line}."
    behind = test["difference"]
    interval = ""
    if behind["low"] is not None:
        values = Difference(behind["mean"], behind["low"], behind["high"])
        interval = f", {_interval(values)}"
    return (
        f"{line} and the recipe's values {number(test['recipe'])} (difference "
        f"{behind['mean']:+.3g}{interval})."
    )


def _interval(value: Difference) -> str:
    return f"95 % interval {value.low:+.3g} to {value.high:+.3g}"


# Tables and the page


def table_rows(state: SweepState) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of configurations."""
    results = compute_results(state)
    rows: list[list[str]] = []
    names = list(results["configurations"][0]["values"]) if results["configurations"] else []
    num_seeds = len({trial.seed for trial in state.included})
    for row in results["configurations"]:
        behind = row["behind_best"]
        cells = [text(row["mean"])]
        if num_seeds > 1:
            cells.append(text(row["deviation"]))
        if row["label"] == results["best"]:
            cells.append("best")
        elif behind is None:
            cells.append("")
        else:
            cells.append(number(behind["mean"]))
        if num_seeds > 1:
            low, high = (behind["low"], behind["high"]) if behind else (None, None)
            cells.append("" if low is None else f"{low:+.3g} to {high:+.3g}")
        rows.append([*(exact(row["values"][name]) for name in names), *cells, row["note"]])
    header = [*short_names(names), str(state.objective or "objective")]
    header += ["deviation"] if num_seeds > 1 else []
    header += ["behind best"]
    header += ["95 % interval"] if num_seeds > 1 else []
    return [*header, ""], rows


def terminal_table(state: SweepState) -> Table:
    header, rows = table_rows(state)
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(header):
        justify = "left" if place == 0 else "right"
        table.add_column(visible(name), no_wrap=place > 0, overflow="fold", justify=justify)
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def write_sweep_page(state: SweepState) -> None:
    """Write ``sweep.html``. Raises OSError."""
    header, rows = table_rows(state)
    charts = Charts()
    ranked = candidates(state)
    sections: dict[str, Any] = {
        "Result": {"lines": conclusions(state, ranked)},
        "Configurations": {"header": header, "rows": rows},
    }
    if plotly_js():
        figures = _charts_by_setting(state, ranked)
        if figures:
            sections["By setting"] = {"charts": charts.add(figures), "note": SETTING_NOTE}
        if curve := _curves(state, ranked):
            sections["Held-out curves"] = {"charts": charts.add(curve), "note": ""}
    sections["Trials"] = {"trials": [_trial_cells(state, trial) for trial in state.trials]}
    page = render_page(
        "sweep.html.j2",
        mark=Markup(MARK),
        title=f"Sweep of {len(ranked)} configurations",
        sections=sections,
        charts=charts,
    )
    atomic_write(state.folder / PAGE, page)


SETTING_NOTE = (
    "Small points are trials, large points are means over seeds. Points above one value differ in "
    "the other settings."
)


def _trial_cells(state: SweepState, trial: Trial) -> dict[str, Any]:
    note = trial.reason or ("" if trial.included else "not part of the current grid")
    return {
        "name": trial.name,
        "report": f"{TRIALS}/{quote(trial.name)}/report.html",
        "has_report": (state.run_dir(trial) / "report.html").exists(),
        "cells": [
            NAMES.get(trial.state, trial.state),
            trial.value,
            trial.step,
            duration(trial.seconds) if trial.seconds else "",
            trial.computed,
            trial.cached,
            note,
        ],
    }


def _charts_by_setting(state: SweepState, ranked: Sequence[Candidate]) -> dict[str, Any]:
    """The objective against each setting that has several values, by its name."""
    complete = [c for c in ranked if c.mean is not None]
    names = list(complete[0].values) if complete else []
    figures: dict[str, Any] = {}
    for name in names:
        values = [c.values[name] for c in complete]
        if len({exact(value) for value in values}) < 2:
            continue
        is_numeric = all(finite(value) for value in values)
        is_log = is_numeric and min(values) > 0 and max(values) >= 3 * min(values)
        axis = {"title": {"text": esc(name)}, "type": "log" if is_log else None}
        places = values if is_numeric else [esc(exact(value)) for value in values]
        points = [
            (place, value)
            for place, candidate in zip(places, complete, strict=True)
            for value in candidate.by_seed().values()
        ]
        traces = [
            _markers([x for x, _ in points], [y for _, y in points], 5, "trials"),
            _markers(places, [c.mean for c in complete], 11, "means"),
        ]
        figures[f"{state.objective} by {name}"] = figure(
            traces, legend=False, height=18, xaxis=axis, hovermode="closest"
        )
    return figures


def _markers(x: Sequence[Any], y: Sequence[Any], size: int, name: str) -> dict[str, Any]:
    colour, _ = line_style(0)
    marker = {"size": size, "color": colour, "opacity": 0.5 if size < 10 else 0.9}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": list(y),
        "name": name,
        "marker": marker,
    }


def _curves(state: SweepState, ranked: Sequence[Candidate]) -> dict[str, Any]:
    """The objective against steps of the first seed of each configuration."""
    traces: list[dict[str, Any]] = []
    for place, candidate in enumerate(ranked[:MAX_CURVES]):
        run_dir = state.run_dir(candidate.trials[0])
        if not run_dir.is_dir():
            continue
        records = RunRecord.read(run_dir).metrics
        points = [
            (record["step"], record[f"eval/{state.objective}"])
            for record in records
            if finite(record.get(f"eval/{state.objective}"))
        ]
        colour, dash = line_style(place)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "name": esc(candidate.label),
                "line": {"color": colour, "dash": dash if dash in STROKES else "solid"},
            }
        )
    if not traces:
        return {}
    axis = {"title": {"text": "optimizer steps"}}
    title = f"{state.objective}, first seed"
    return {title: figure(traces, legend=True, height=26, xaxis=axis)}
