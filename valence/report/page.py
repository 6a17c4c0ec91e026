"""The run page: one self-contained ``report.html`` built from what lies in a run's folder, finished or not.

Everything that comes from data goes through ``esc``; figures are plain dictionaries that plotly.js draws.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from valence.errors import UserError
from valence.report.console import as_tables, audit_warnings, compare, duration, exact, text

Json = Mapping[str, Any]

TEMPLATE = Path(__file__).with_name("page.html")

POINTS = 1500
"""Most points of one curve; longer curves show means of neighbouring steps."""

ROWS = 50
"""Most rows of one table of the audit."""

BINS = 24
"""Bins of a histogram."""

CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss",)),
    ("Implicit rewards", ("rewards/chosen", "rewards/rejected", "rewards/margins")),
    ("KL to the reference (nats)", ("kl/raw", "kl")),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("lr",)),
    ("Tokens per second", ("tokens/s",)),
)
"""Charts that come first, with the metrics in each. Every other metric that varies gets a chart of its own."""

COUNTERS = frozenset({"step", "epoch", "tokens", "seconds", "tokens_seen", "examples_seen"})
"""Metrics that only count along with the steps or measure the logging itself; a curve of them says nothing."""

COLOURS = ("#3b7ddd", "#d9661f", "#8b62d6", "#2a9d74")
"""Lines and bars; each readable on white and on black, and by colour-blind people."""


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


def write_page(run_dir: Path) -> Path:
    """Write ``report.html`` into the run's folder; return its path. Raises UserError when there is no such folder."""
    page = render(read_run(run_dir))
    path = run_dir / "report.html"
    aside = path.with_suffix(".html.tmp")
    aside.write_text(page, encoding="utf-8")
    os.replace(aside, path)
    return path


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


def esc(value: object) -> str:
    """Any value as HTML text."""
    return html.escape(text(value))


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


def figures(run: RunData) -> dict[str, Json]:
    """Curves by title, as plotly figures; metrics of evaluations are points beside the training metric's line."""
    names = dict.fromkeys(name.removeprefix("eval/") for record in run.metrics for name in record)
    known = {name for _, group in CHARTS for name in group}
    rest = [(name, (name,)) for name in names if name not in known | COUNTERS]
    made: dict[str, Json] = {}
    for title, group in (*CHARTS, *rest):
        traces = [t for i, name in enumerate(group) for t in _curves(run.metrics, name, COLOURS[i])]
        values = {y for trace in traces for y in trace["y"]}
        if len(values) > 1 or (traces and title in dict(CHARTS)):
            made[title] = {"data": traces, "layout": {"showlegend": len(traces) > 1, "xaxis": {"tickformat": ",~f"}}}
    return made


def _curves(records: Sequence[Json], name: str, colour: str) -> list[Json]:
    """The line of a training metric and the points of the same metric in evaluations, whichever exist."""
    traces: list[Json] = []
    short = name.removeprefix("rewards/")
    for key, label, mode in ((name, short, "lines"), (f"eval/{name}", f"{short}, held out", "lines+markers")):
        points = [(r["step"], r[key]) for r in records if _finite(r.get(key))]
        if not points:
            continue
        steps, values = zip(*_thin(points), strict=True)
        line = {"color": colour, "width": 1.5, "dash": "solid" if mode == "lines" else "dot"}
        mode = "lines+markers" if len(points) == 1 else mode
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": esc(label),
                "x": steps,
                "y": values,
                "line": line,
                "marker": {"size": 6, "color": colour},
            }
        )
    return traces


def _thin(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    width = _width(len(points))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return [(g[len(g) // 2][0], float(f"{sum(v for _, v in g) / len(g):.6g}")) for g in groups]


def _width(points: int) -> int:
    """How many neighbouring steps make one point of a curve."""
    return math.ceil(points / POINTS)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def rewards_by_class(evaluation: Json) -> dict[str, list[float]]:
    """Implicit rewards of an evaluation's rows, by class of the row (or side of the pair)."""
    names = {True: "thumbs up", False: "thumbs down", None: "no label"}
    by_class: dict[str, list[float]] = {}
    for row in evaluation["rows"]:
        label = row.get("label")
        pairs = (
            (names.get(label, str(label)), row.get("reward")),
            ("chosen", row.get("reward_chosen")),
            ("rejected", row.get("reward_rejected")),
        )
        for name, reward in pairs:
            if _finite(reward):
                by_class.setdefault(name, []).append(reward)
    return dict(sorted(by_class.items(), key=lambda kv: kv[0] in ("thumbs down", "rejected")))


def histogram(by_class: Mapping[str, list[float]], low: float, high: float) -> Json:
    """Overlaid histograms in equal bins from ``low`` to ``high``."""
    size = (high - low) / BINS or 1.0
    bins = {"start": low, "end": high + size, "size": size}  # the largest value opens a bin of its own
    data = [
        {
            "type": "histogram",
            "name": f"{esc(name)} ({len(values)})",
            "x": [float(f"{v:.6g}") for v in values],
            "xbins": bins,
            "opacity": 0.6,
            "marker": {"color": colour},
        }
        for (name, values), colour in zip(by_class.items(), COLOURS, strict=False)
    ]
    layout = {
        "barmode": "overlay",
        "showlegend": True,
        "yaxis": {"title": {"text": "rows"}},
        "xaxis": {"range": [low, high + size], "title": {"text": "reward"}},
    }
    return {"data": data, "layout": layout}


# --- Sections ---------------------------------------------------------------------------------------------------------


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
    width = _width(len(run.metrics))
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
    versions = [(name, run[name]) for name in ("valence", "torch", "transformers", "python") if run.get(name)]
    return command + (table(("package", "version"), versions) if versions else "")
