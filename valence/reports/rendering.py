"""Render pages, Markdown and model cards from the templates in ``templates/``.

Templates escape by default: every value that an HTML template inserts is formatted by
``formatting.text`` and escaped as HTML, and in a Markdown template as Markdown. Only ``Markup`` is
inserted as it is.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from valence.reports.formatting import duration, exact, number, text, visible

SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in Path(__file__).with_name("templates").iterdir()
    if path.is_file()
}
"""Read on import: an upgrade during a long run must not mix two versions of the templates."""


def markdown(value: object) -> Markup:
    """Any value as text on one line of Markdown, with Markdown and HTML syntax escaped."""
    if isinstance(value, Markup):
        return value
    line = " ".join(text(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*\[\]|~$#!])", r"\\\1", line)
    # an underscore inside a word is not emphasis
    return Markup(re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line))


def fenced(content: str, language: str) -> Markup:
    """A block of code whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{visible(content).rstrip()}\n{fence}")


def _html(value: object) -> str:
    return value if isinstance(value, Markup) else text(value)


def metric_anchor(name: str) -> str:
    """The id of a metric's definition on the page."""
    return f"metric-{re.sub(r'[^a-zA-Z0-9]+', '-', name)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _environment(finalize: Callable[[Any], Any] | None) -> Environment:
    environment = Environment(
        loader=DictLoader(SOURCES),
        autoescape=finalize is not None,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "anchor": metric_anchor,
        "duration": duration,
        "exact": exact,
        "fenced": fenced,
        "number": number,
        "percent": percent,
        "repr": repr,
    }
    return environment


ENVIRONMENTS = {
    "html": _environment(_html),
    "md": _environment(markdown),
    "py": _environment(None),
}
"""By the suffix of the template before ``.j2``."""


def render(template: str, **context: Any) -> str:
    """Render one template with the escaping of its kind."""
    kind = template.split(".")[-2]
    return ENVIRONMENTS[kind].get_template(template).render(**context)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A Markdown table, or nothing without rows."""
    macros: Any = ENVIRONMENTS["md"].get_template("macros.md.j2").module
    return Markup(macros.table(header, rows).strip())


@cache
def plotly_js() -> str:
    """The source of plotly.js, which each page contains; empty if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs()


def render_page(template: str, *, charts: Charts, **context: Any) -> str:
    """A self-contained HTML page.

    Its content security policy names its scripts by their digests, so that no other script runs,
    even if a text were not escaped.
    """
    scripts = [plotly_js() if charts.figures else "", SOURCES["page.js"]]
    return render(
        template,
        figures=charts.figures,
        scripts=[Markup(script) for script in scripts],
        digests=Markup(" ").join(Markup(f"'sha256-{_digest(script)}'") for script in scripts),
        css=Markup(SOURCES["page.css"]),
        **context,
    )


@cache
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


class Charts:
    """The figures of a page by the id of the element that each is drawn in."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def add(self, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Add figures by title. Return what the template needs of each: id, title, note, height.

        ``data`` and ``layout`` of a figure are plotly's, ``note`` is a line below its title, and
        ``height`` is in rem.
        """
        places: list[dict[str, Any]] = []
        for title, figure in figures.items():
            name = f"chart{len(self.figures)}"
            self.figures[name] = {"data": figure["data"], "layout": figure.get("layout", {})}
            optional = {key: figure.get(key) for key in ("note", "height")}
            places.append({"id": name, "title": title, **optional})
        return places
