"""The run page: one self-contained ``report.html`` built from what lies in a run's folder, finished
or not.

Everything that comes from data goes through ``esc``; figures are plain dictionaries that plotly.js
draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from valence.reports.console import esc
from valence.reports.curves import KTO, curves, mean_width, spent
from valence.reports.definitions import DEFINITIONS, by_importance
from valence.reports.figures import calibration, lengths, spreads, still
from valence.reports.formatting import audit_tables, compare, duration, exact, flatten, number
from valence.reports.html import (
    chart_grid,
    document,
    folded,
    metric_anchor,
    metric_table,
    plotly_js,
    table,
    tiles,
    write_aside,
)
from valence.reports.online_signs import Sign
from valence.reports.rowlist import Room, own_samples, row_lists, samples
from valence.reports.rows import is_own, verdict
from valence.reports.rundata import Json, RunData, read_run
from valence.reports.signs import other_warnings, signs
from valence.reports.stats import finite
from valence.reports.verdict import run_verdict
from valence.types import plural

ROWS = 50
"""Most rows of one table of the audit."""

LINES = 12
"""Warnings that are shown at once; the others open on a click."""

RELOAD = 30
"""Seconds after which the page of a run that goes on is loaded anew."""

RATED = 50
"""Records over which the time of a step is measured."""

HEADLINES = {
    "reward/mean": "reward",
    "rewards/auc": "AUC",
    "rewards/accuracies": "accuracy",
    "rewards/spearman": "rank correlation",
    "loss": "loss",
    "rewards/margins": "margin",
    "logps/token": "log-probability per token",
    "rollout/length": "tokens per answer",
    "kl": "KL divergence",
}
"""Numbers of held-out rows that are seen first, with the words for them."""

TILES = 5

LISTS = {"train": "Training rows", "eval": "Held-out rows", "test": "Test rows"}


def write_page(run_dir: Path, status: str | None = None) -> Path:
    """Write ``report.html`` into the run's folder; return its path. status: of the run, when its
    run.json does not say so yet.

    Raises UserError when there is no such folder, and OSError when the page cannot be written.
    """
    found = read_run(run_dir)
    page = render(found if status is None else replace(found, run={**found.run, "status": status}))
    path = run_dir / "report.html"
    write_aside(path, page)
    return path


def render(run: RunData) -> str:
    """The whole page as HTML."""
    plotly = bool(plotly_js())
    charts: dict[str, Json] = {}
    room = Room()
    own = run.first is not None and run.last is not None and any(map(is_own, run.last["rows"]))
    sections = (
        ("Answers", _answers(run, own, room)),
        ("Warnings", _warnings(run)),
        ("Metrics", _headlines(run) + _results(run)),
        ("Curves", _curve_section(run, charts, plotly)),
        ("Rewards", _reward_section(run, charts, plotly)),
        ("Held-out rows", _rows(run, room)),
        ("Training rows", _trained(run, room)),
        ("Data", _audit(run.audit, charts, plotly)),
        ("Settings", _facts(run) + _settings(run)),
        ("Reproduce", _reproduce(run)),
    )
    method, model = _what(run)
    urgent = _cards(sign for sign in signs(run) if sign.is_urgent)
    intro = f"{_verdict(run)}{urgent}<p>{_sentence(run)}</p>{_progress(run)}"
    title = f"{method} on {Path(model).name or model}"
    return document(title, intro, sections, charts, status=_status(run), live=_is_running(run))


# What, and how far


def _verdict(run: RunData) -> str:
    """Whether the model is better on held-out data, before everything else."""
    found = run_verdict(run)
    far = f"So far (step {_step(run)}): " if _is_running(run) else ""
    headline = f"{far}{found.headline}"
    return (
        f'<div class="verdict {found.state}" id="verdict" '
        f'data-state="{found.state}"><p><b>{esc(headline)}.</b> '
        f'{esc(found.sentence)}</p><p class="dim">{esc(found.advice)}</p></div>'
    )


def _what(run: RunData) -> tuple[str, str]:
    model = run.config.get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    return str(run.config.get("method", "A run")), str(name or "an unknown model")


def _sentence(run: RunData) -> str:
    if not run.config:
        return "The folder holds no recipe (config.yaml)."
    method, model = _what(run)
    settings = flatten(run.config)
    rank = settings.get("model.lora.rank")
    how = "an adapter" if settings.get("model.adapter") else "all weights"
    how = f"a LoRA adapter of rank {esc(rank)}" if rank else how
    files = ", ".join(map(_short_name, _paths(settings.get("data.train"))))
    seconds = run.run.get("seconds")
    training = math.fsum(
        record["seconds"] for record in run.metrics if finite(record.get("seconds"))
    )
    took = f" in {duration(seconds)}" if finite(seconds) else ""
    took += f" ({duration(training)} of it training)" if took and training else ""
    on = f" with the rows of <b>{esc(files)}</b>" if files else ""
    judged = (
        f", judged by {esc(settings['reward'])}" if isinstance(settings.get("reward"), str) else ""
    )
    ended = f" It ended early: {esc(run.run['ended_early'])}." if run.run.get("ended_early") else ""
    return (
        f"<b>{esc(method)}</b> {'trains' if _is_running(run) else 'trained'} {how} of "
        f"<b>{esc(_short_name(model))}</b>{on}{judged}: "
        f"{esc(_step(run))} optimizer steps{took}.{ended}"
    )


def _paths(sources: object) -> list[str]:
    records = sources if isinstance(sources, list) else []
    return [str(s.get("path")) for s in records if isinstance(s, Mapping)]


def _short_name(path: str) -> str:
    """The last part of a local path; a hub id as it is."""
    return Path(path).name if Path(path).is_absolute() else path


def _status(run: RunData) -> str:
    status = str(run.run.get("status", "unfinished"))
    return (
        f'<span class="status '
        f'{"good" if status in ("done", "running", "scored") else "bad"}">{esc(status)}</span>'
    )


def _is_running(run: RunData) -> bool:
    return run.run.get("status") == "running"


def _step(run: RunData) -> int:
    return run.metrics[-1]["step"] if run.metrics else 0


def _progress(run: RunData) -> str:
    """How far a run that goes on is, how fast, and when the page is written again."""
    if not _is_running(run):
        return ""
    step, total, each = _step(run), run.run.get("total_steps"), seconds_of_a_step(run.metrics)
    said = [f"step {number(step)}"]
    bar = ""
    if finite(total) and total > 0:
        said = [f"step {number(step)} of {number(total)}"]
        bar = f'<progress max="{total:g}" value="{step}" aria-label="steps"></progress>'
    if each is not None:
        said.append(f"{duration(each)} a step")
        if finite(total) and bar:
            said.append(f"{duration(max(0.0, total - step) * each)} left")
    said.append(f"written at {datetime.now(UTC):%H:%M:%S} UTC")
    again = (
        f'<label><input type="checkbox" id="reload" data-seconds="{RELOAD}" checked> load anew '
        f"every {RELOAD} s</label>"
        " <small>The file is rewritten as the run goes.</small>"
    )
    return f"{bar}<p>{' · '.join(map(esc, said))}</p><p>{again}</p>"


def seconds_of_a_step(metrics: Sequence[Json]) -> float | None:
    """With all phases (evaluations, saves, rounds), over the latest records; None where they do not
    say.
    """
    latest = metrics[-RATED - 1 :]
    seconds = math.fsum(each for record in spent(latest)[1:] for each in record.values())
    steps = latest[-1]["step"] - latest[0]["step"] if latest else 0
    return seconds / steps if seconds > 0 and steps > 0 else None


def _facts(run: RunData) -> str:
    settings = flatten(run.config)
    facts: list[tuple[str, object]] = [
        ("model", _what(run)[1]),
        ("training rows", ", ".join(_paths(settings.get("data.train")))),
        ("held-out rows", ", ".join(_paths(settings.get("data.eval")))),
        ("reference", settings.get("reference.model")),
        ("examples per step", settings.get("train.batch_size")),
        (
            "learning rate",
            exact(rate) if finite(rate := settings.get("train.learning_rate")) else None,
        ),
        ("tokens", run.metrics[-1].get("tokens_seen") if run.metrics else None),
        ("started", _moment(run.run.get("started"))),
        ("finished", _moment(run.run.get("finished"))),
        ("folder", run.path.resolve().name),
    ]
    cells = (
        f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>"
        for name, value in facts
        if value not in (None, "")
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _moment(iso: object) -> str:
    """A time as the run's facts have it, in words."""
    return str(iso or "").replace("T", " ").replace("+00:00", " UTC")


def _headlines(run: RunData) -> str:
    """The main numbers of held-out rows, with what they were at first."""
    if run.last is None or run.first is None:
        return ""
    first, last = run.first["metrics"], run.last["metrics"]
    cells: list[tuple[str, str, str]] = []
    for name, words in HEADLINES.items():
        if not finite(now := last.get(name)) or (name == "kl" and KTO in last):
            continue
        then = first.get(name)
        since = (
            f"step {run.first['step']}: {number(float(then) + 0.0)}"
            if finite(then) and run.first is not run.last
            else ""
        )
        below = since or f"step {run.last['step']}"
        if name == "rewards/auc" and (counts := _counts(run.last["rows"])):
            below = f"{counts}; {below}"
        cells.append((f"{words}, held out", number(float(now) + 0.0), below))
    return tiles(cells[:TILES])


def _counts(rows: Sequence[Json]) -> str:
    """Of how many thumbs an AUC is."""
    thumbs = [label for row in rows if (label := verdict(row)) is not None]
    return f"{sum(thumbs):,} up, {len(thumbs) - sum(thumbs):,} down" if thumbs else ""


# Sections


def _warnings(run: RunData) -> str:
    found = signs(run)
    return _cards(sign for sign in found if not sign.is_urgent) + _lines(
        [*run.problems, *other_warnings(run, found), *run.audited]
    )


def _cards(found: Iterable[Sign]) -> str:
    return "".join(
        f'<div class="sign"><p>{esc(sign.said)}</p><p><b>What to do:</b> {esc(sign.do)}</p></div>'
        for sign in found
    )


def _lines(said: Sequence[object]) -> str:
    def items(lines: Iterable[object]) -> str:
        return f'<ul class="notes">{"".join(f"<li>{esc(line)}</li>" for line in lines)}</ul>'

    shown = items(said[:LINES]) if said else ""
    more = said[LINES : LINES + 200]
    return shown + (
        folded(f"{number(len(said) - LINES)} more", items(more), key="warnings") if more else ""
    )


def _results(run: RunData) -> str:
    made = ""
    if run.first is not None and run.last is not None:
        header = [
            "metric",
            *dict.fromkeys(f"step {e['step']}" for e in (run.first, run.last)),
            "change",
        ]
        changes = {row[0]: row for row in compare(run.first["metrics"], run.last["metrics"])}
        rows = [changes[name] for name in by_importance(changes)]
        made = metric_table(header, rows) if len(header) > 3 else _measured(run.last)
        made = f"<h3>Held-out rows ({number(len(run.last['rows']))})</h3>{made}"
    tested = f"<h3>Test rows, after training</h3>{_measured(run.test)}" if run.test else ""
    parts = "".join(f"<div>{part}</div>" for part in (made, tested) if part)
    evaluations = [each for each in (run.first, run.last, run.test) if each is not None]
    names = by_importance(dict.fromkeys(name for each in evaluations for name in each["metrics"]))
    return f'<div class="flow">{parts}</div>{_definitions(names)}' if parts else ""


def _definitions(names: Sequence[str]) -> str:
    """What each metric means, where the names in the tables lead to."""
    known = [name for name in names if name in DEFINITIONS]
    lines = (
        f'<div id="{metric_anchor(name)}"><dt><code>{esc(name)}</code></dt>'
        f"<dd>{esc(DEFINITIONS[name])}</dd></div>"
        for name in known
    )
    return f'<h3>Definitions</h3><dl class="definitions">{"".join(lines)}</dl>' if known else ""


def _measured(evaluation: Json) -> str:
    metrics = evaluation["metrics"]
    return metric_table(
        ("metric", f"step {evaluation['step']}"),
        [(name, metrics[name]) for name in by_importance(metrics)],
    )


def _curve_section(run: RunData, charts: dict[str, Json], plotly: bool) -> str:
    if not run.metrics:
        return "<p>No metrics were logged.</p>"
    if not plotly:
        return (
            "<p>Curves need plotly: <code>pip install plotly</code>, then write the report "
            "again.</p>"
        )
    width = mean_width(len(run.metrics))
    mean = (
        f" A point of a line is the mean of up to {width} logged steps, a light band their "
        f"smallest and largest."
        if width > 1
        else ""
    )
    found = curves(run)
    more = found["More"]
    return (
        f'<p class="dim">Against optimizer steps. Lines: training. Dots: held-out rows.{mean}</p>'
        f"{chart_grid(found['Learning'], charts)}"
        + (
            f"<h3>The machine</h3>{chart_grid(found['Machine'], charts)}"
            if found["Machine"]
            else ""
        )
        + (
            folded(
                f"{len(more)} more number{'s' * (len(more) > 1)}",
                chart_grid(more, charts),
                key="more numbers",
            )
            if more
            else ""
        )
    )


def _reward_section(run: RunData, charts: dict[str, Json], plotly: bool) -> str:
    if run.first is None or run.last is None or not plotly:
        return ""
    first, last = run.first, run.last
    note = "".join(
        f"<p>At step {each['step']} the reward of every row is 0: policy and reference are the "
        f"same.</p>"
        for each in (first, *([last] if last is not first else []))
        if still(each)
    )
    made = spreads(first, last)
    if not any(is_own(row) for row in last["rows"]) and (calibrated := calibration(last["rows"])):
        made[f"Calibration, step {last['step']}"] = calibrated
    return note + chart_grid(made, charts)


def _rows(run: RunData, room: Room) -> str:
    if run.last is None:
        return ""
    step = run.last["step"]
    made = row_lists(
        run.last,
        run.first if run.first is not run.last else None,
        room,
        f"eval/step-{step}.json",
        "held out",
    )
    return (
        f'<p class="dim">At step {step}. A click on a row shows all of it.</p>{made}'
        if made
        else ""
    )


def _trained(run: RunData, room: Room) -> str:
    if run.trained is None:
        return ""
    made = row_lists(run.trained, None, room, "eval/train.json", "trained")
    count = number(len(run.trained["rows"]))
    return (
        f'<p class="dim">{count} of the training rows, measured after training.</p>{made}'
        if made
        else ""
    )


def _answers(run: RunData, own: bool, room: Room) -> str:
    if own and run.first is not None and run.last is not None and run.first is not run.last:
        made = own_samples(run.first, run.last, room)
        return (
            f'<p class="dim">To held-out prompts; those whose reward changed most come '
            f"first.</p>{made}"
            if made
            else ""
        )
    made = samples(run.samples, room)
    how = flatten(run.config)
    drawn, most = (how.get(f"run.samples.{name}") for name in ("temperature", "max_new_tokens"))
    return (
        f'<p class="dim">At temperature {esc(drawn)}, at most {esc(most)} tokens.</p>{made}'
        if made and most
        else made
    )


# Data, settings


def _audit(audit: Json, charts: dict[str, Json], plotly: bool) -> str:
    parts: list[str] = []
    for name, found in audit.items():
        spread = found.get("distributions")
        drawn = (
            chart_grid(lengths(spread), charts) if plotly and isinstance(spread, Mapping) else ""
        )
        whole = f'<div class="flow">{_tables(found)}</div>'
        title = "All that the audit found"
        parts.append(
            f"<h3>{esc(LISTS.get(name, name))}</h3><p>{_summary(found)}</p>"
            f"{drawn}{folded(title, whole, key=f'audit {name}')}"
        )
    return "".join(parts)


def _summary(found: Json) -> str:
    """How many units of what, and how long."""
    said = (
        [f"{esc(found['units'])} {esc(plural(str(found.get('kind') or 'row')))}"]
        if "units" in found
        else []
    )
    classes = found.get("classes")
    if isinstance(classes, Mapping) and len(classes) > 1:
        said.append(esc(classes))
    cut, spans = found.get("truncation"), list[str]()
    for name in ("prompt", "answer"):
        spread = found.get(f"{name}_length")
        if isinstance(spread, Mapping) and all(
            finite(spread.get(key)) for key in ("min", "median", "max")
        ):
            spans.append(
                f"{name}s of {number(spread['min'])} to {number(spread['max'])} tokens (median "
                f"{number(spread['median'])})"
            )
    if spans and isinstance(cut, Mapping) and cut.get("too_long"):
        spans[0] = f"of all {number(cut['rows'])} rows: {spans[0]}"
    return "; ".join((*said, *spans))


def _tables(found: Json) -> str:
    parts: list[str] = []
    for title, header, rows in audit_tables(found):
        head = f"<h4>{esc(title)}</h4>" if title else ""
        more = f"<p>and {len(rows) - ROWS} more in audit.json</p>" if len(rows) > ROWS else ""
        parts.append(f"<div>{head}{table(header, rows[:ROWS])}{more}</div>")
    return "".join(parts)


def _settings(run: RunData) -> str:
    if not run.config_text:
        return ""
    whole = folded("The whole recipe, resolved", f"<pre>{esc(run.config_text)}</pre>", key="recipe")
    changed = [c for c in run.run.get("changed", ()) if isinstance(c, Mapping)]
    rows = [(c.get("setting"), exact(c.get("value")), c.get("origin")) for c in changed]
    said = (
        f"<p>Set otherwise than the default:</p>{table(('setting', 'value', 'where'), rows)}"
        if rows
        else ""
    )
    return said + whole


def _reproduce(run: RunData) -> str:
    command = f"<pre>{esc(run.run['command'])}</pre>" if run.run.get("command") else ""
    versions = list(run.run.get("versions", {}).items())
    said = _lines(list(run.run.get("notes", ())))
    return (
        command
        + (table(("package", "version"), versions) if versions else "")
        + (f"<h3>Notes</h3>{said}" if said else "")
    )
