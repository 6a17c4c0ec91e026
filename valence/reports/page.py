"""The report of one run: a self-contained ``report.html``, or Markdown, from what the run's folder
contains, finished or not.

This module collects what the templates ``report.html.j2`` and ``report.md.j2`` show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from valence.reports.charts import (
    KTO,
    calibration,
    curves,
    equals_reference,
    length_histograms,
    mean_width,
    reward_histograms,
    spent,
)
from valence.reports.definitions import DEFINITIONS, by_importance
from valence.reports.diagnostics import diagnose, other_warnings
from valence.reports.formatting import (
    audit_tables,
    compare,
    duration,
    exact,
    flatten,
    number,
    text,
    visible,
)
from valence.reports.rendering import Charts, plotly_js, render, render_page
from valence.reports.rows import (
    SIDES,
    WEAK_SIGNAL,
    Json,
    has_signals,
    is_pair,
    is_rollout,
    is_weak,
    moved,
    per_token,
    row_lists,
    signal_lists,
    value,
)
from valence.reports.rows import verdict as label_of
from valence.reports.run_record import REPORT, RunRecord
from valence.reports.verdict import forgetting_line, run_verdict
from valence.statistics import finite
from valence.storage import atomic_write
from valence.types import plural

MARK = "<!-- written by valence report -->"
"""In every file that `valence report` writes outside a run's folder: such files may be replaced."""

MAX_ROWS = 50
"""Rows shown of one table of the audit."""

MAX_LINES = 12
"""Warnings shown at once; the others open on a click."""

RELOAD = 30
"""Seconds after which the page of a running run is reloaded."""

TIMED_RECORDS = 50
"""Records over which the time of a step is measured."""

HEADLINES = {
    "reward/mean": "reward",
    "rewards/auc": "AUC",
    "rewards/accuracies": "accuracy",
    "rewards/spearman": "rank correlation",
    "loss": "loss",
    "rewards/margins": "margin",
    "logps/token": "log-probability per token",
    "signal/mean": "signal per token",
    "rollout/length": "tokens per answer",
    "kl": "KL divergence",
}
"""Metrics of held-out rows that are shown as tiles, most important first, with their titles."""

MAX_TILES = 5

LIST_TITLES = {"train": "Training rows", "eval": "Held-out rows", "test": "Test rows"}

ROWS_PER_LIST = 20
ROWS_AT_ONCE = 6
"""Rows shown at once when a list is open; the others open on a click."""

MAX_ANSWER, MAX_QUESTION, MAX_PROMPT = 240, 150, 400
"""Characters shown of an answer and of a prompt in a closed row, and of a prompt above answers."""

MAX_TEXT = 8_000
"""Characters shown of one text."""

MAX_BYTES = 1_200_000
"""Bytes of all texts on one page, so that a phone can load it."""


def write_page(run_dir: Path, status: str | None = None) -> Path:
    """Write ``report.html`` into the run's folder and return its path.

    status: of the run, if its run.json is not up to date. Raises UserError if there is no such
    folder, and OSError if the page cannot be written.
    """
    run = RunRecord.read(run_dir)
    if status is not None:
        run = replace(run, facts={**run.facts, "status": status})
    path = run_dir / REPORT
    atomic_write(path, render_report(run))
    return path


def render_report(run: RunRecord) -> str:
    """The report as HTML."""
    charts, budget, summary = Charts(), TextBudget(), _summary(run)
    answers, warnings, metrics = _answers(run, budget), _warnings(run), _metrics(run)
    sections = {
        # One draw of a sampled answer may be much better or worse than the next.
        **({"Answers": answers} if not _are_drawn(run) else {}),
        "Warnings": warnings,
        "Metrics": metrics,
        "Answers": answers,
        "Curves": _curves(run, charts),
        "Rewards": _rewards(run, charts),
        "Feedback" if run.reads_feedback else "Teacher": _teacher(run, charts),
        "Held-out rows": _held_out_rows(run, budget),
        "Training rows": _training_rows(run, budget),
        "Data": _data(run.audit, charts),
        "Settings": _settings(run, summary),
        "Reproduce": _reproduction(run),
    }
    return render_page(
        "report.html.j2",
        title=f"{summary['method']} on {Path(summary['model']).name or summary['model']}",
        status=str(run.facts.get("status", "unfinished")),
        verdict=run_verdict(run),
        forgetting=forgetting_line(run.facts.get("forgetting")),
        urgent=[diagnosis for diagnosis in diagnose(run) if diagnosis.is_urgent],
        summary=summary,
        progress=_progress(run, summary["steps"]) if _is_running(run) else None,
        sections={title: content for title, content in sections.items() if content},
        charts=charts,
        has_plotly=bool(plotly_js()),
        definitions=DEFINITIONS,
        at_once=ROWS_AT_ONCE,
        max_rows=MAX_ROWS,
        max_lines=MAX_LINES,
    )


def report_markdown(run: RunRecord) -> str:
    """The report as Markdown for a pull request or a log book."""
    diagnoses = diagnose(run)
    return render(
        "report.md.j2",
        mark=Markup(MARK),
        verdict=run_verdict(run),
        forgetting=forgetting_line(run.facts.get("forgetting")),
        diagnoses=[f"{diagnosis.message} {diagnosis.advice}" for diagnosis in diagnoses],
        summary=_summary(run),
        status=run.facts.get("status"),
        held_out=_results_markdown(run),
        test=_measured("test rows", run.test) if run.test else None,
        teacher=_teacher(run, Charts()),
        warnings=[
            *run.problems,
            *run.audit_warnings,
            *other_warnings(run, diagnoses),
            *map(str, run.facts.get("notes", ())),
        ],
        command=str(run.facts.get("command") or ""),
        versions=run.facts.get("versions", {}),
    )


def _results_markdown(run: RunRecord) -> dict[str, Any] | None:
    if run.first is None or run.last is None:
        return None
    if run.first is run.last:
        return _measured("held-out rows", run.last)
    steps = f"before (step {run.first['step']})", f"after (step {run.last['step']})"
    rows = compare(run.first["metrics"], run.last["metrics"])
    return {"header": ("held-out rows", *steps, "change"), "rows": rows}


def _measured(title: str, evaluation: Json) -> dict[str, Any]:
    """One evaluation as a table."""
    metrics = evaluation["metrics"]
    return {"header": (title, f"step {evaluation['step']}"), "rows": list(metrics.items())}


# The head of the page


def _summary(run: RunRecord) -> dict[str, Any]:
    """What was trained on what, and for how long."""
    settings = flatten(run.config)
    model = settings.get("model.name", settings.get("model"))
    model = str(model if isinstance(model, str) and model else "an unknown model")
    rank, has_adapter = settings.get("model.lora.rank"), settings.get("model.adapter")
    weights = "an adapter" if has_adapter else "all weights"
    files = _paths(settings.get("data.train"))
    reward, seconds = settings.get("reward"), run.facts.get("seconds")
    return {
        "is_known": bool(run.config),
        "method": str(run.config.get("method", "A run")),
        "model": model,
        "short_model": _short_path(model),
        "weights": f"a LoRA adapter of rank {text(rank)}" if rank else weights,
        "files": files,
        "short_files": [_short_path(path) for path in files],
        "reward": reward if isinstance(reward, str) else "",
        "steps": run.metrics[-1]["step"] if run.metrics else 0,
        "seconds": seconds if finite(seconds) else None,
        "training_seconds": math.fsum(
            record["seconds"] for record in run.metrics if finite(record.get("seconds"))
        ),
        "ended_early": run.facts.get("ended_early"),
    }


def _paths(sources: object) -> list[str]:
    records = sources if isinstance(sources, list) else []
    return [str(source.get("path")) for source in records if isinstance(source, Mapping)]


def _held_out_files(setting: object) -> str:
    """The files to evaluate on, or the share that is held out from the training rows."""
    if isinstance(setting, float):
        return f"{setting:.3g} of the training rows, by prompt"
    return ", ".join(_paths(setting))


def _short_path(path: str) -> str:
    """The last part of an absolute path; a hub id unchanged."""
    return Path(path).name if Path(path).is_absolute() else path


def _is_running(run: RunRecord) -> bool:
    return run.facts.get("status") == "running"


def _progress(run: RunRecord, step: int) -> dict[str, Any]:
    """Steps done, speed, and time left of a running run."""
    total, seconds = run.facts.get("total_steps"), seconds_per_step(run.metrics)
    total = total if finite(total) and total > 0 else None
    facts = [f"step {number(step)} of {number(total)}" if total else f"step {number(step)}"]
    if seconds is not None:
        facts.append(f"{duration(seconds)} per step")
        if total:
            facts.append(f"{duration(max(0.0, total - step) * seconds)} left")
    facts.append(f"written at {datetime.now(UTC):%H:%M:%S} UTC")
    return {"total": total, "facts": facts, "reload": RELOAD}


def seconds_per_step(metrics: Sequence[Json]) -> float | None:
    """Seconds per step over the latest records, with all phases (evaluations, saves, rounds); None
    if the records do not tell.
    """
    latest = metrics[-TIMED_RECORDS - 1 :]
    seconds = math.fsum(phase for record in spent(latest)[1:] for phase in record.values())
    steps = latest[-1]["step"] - latest[0]["step"] if latest else 0
    return seconds / steps if seconds > 0 and steps > 0 else None


# Sections. Each is what the template shows, or empty if there is nothing to show.


def _warnings(run: RunRecord) -> dict[str, Any] | None:
    diagnoses = diagnose(run)
    cards = [diagnosis for diagnosis in diagnoses if not diagnosis.is_urgent]
    lines = [*run.problems, *other_warnings(run, diagnoses), *run.audit_warnings]
    return {"cards": cards, "lines": lines} if cards or lines else None


def _metrics(run: RunRecord) -> dict[str, Any] | None:
    tables: list[tuple[str, Sequence[str], Sequence[Any]]] = []
    if run.first is not None and run.last is not None:
        if run.first["step"] == run.last["step"]:
            header, rows = (f"step {run.last['step']}",), dict(run.last["metrics"])
            ordered: list[Any] = [(name, rows[name]) for name in by_importance(rows)]
        else:
            header = (f"step {run.first['step']}", f"step {run.last['step']}", "change")
            changes = {row[0]: row for row in compare(run.first["metrics"], run.last["metrics"])}
            ordered = [changes[name] for name in by_importance(changes)]
        title = f"Held-out rows ({number(len(run.last['rows']))})"
        tables.append((title, ("metric", *header), ordered))
    if run.test:
        metrics = run.test["metrics"]
        ordered = [(name, metrics[name]) for name in by_importance(metrics)]
        header = ("metric", f"step {run.test['step']}")
        tables.append(("Test rows, after training", header, ordered))
    evaluations = [e for e in (run.first, run.last, run.test) if e is not None]
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation["metrics"])
    defined = [name for name in by_importance(names) if name in DEFINITIONS]
    return {"tiles": _tiles(run), "tables": tables, "defined": defined} if tables else None


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """The main metrics of held-out rows, with their first values."""
    if run.last is None or run.first is None:
        return []
    first, last = run.first["metrics"], run.last["metrics"]
    tiles: list[tuple[str, str, str]] = []
    for name, title in HEADLINES.items():
        if not finite(now := last.get(name)) or (name == "kl" and KTO in last):
            continue
        before = first.get(name)
        below = f"step {run.last['step']}"
        if finite(before) and run.first is not run.last:
            below = f"step {run.first['step']}: {number(float(before) + 0.0)}"
        if name == "rewards/auc" and (counts := _label_counts(run.last["rows"])):
            below = f"{counts}; {below}"
        tiles.append((f"{title}, held out", number(float(now) + 0.0), below))
    return tiles[:MAX_TILES]


def _label_counts(rows: Sequence[Json]) -> str:
    """The numbers of thumbs that an AUC is computed from."""
    labels = [label for row in rows if (label := label_of(row)) is not None]
    return f"{sum(labels):,} up, {len(labels) - sum(labels):,} down" if labels else ""


def _curves(run: RunRecord, charts: Charts) -> dict[str, Any]:
    groups = curves(run) if run.metrics and plotly_js() else {}
    return {
        "has_metrics": bool(run.metrics),
        "mean_width": mean_width(len(run.metrics)),
        **{name.lower(): charts.add(figures) for name, figures in groups.items()},
    }


def _rewards(run: RunRecord, charts: Charts) -> dict[str, Any] | None:
    """Distributions of the rewards, and their calibration."""
    if run.first is None or run.last is None or not plotly_js() or has_signals(run.last):
        return None
    evaluations = [run.first] if run.first is run.last else [run.first, run.last]
    figures = reward_histograms(run.first, run.last)
    has_completions = any(is_rollout(row) for row in run.last["rows"])
    if not has_completions and (chart := calibration(run.last["rows"])):
        figures[f"Calibration, step {run.last['step']}"] = chart
    untrained = [evaluation["step"] for evaluation in evaluations if equals_reference(evaluation)]
    places = charts.add(figures)
    return {"untrained_steps": untrained, "charts": places} if untrained or places else None


def _teacher(run: RunRecord, charts: Charts) -> dict[str, Any] | None:
    """What the teacher says: the test of the feedback before training, and the signal of each row
    before and after training, of held-out rows if there are any, else of training rows.
    """
    sentences = [
        f"Before training: {test['sentence']}."
        for test in run.facts.get("feedback_test", {}).values()
        if isinstance(test, Mapping) and isinstance(test.get("sentence"), str)
    ]
    is_held_out = has_signals(run.last)
    first, last = (run.first, run.last) if is_held_out else (run.trained, run.trained)
    if first is None or last is None or not has_signals(last):
        return {"sentences": sentences, "rows": [], "charts": []} if sentences else None
    evaluations = [first] if first is last else [first, last]
    columns = [_signal_facts(evaluation["rows"]) for evaluation in evaluations]
    axis = "signal (nats per token)"
    return {
        "sentences": sentences,
        "who": "teacher, which has read the feedback, finds"
        if run.reads_feedback
        else "teacher, compared with the model, finds",
        "header": (
            "held-out rows" if is_held_out else "training rows",
            *(f"step {evaluation['step']}" for evaluation in evaluations),
        ),
        "rows": [(name, *(column.get(name, "") for column in columns)) for name in columns[-1]],
        "charts": charts.add(reward_histograms(first, last, axis)) if plotly_js() else [],
    }


def _signal_facts(rows: Sequence[Json]) -> dict[str, str]:
    """The distribution of the rows' signals in words and numbers."""
    signals = [signal for row in rows if (signal := value(row)) is not None]
    if not signals:
        return {"rows": "0"}
    return {
        "rows": number(len(signals)),
        "mean signal": _three_digits(math.fsum(signals) / len(signals)),
        "smallest": _three_digits(min(signals)),
        "largest": _three_digits(max(signals)),
        f"below {WEAK_SIGNAL:g} in size": f"{sum(map(is_weak, signals)) / len(signals):.0%}",
    }


def _data(audit: Json, charts: Charts) -> list[dict[str, Any]]:
    lists: list[dict[str, Any]] = []
    for name, findings in audit.items():
        distributions = findings.get("distributions")
        has_charts = plotly_js() and isinstance(distributions, Mapping)
        lists.append(
            {
                "name": name,
                "title": LIST_TITLES.get(name, name),
                "facts": _data_facts(findings),
                "charts": charts.add(length_histograms(distributions)) if has_charts else [],
                "tables": audit_tables(findings),
            }
        )
    return lists


def _data_facts(audit: Json) -> list[str]:
    """The number of units of a list of rows, their classes and their lengths."""
    facts: list[str] = []
    if "units" in audit:
        facts.append(f"{text(audit['units'])} {plural(str(audit.get('kind') or 'row'))}")
    classes = audit.get("classes")
    if isinstance(classes, Mapping) and len(classes) > 1:
        facts.append(text(classes))
    spans: list[str] = []
    for name in ("prompt", "answer"):
        spread = audit.get(f"{name}_length")
        if isinstance(spread, Mapping) and all(
            finite(spread.get(key)) for key in ("min", "median", "max")
        ):
            low, middle, high = (number(spread[key]) for key in ("min", "median", "max"))
            spans.append(f"{name}s of {low} to {high} tokens (median {middle})")
    truncation = audit.get("truncation")
    if spans and isinstance(truncation, Mapping) and truncation.get("too_long"):
        spans[0] = f"of all {number(truncation['rows'])} rows: {spans[0]}"
    return [*facts, *spans]


def _settings(run: RunRecord, summary: Mapping[str, Any]) -> dict[str, Any]:
    settings = flatten(run.config)
    rate = settings.get("train.learning_rate")
    facts = {
        "model": summary["model"],
        "training rows": ", ".join(summary["files"]),
        "held-out rows": _held_out_files(settings.get("data.eval")),
        "reference": settings.get("reference.model"),
        "examples per step": settings.get("train.batch_size"),
        "learning rate": exact(rate) if finite(rate) else None,
        "tokens": run.metrics[-1].get("tokens_seen") if run.metrics else None,
        "started": _time(run.facts.get("started")),
        "finished": _time(run.facts.get("finished")),
        "folder": run.path.resolve().name,
    }
    changed = [c for c in run.facts.get("changed", ()) if isinstance(c, Mapping)]
    return {
        "facts": [(name, fact) for name, fact in facts.items() if fact not in (None, "")],
        "changed": [(c.get("setting"), exact(c.get("value")), c.get("origin")) for c in changed],
        "recipe": run.config_text,
    }


def _time(iso: object) -> str:
    return str(iso or "").replace("T", " ").replace("+00:00", " UTC")


def _reproduction(run: RunRecord) -> dict[str, Any] | None:
    content = {name: run.facts.get(name) or None for name in ("command", "versions", "notes")}
    return content if any(content.values()) else None


# Texts


@dataclass(frozen=True)
class TextBox:
    """The beginning of a text, the number of characters that are left out, and their file."""

    shown: str
    num_hidden: int
    file: str


@dataclass
class TextBudget:
    """The bytes of texts that the page may still take."""

    left: int = MAX_BYTES

    def take(self, text: str, file: str) -> TextBox:
        """As much of a text as the page has space for."""
        limit = min(MAX_TEXT, max(0, self.left))
        beginning = text[:limit]
        self.left -= len(escape(visible(beginning)).encode("utf-8"))
        return TextBox(beginning, max(0, len(text) - limit), file)


def _start_of(text: str, limit: int) -> str:
    """The beginning of a text on one line, up to the end of a word."""
    line = " ".join(visible(text).split())
    return line if len(line) <= limit else f"{line[:limit].rpartition(' ')[0] or line[:limit]} …"


def _ends_of(text: str, limit: int) -> str:
    """The beginning and the end of a prompt on one line: the question is often at its end."""
    line = " ".join(visible(text).split())
    if len(line) <= limit:
        return line
    start, end = line[: limit // 3], line[-limit * 2 // 3 :]
    return f"{start.rpartition(' ')[0] or start} … {end.partition(' ')[2]}"


def _text(row: Json, part: str) -> str:
    content = row.get(part)
    return content if isinstance(content, str) else "" if content is None else str(content)


# Completions before and after training


def _answers(run: RunRecord, budget: TextBudget) -> dict[str, Any] | None:
    """Completions to the same prompts: those of an online run to held-out prompts, the largest
    change of the reward first; or the samples of an offline run.
    """
    first, last = run.first, run.last
    has_two = first is not None and last is not None and first is not last
    if first and last and has_two and any(map(is_rollout, last["rows"])):
        earlier = {row["id"]: row for row in first["rows"] if isinstance(row.get("id"), str)}
        changed = [row for row, _ in moved(last["rows"], first["rows"])[:ROWS_PER_LIST]]
        note = "On held-out prompts; those with the largest change of the reward come first."
        examples = [
            _example(
                _text(row, "prompt"),
                [
                    (" · ".join([f"step {step}", *_row_numbers(at)]), _text(at, "completion"))
                    for step, at in ((first["step"], earlier[row["id"]]), (last["step"], row))
                ],
                budget,
            )
            for row in changed
        ]
        return {"note": note, "examples": examples} if examples else None
    examples = [
        _example(
            _text(sample, "prompt"),
            [(name, _text(sample, name)) for name in ("before", "after") if name in sample],
            budget,
        )
        for sample in run.samples
    ]
    settings = flatten(run.config)
    temperature, limit = (
        settings.get(f"run.samples.{name}") for name in ("temperature", "max_new_tokens")
    )
    drawing = (
        f"Each is one draw at temperature {text(temperature)}; another draw may differ a lot."
        if _are_drawn(run)
        else "The most likely tokens."
    )
    notes = [f"{drawing} At most {text(limit)} tokens."] if limit else []
    if not any("after" in sample for sample in run.samples):
        notes.append("The completions after training will appear next to these.")
    return {"note": " ".join(notes), "examples": examples} if examples else None


def _are_drawn(run: RunRecord) -> bool:
    """Whether the samples are random draws."""
    return bool(run.samples and flatten(run.config).get("run.samples.temperature"))


def _example(prompt: str, answers: Iterable[tuple[str, str]], budget: TextBudget) -> dict[str, Any]:
    file = "the run folder"
    boxes = [(title, budget.take(answer, file)) for title, answer in answers]
    return {
        "prompt": _ends_of(prompt, MAX_PROMPT),
        "answers": boxes,
        "full_prompt": budget.take(prompt, file) if len(prompt) > MAX_PROMPT else None,
    }


# Rows of an evaluation


def _held_out_rows(run: RunRecord, budget: TextBudget) -> dict[str, Any] | None:
    if run.last is None:
        return None
    step, before = run.last["step"], run.first if run.first is not run.last else None
    lists = _row_lists(run, run.last, before, budget, f"eval/step-{step}.json")
    return {"step": step, "lists": lists} if lists else None


def _training_rows(run: RunRecord, budget: TextBudget) -> dict[str, Any] | None:
    if run.trained is None:
        return None
    lists = _row_lists(run, run.trained, None, budget, "eval/train.json")
    return {"count": len(run.trained["rows"]), "lists": lists} if lists else None


def _row_lists(
    run: RunRecord, evaluation: Json, before: Json | None, budget: TextBudget, file: str
) -> list[dict[str, Any]]:
    """The lists of an evaluation. before: the first evaluation, if it is another one."""
    earlier_rows = before["rows"] if before else None
    earlier = {row["id"]: row for row in earlier_rows or () if isinstance(row.get("id"), str)}
    is_signal = has_signals(evaluation)
    reward_name = "signal" if is_signal else "reward"
    groups = (
        signal_lists(
            evaluation["rows"], earlier_rows, ROWS_PER_LIST, has_feedback=run.reads_feedback
        )
        if is_signal
        else row_lists(evaluation["rows"], earlier_rows, ROWS_PER_LIST)
    )
    return [
        {
            "title": group.title,
            "note": group.note,
            "rows": [
                _row(
                    row,
                    score,
                    earlier.get(str(row.get("id"))),
                    group.title,
                    budget,
                    file,
                    reward_name,
                )
                for row, score in group.rows
            ],
        }
        for group in groups
    ]


def _row(
    row: Json,
    score: float,
    before: Json | None,
    title: str,
    budget: TextBudget,
    file: str,
    reward_name: str,
) -> dict[str, Any]:
    """One row: closed its main numbers and the beginnings of its texts, open its texts."""
    answers = _answer_parts(row)
    parts = [part for part in ("prompt", *(part for part, _, _ in answers)) if part in row]
    label, origin = label_of(row), str(row.get("origin") or "")
    return {
        "value": ("+" if title == "Most moved" and score > 0 else "") + _three_digits(score),
        "label": None if label is None else "up" if label else "down",
        "facts": _row_facts(row, before, reward_name),
        "origin": origin,
        "file_and_line": origin.replace("\\", "/").rpartition("/")[2] or origin,
        "prompt": _ends_of(_text(row, "prompt"), MAX_QUESTION) if "prompt" in row else None,
        "answers": [
            (tag, name, _start_of(_text(row, part), MAX_ANSWER)) for part, tag, name in answers
        ],
        "texts": [
            (
                part.replace("_", " "),
                _part_numbers(row, part),
                budget.take(_text(row, part), file),
            )
            for part in parts
        ],
    }


def _answer_parts(row: Json) -> list[tuple[str, str, str]]:
    """The keys of the row's answers, each with the class and the text of its tag."""
    if is_pair(row):
        return [("chosen", "up", "chosen"), ("rejected", "down", "rejected")]
    if "completion" in row:
        feedback = [("feedback", "none", "feedback")] if "feedback" in row else []
        return [("completion", "", ""), *feedback]
    names = [name for name in row if name.startswith("completion_") and name[11:].isdecimal()]
    return [(name, "none", name[11:]) for name in names]


def _part_numbers(row: Json, part: str) -> list[str]:
    """The numbers of one of several answers."""
    side = f"_{part}" if part in SIDES else part.removeprefix("completion")
    is_answer = part not in ("prompt", "completion", "feedback")
    return _row_numbers(row, side) if is_answer and side else []


def _row_numbers(row: Json, side: str = "", reward_name: str = "reward") -> list[str]:
    numbers: list[str] = []
    if (reward := value(row, side)) is not None:
        numbers.append(f"{reward_name} {_three_digits(reward)}")
    if finite(tokens := row.get(f"tokens{side}")):
        numbers.append(f"{number(tokens)} tokens")
    if (logp := per_token(row, side)) is not None:
        numbers.append(f"{_three_digits(logp)} nats per token")
    return numbers


def _row_facts(row: Json, before: Json | None, reward_name: str) -> list[str]:
    facts = _row_numbers(row, reward_name=reward_name)
    if is_pair(row):
        rewards = ((name, value(row, f"_{name}")) for name in SIDES)
        facts = [f"{name} {_three_digits(r)}" for name, r in rewards if r is not None]
    elif before is not None and not is_rollout(row) and (earlier := value(before)) is not None:
        facts.insert(1, f"was {_three_digits(earlier)}")
    if "target" in row:
        targets = row["target"] if isinstance(row["target"], list) else [row["target"]]
        facts.append("target " + ", ".join("none" if t is None else str(t) for t in targets))
    if row.get("stop") == "length":
        facts.append("cut off")
    if row.get("error"):
        facts.append(f"no score: {_start_of(str(row['error']), 120)}")
    if isinstance(parts := row.get("parts"), Mapping) and len(parts) > 1:
        facts += [f"{n} {_three_digits(p) if finite(p) else p}" for n, p in parts.items()]
    return facts


def _three_digits(value: float) -> str:
    return number(value) if abs(value) >= 1000 else f"{value + 0.0:.3g}"
