"""Compare several runs on a self-contained page, or in Markdown: results, settings that differ,
curves, and the rows on which the runs disagree.

This module collects what the templates ``comparison.html.j2`` and ``comparison.md.j2`` show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from valence.errors import UserError
from valence.files import check_path
from valence.reports.charts import title_of
from valence.reports.comparable_runs import (
    HEADLINES,
    ComparedRun,
    has_same_rows,
    has_same_scale,
    has_same_test_rows,
    has_untrained,
)
from valence.reports.comparison_charts import (
    STROKES,
    curves,
    curves_over_time,
    frontiers,
    line_style,
)
from valence.reports.formatting import duration, exact, text, visible
from valence.reports.page import MARK
from valence.reports.rendering import (
    Charts,
    percent,
    plotly_js,
    render,
    render_page,
)
from valence.reports.rows import Json, several, worth
from valence.statistics import finite, ranks
from valence.storage import atomic_write, writing

BEST = "\N{BLACK CIRCLE}"

MAX_DISAGREEMENTS = 20
"""Maximum number of rows on which the runs disagree."""

MAX_TEXT = 300
"""Maximum characters shown of a text."""

DIRECTIONS: tuple[tuple[str, int], ...] = (
    (r"loss|rewards/(brier|calibration_error|error)", -1),
    (r"rewards/(margins|accuracies|auc|pearson|spearman)|auc|value/explained", 1),
    (r"reward/(std|std_of_prompt)", 0),
    (r"reward/.+", 1),
)
"""Patterns of metric names, and whether lower (-1) or higher (1) is better; also for the metrics of
attributes and of mixed methods.
"""

Key = tuple[str, str]
"""A row's id, and the number of its answer if it has several."""


def gaps(runs: Sequence[ComparedRun]) -> list[str]:
    """Missing parts of runs, and reasons why metrics cannot be compared, as sentences."""
    messages = [f"{run.label}: {gap}" for run in runs for gap in run.gaps]
    if not has_same_rows(runs):
        sets = [set(run.rows) for run in runs if run.rows]
        counts = ", ".join(f"{run.label} {text(len(run.rows))}" for run in runs if run.rows)
        messages.insert(
            0,
            f"The runs were evaluated on different held-out rows ({counts}; "
            f"{text(len(set.intersection(*sets)))} in common): their held-out metrics are not "
            f"comparable, and no best value is marked.",
        )
    steps = {max(run.evaluations) for run in runs if run.evaluations}
    if len(steps) > 1:
        step_list = ", ".join(map(text, sorted(steps)))
        messages.append(f"The last evaluations of the runs are at different steps ({step_list}).")
    if has_untrained(runs):
        messages.append(
            "Some runs were only evaluated before their first step: the best value is marked "
            "without them."
        )
    return messages


# Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """A section with a table. notes: sentences. numeric: all columns but the first are numbers."""

    title: str
    notes: tuple[str, ...]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: bool = True


def tables(runs: Sequence[ComparedRun]) -> list[TablePart]:
    """All tables of a comparison."""
    return [summary(runs), settings(runs), *results(runs)]


def summary(runs: Sequence[ComparedRun]) -> TablePart:
    """Method, state, size and main metrics, one row per run."""
    names = [name for name in HEADLINES if any(name in run.last for run in runs)]
    same_rows = has_same_rows(runs)
    columns = [_marked(runs, n, [run.last.get(n) for run in runs], same_rows) for n in names]
    rows = [[*_facts(run), *(column[i] for column in columns)] for i, run in enumerate(runs)]
    header = ("run", "method", "state", "steps", "tokens", "time", *(f"eval/{n}" for n in names))
    notes = _legend(rows, "column")
    not_comparable = [
        f"eval/{name}"
        for name in names
        if not has_same_scale([run for run in runs if name in run.last], name)
    ]
    if not_comparable:
        notes.append(
            f"Not comparable, and therefore not marked: {', '.join(not_comparable)}. They depend "
            f"on the method, loss.* or reward of each run."
        )
    return TablePart(title="Summary", notes=tuple(notes), header=header, rows=rows)


def _legend(rows: Sequence[Sequence[str]], unit: str) -> list[str]:
    has_marks = any(cell.startswith(BEST) for row in rows for cell in row[1:])
    return [f"{BEST} marks the best value of each {unit}."] if has_marks else []


def _facts(run: ComparedRun) -> list[str]:
    tokens = [r["tokens_seen"] for r in run.records if finite(r.get("tokens_seen"))]
    total = run.line.total
    return [
        run.label,
        run.method,
        run.line.state,
        text(run.step) if total in (None, run.step) else f"{text(run.step)} of {text(total)}",
        text(tokens[-1]) if tokens else "",
        "" if run.seconds is None else duration(run.seconds),
    ]


def settings(runs: Sequence[ComparedRun]) -> TablePart:
    """The settings, digests of rows and versions that differ, one row each."""
    differing = _differing([run.settings for run in runs]) | _differing([r.origins for r in runs])
    rows = [[name, *map(cut, values)] for name, values in differing.items()]
    note = "All other settings are equal. An empty cell means that the run has no such setting."
    if not rows:
        rows = [["none", *("" for _ in runs)]]
        note = "All known settings are equal."
    header = ("setting", *(run.label for run in runs))
    return TablePart(
        title="Settings that differ", notes=(note,), header=header, rows=rows, numeric=False
    )


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By name the values of all runs, empty where a run has none. Runs without any are ignored."""
    known = [run for run in settings if run]
    values = {
        name: [exact(run[name]) if name in run else None for run in known]
        for name in dict.fromkeys(name for run in known for name in run)
    }
    return {
        name: [exact(run[name]) if name in run else "" for run in settings]
        for name, distinct in values.items()
        if len(set(distinct)) > 1
    }


def results(runs: Sequence[ComparedRun]) -> list[TablePart]:
    """All metrics of the last evaluations and of the test rows, one row each."""
    same_test_rows = has_same_test_rows(runs)
    different = (
        "The runs have different test rows: these metrics are not comparable, and no best value is "
        "marked.",
    )
    groups = (
        (
            "Held-out metrics",
            ("At the last evaluation of each run.",),
            [run.last for run in runs],
            has_same_rows(runs),
        ),
        (
            "Test rows, after training",
            () if same_test_rows else different,
            [run.test for run in runs],
            same_test_rows,
        ),
    )
    header = ("metric", *(run.label for run in runs))
    parts: list[TablePart] = []
    for title, notes, metrics, same_rows in groups:
        names = dict.fromkeys(name for run_metrics in metrics for name in run_metrics)
        rows = [
            [visible(name), *_marked(runs, name, [m.get(name) for m in metrics], same_rows)]
            for name in names
        ]
        if rows:
            notes = (*notes, *_legend(rows, "row"))
            parts.append(TablePart(title=title, notes=notes, header=header, rows=rows))
    return parts


def _marked(
    runs: Sequence[ComparedRun], name: str, values: Sequence[object], same_rows: bool
) -> list[str]:
    """The values of a metric as text, the best of them marked if the runs can be compared by it."""
    sign = direction(name)
    pairs = [(run, v) for run, v in zip(runs, values, strict=True) if finite(v)]
    skip_untrained = has_untrained(runs)
    known = [v for run, v in pairs if not (skip_untrained and max(run.evaluations, default=1) == 0)]
    is_comparable = (
        sign
        and same_rows
        and len(set(known)) > 1
        and has_same_scale([run for run, _ in pairs], name)
    )
    best = max(known, key=lambda value: sign * value) if is_comparable else None
    return [
        "" if v is None else f"{BEST} {text(v)}" if best is not None and v == best else text(v)
        for v in values
    ]


def direction(name: str) -> int:
    """-1 if a lower value of a metric is better, 1 if a higher one is, 0 if unknown.

    Names are without ``eval/``.
    """
    for pattern, sign in DIRECTIONS:
        if re.fullmatch(rf"(\w+/)?({pattern})(/.+)?", name):
            return sign
    return 0


# Rows on which the runs disagree


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A row that the runs rank differently.

    places: by run the share of its other rows with a smaller reward (equal ones count half), and
    the reward. texts: the prompt, and the answers if all runs have the same ones; otherwise
    ``answers`` has those of each run.
    """

    origin: str
    places: Mapping[str, tuple[float, float]]
    texts: Mapping[str, str]
    answers: Mapping[str, str]

    @property
    def title(self) -> str:
        ranks = (f"{label} {percent(share)}" for label, (share, _) in self.places.items())
        return f"{self.origin}: {', '.join(ranks)}"

    @property
    def all_answers(self) -> str:
        """The answers in one line."""
        shared = {name: answer for name, answer in self.texts.items() if name != "prompt"}
        return " / ".join(
            f"{name}: {answer}" for name, answer in {**shared, **self.answers}.items()
        )


def disagreements(runs: Sequence[ComparedRun]) -> list[Disagreement]:
    """The rows of two or more last evaluations whose ranks among all rewards differ most."""
    rewards = {
        run.label: {(id, n): r for id, row in run.rows.items() for n, r in _rewards(row).items()}
        for run in runs
    }
    places = {label: _places(of_run) for label, of_run in rewards.items()}
    spreads: dict[Key, float] = {}
    for key in dict.fromkeys(key for of_run in places.values() for key in of_run):
        shares = [of_run[key] for of_run in places.values() if key in of_run]
        if len(shares) > 1 and max(shares) > min(shares):
            spreads[key] = max(shares) - min(shares)
    largest = sorted(spreads, key=lambda key: -spreads[key])[:MAX_DISAGREEMENTS]
    return [
        _disagreement(
            runs, key, {n: (p[key], rewards[n][key]) for n, p in places.items() if key in p}
        )
        for key in largest
    ]


def _disagreement(
    runs: Sequence[ComparedRun], key: Key, places: Mapping[str, tuple[float, float]]
) -> Disagreement:
    id, number = key
    rows = {run.label: run.rows[id] for run in runs if run.label in places}
    answers = {label: _answers(row, number) for label, row in rows.items()}
    row, first = next(iter(rows.values())), next(iter(answers.values()))
    is_same = all(texts == first for texts in answers.values())
    return Disagreement(
        origin=str(row.get("origin") or id),
        places=places,
        texts={"prompt": cut(str(row.get("prompt", "")))}
        | ({name: cut(answer) for name, answer in first.items()} if is_same else {}),
        answers={}
        if is_same
        else {label: cut("\n\n".join(texts.values())) for label, texts in answers.items()},
    )


def _answers(row: Json, number: str) -> dict[str, str]:
    names = (f"completion_{number}",) if number else ("completion", "chosen", "rejected")
    return {name.replace("_", " "): str(row[name]) for name in names if name in row}


def _rewards(row: Json) -> dict[str, float]:
    """The reward of a row (``worth``); with several answers the reward of each, by number."""
    if (reward := worth(row)) is not None:
        return {"": reward}
    return {str(n): reward for n, reward in enumerate(several(row))}


def _places(rewards: Mapping[Key, float]) -> dict[Key, float]:
    """For each reward the share of the others that are smaller; equal ones count half."""
    positions = ranks(list(rewards.values()))
    return {k: rank / max(1, len(rewards) - 1) for k, rank in zip(rewards, positions, strict=True)}


def cut(content: str) -> str:
    """The beginning of a text, with the number of characters that are left out."""
    if len(content) <= MAX_TEXT:
        return content
    num_hidden = len(content) - MAX_TEXT
    return f"{content[:MAX_TEXT]}\N{HORIZONTAL ELLIPSIS} ({num_hidden:,} more characters)"


# The page and the Markdown


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """The comparison as a self-contained HTML page."""
    charts = Charts()
    sections: dict[str, Any] = {"Limits of this comparison": gaps(runs)}
    sections |= {part.title: part for part in tables(runs)}
    sections |= _curve_sections(runs, charts) if plotly_js() else {"Curves": "no plotly"}
    sections["Rows on which the runs disagree"] = disagreements(runs)
    return render_page(
        "comparison.html.j2",
        mark=Markup(MARK),
        title=f"{len(runs)} runs compared",
        labels=[run.label for run in runs],
        styles=[(run.label, *_stroke(place)) for place, run in enumerate(runs)],
        sections={title: content for title, content in sections.items() if content},
        charts=charts,
    )


def _stroke(place: int) -> tuple[str, str]:
    colour, dash = line_style(place)
    return colour, STROKES[dash]


def _curve_sections(runs: Sequence[ComparedRun], charts: Charts) -> dict[str, Any]:
    """Sections with a note and charts."""
    held_out, training = curves(runs)
    groups = [
        ("Curves of held-out rows", "Against optimizer steps.", held_out),
        (
            "Curves of training",
            "Against optimizer steps. Points of long curves are means of neighbouring records.",
            training,
        ),
        (
            "Against time",
            "The runs need different times per step. These curves are against training time, "
            "without evaluations and saves.",
            curves_over_time(runs),
        ),
        *((title, note, {title: figure}) for title, (note, figure) in frontiers(runs).items()),
    ]
    sections = {
        title: {"note": note, "charts": charts.add({title_of(n): f for n, f in figures.items()})}
        for title, note, figures in groups
        if figures
    }
    return sections or {"Curves": "no common metrics"}


def comparison_markdown(runs: Sequence[ComparedRun]) -> str:
    """The tables of the comparison as Markdown."""
    return render(
        "comparison.md.j2",
        mark=Markup(MARK),
        labels=[run.label for run in runs],
        gaps=gaps(runs),
        parts=tables(runs),
        disagreements=disagreements(runs),
    )


def write_out(path: Path, content: str) -> None:
    """Write a page or Markdown in one step.

    Raises UserError if another file exists there, or if it cannot be written.
    """
    refuse_others(path)
    fix = "free disk space, or choose a file in an existing folder where you have write permission"
    with writing(path, fix):
        atomic_write(path, content)


def refuse_others(path: Path) -> None:
    """Raise UserError if the path exists and was not written by `valence report`."""
    check_path(path)
    try:
        is_replaceable = not path.exists() or (
            path.is_file() and MARK.encode() in path.read_bytes()
        )
    except OSError:
        is_replaceable = False
    if not is_replaceable:
        raise UserError(
            "the path exists and was not written by `valence report`",
            code="path-exists",
            where=str(path),
            fix="choose another file with --out",
        )
