"""The run page: one self-contained ``report.html`` built from what lies in a run's folder, finished or not.

Everything that comes from data goes through ``esc``; figures are plain dictionaries that plotly.js draws.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from valence.report.console import as_tables, audit_warnings, compare, duration, esc, exact
from valence.report.figures import figures, histogram, mean_width, rewards_by_class
from valence.report.rundata import Json, RunData, read_run

TEMPLATE = Path(__file__).with_name("page.html")

ROWS = 50
"""Most rows of one table of the audit."""


def write_page(run_dir: Path, status: str | None = None) -> Path:
    """Write ``report.html`` into the run's folder; return its path. status: of the run, when its run.json does not say so yet.

    Raises UserError when there is no such folder.
    """
    found = read_run(run_dir)
    page = render(found if status is None else replace(found, run={**found.run, "status": status}))
    path = run_dir / "report.html"
    aside = path.with_suffix(".html.tmp")
    aside.write_text(page, encoding="utf-8")
    os.replace(aside, path)
    return path


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, numeric: bool = False) -> str:
    """An HTML table. ``numeric``: every column but the first holds numbers and is aligned to the right."""

    def line(tag: str, cells: Sequence[object]) -> str:
        return f"<tr>{''.join(f'<{tag}>{esc(cell)}</{tag}>' for cell in cells)}</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    body = "".join(line("td", row) for row in rows)
    kind = ' class="numeric"' if numeric else ""
    return f'<div class="scroll"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


def _audit(audit: Json) -> str:
    return "".join(f'<h3>{esc(name)}</h3><div class="flow">{_tables(found)}</div>' for name, found in audit.items())


def _tables(found: Json) -> str:
    parts: list[str] = []
    for title, header, rows in as_tables(found):
        head = f"<h4>{esc(title)}</h4>" if title else ""
        more = f"<p>and {len(rows) - ROWS} more in audit.json</p>" if len(rows) > ROWS else ""
        parts.append(f"<div>{head}{table(header, rows[:ROWS])}{more}</div>")
    return "".join(parts)


def flatten(value: Json, prefix: str = "") -> dict[str, Any]:
    """Inner mappings as dotted names: ``{"train": {"seed": 0}}`` becomes ``{"train.seed": 0}``."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        flat |= flatten(item, f"{name}.") if isinstance(item, Mapping) and item else {name: item}
    return flat


# --- Figures ----------------------------------------------------------------------------------------------------------


def render(run: RunData) -> str:
    """The whole page as HTML."""
    plotly = _plotly_js()
    charts: dict[str, Json] = {}
    sections = (
        ("Warnings", _warnings(run)),
        ("Results on held-out rows", _results(run)),
        ("Curves", _curve_section(run, charts, plotly)),
        ("Implicit rewards of held-out rows", _reward_section(run, charts, plotly)),
        ("Answers before and after", _samples(run.samples)),
        ("Data", _audit(run.audit)),
        ("Settings", _settings(run)),
        ("Reproduce", _reproduce(run.run)),
    )
    present = [(f"s{i}", title, body) for i, (title, body) in enumerate(sections) if body]
    data = json.dumps(charts, allow_nan=False).replace("<", "\\u003c")
    method, model = _what(run)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=esc(f"{method} on {model}"),
        status=_status(run),
        sentence=_sentence(run),
        facts=table(("", ""), _facts(run)),
        links="".join(f'<a href="#{i}">{esc(title)}</a>' for i, title, _ in present),
        sections="".join(f'<section id="{i}"><h2>{esc(title)}</h2>{body}</section>' for i, title, body in present),
        charts=data,
        plotly=plotly if charts else "",
    )


def _plotly_js() -> str:
    """The plotting library's source, or nothing when it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs()


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
    files = _paths(settings.get("data.train"))
    steps = run.metrics[-1]["step"] if run.metrics else 0
    seconds = run.run.get("seconds")
    took = f" in {duration(seconds)}" if isinstance(seconds, (int, float)) else ""
    on = f" with the rows of {esc(files)}" if files else ""
    return f"<b>{esc(method)}</b> trained {how} of <b>{esc(model)}</b>{on}: {esc(steps)} optimizer steps{took}."


def _paths(sources: object) -> str:
    records = sources if isinstance(sources, list) else []
    return ", ".join(str(s.get("path")) for s in records if isinstance(s, Mapping))


def _status(run: RunData) -> str:
    status = str(run.run.get("status", "unfinished"))
    return f'<span class="status {"good" if status == "done" else "bad"}">{esc(status)}</span>'


def _facts(run: RunData) -> list[tuple[str, object]]:
    settings = flatten(run.config)
    facts: list[tuple[str, object]] = [
        ("training rows", _paths(settings.get("data.train"))),
        ("held-out rows", _paths(settings.get("data.eval"))),
        ("reference", settings.get("reference.model")),
        ("examples per step", settings.get("train.batch_size")),
        ("tokens", run.metrics[-1].get("tokens_seen") if run.metrics else None),
        ("started", run.run.get("started")),
        ("finished", run.run.get("finished")),
        ("folder", run.path.name),
    ]
    return [(name, value) for name, value in facts if value not in (None, "")]


def _warnings(run: RunData) -> str:
    audited = [f"{name}: {warning}" for name, found in run.audit.items() for warning in audit_warnings(found)]
    said = [*run.problems, *audited, *run.run.get("warnings", ()), *run.run.get("notes", ())]
    bad: dict[str, list[int]] = {}
    for record in run.metrics:
        for name, value in record.items():
            if value in ("nan", "inf", "-inf") or (isinstance(value, float) and not math.isfinite(value)):
                bad.setdefault(name, []).append(record["step"])
    said += [f"{name} was not finite at {len(steps)} step(s), first at step {steps[0]}" for name, steps in bad.items()]
    return f"<ul class='warn'>{''.join(f'<li>{esc(w)}</li>' for w in said)}</ul>" if said else ""


def _ends(run: RunData) -> tuple[Json, Json] | None:
    """The first and the last evaluation (the same one when there is only one)."""
    return (run.evaluations[0], run.evaluations[-1]) if run.evaluations else None


def _results(run: RunData) -> str:
    made = ""
    if ends := _ends(run):
        first, last = ends
        header = ["metric", *dict.fromkeys(f"step {e['step']}" for e in ends), "change"]
        rows = compare(first["metrics"], last["metrics"])
        made = table(header, rows, numeric=True) if first is not last else _measured(header[:2], first)
    if run.test:
        made += "<h3>Test rows, after training</h3>" + _measured(("metric", f"step {run.test['step']}"), run.test)
    return made


def _measured(header: Sequence[object], evaluation: Json) -> str:
    return table(header, evaluation["metrics"].items(), numeric=True)


def _curve_section(run: RunData, charts: dict[str, Json], plotly: str) -> str:
    if not run.metrics:
        return "<p>No metrics were logged.</p>"
    if not plotly:
        return "<p>Curves need plotly: <code>pip install 'valence[report]'</code>, then write the report again.</p>"
    width = mean_width(len(run.metrics))
    mean = f" Each point of a line is the mean of up to {width} logged steps." if width > 1 else ""
    return f"<p>Against optimizer steps. Dots: held-out rows.{mean}</p>{_chart_grid(figures(run), charts)}"


def _chart_grid(made: Mapping[str, Json], charts: dict[str, Json]) -> str:
    """Places for the charts, which are added to ``charts`` by the id of their place."""
    boxes: list[str] = []
    for title, figure in made.items():
        name = f"chart{len(charts)}"
        charts[name] = figure
        boxes.append(f'<figure><figcaption>{esc(title)}</figcaption><div id="{name}" class="chart"></div></figure>')
    return f'<div class="grid">{"".join(boxes)}</div>'


def _reward_section(run: RunData, charts: dict[str, Json], plotly: str) -> str:
    if (ends := _ends(run)) is None:
        return ""
    shown = {f"step {e['step']}": rewards_by_class(e) for e in ends}
    values = [v for by_class in shown.values() for rewards in by_class.values() for v in rewards]
    if not values or not plotly:
        return ""
    low, high = min(values), max(values)
    note = ""
    made: dict[str, Json] = {}
    for name, by_class in shown.items():
        spread = max((abs(v) for rewards in by_class.values() for v in rewards), default=0.0)
        if spread > 1e-6:
            made[name] = histogram(by_class, low, high)
        else:
            note += f"<p>At {esc(name)} the reward of every row is 0: policy and reference are the same.</p>"
    return note + (_chart_grid(made, charts) if made else "")


def _samples(samples: Sequence[Json]) -> str:
    return "".join(
        f'<article><h3>Prompt</h3><pre dir="auto">{esc(s.get("prompt"))}</pre><div class="two">'
        f'<div><h4>before</h4><pre dir="auto">{esc(s.get("before"))}</pre></div>'
        f'<div><h4>after</h4><pre dir="auto">{esc(s.get("after"))}</pre></div></div></article>'
        for s in samples
    )


def _settings(run: RunData) -> str:
    if not run.config_text:
        return ""
    whole = f"<details><summary>The whole recipe, resolved</summary><pre>{esc(run.config_text)}</pre></details>"
    rows = [(c["setting"], exact(c["value"]), c["origin"]) for c in run.run.get("changed", ())]
    changed = f"<p>Set otherwise than the default:</p>{table(('setting', 'value', 'where'), rows)}" if rows else ""
    return changed + whole


def _reproduce(run: Json) -> str:
    command = f"<pre>{esc(run['command'])}</pre>" if run.get("command") else ""
    versions = list(run.get("versions", {}).items())
    return command + (table(("package", "version"), versions) if versions else "")
