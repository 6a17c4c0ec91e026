"""Parts of the pages: tables, charts, and the document around them.

Everything that comes from data goes through ``esc``; figures are plain dictionaries that plotly.js
draws.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from string import Template

from valence.files import open_file, write_all
from valence.reports.console import esc
from valence.reports.definitions import DEFINITIONS
from valence.reports.rundata import Json

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
SCRIPT = (Path(__file__).with_name("templates") / "page.js").read_text(encoding="utf-8")
"""Read when this module is: the files may be another version's by the time a long run writes its
page.
"""


def document(
    title: str,
    intro: str,
    sections: Iterable[tuple[str, str]],
    charts: Mapping[str, Json],
    *,
    status: str = "",
    live: bool = False,
) -> str:
    """A whole page. title: text. intro, status: HTML above the sections, which are (title as text,
    body as HTML); empty ones are left out. charts: figures by the id of their place
    (``chart_grid``). live: the file is written again and again, and who looks at it may have it
    loaded anew.

    Only the page's own scripts run, which the browser knows by their digests: a text that got past
    ``esc`` would still not run.
    """
    present = [(f"s{i}", title, body) for i, (title, body) in enumerate(sections) if body]
    plotly = plotly_js() if charts else ""
    return TEMPLATE.substitute(
        title=esc(title),
        status=status,
        intro=intro,
        live="live" if live else "",
        links="".join(f'<a href="#{i}">{esc(title)}</a>' for i, title, _ in present),
        sections="".join(
            f'<section id="{i}"><h2>{esc(title)}</h2>{body}</section>' for i, title, body in present
        ),
        charts=json.dumps(charts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        digests=" ".join(f"'sha256-{_digest(each)}'" for each in (plotly, SCRIPT)),
        plotly=plotly,
        script=SCRIPT,
    )


@lru_cache(maxsize=2)
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def write_aside(path: Path, page: str) -> None:
    """Writes a page in one piece: who reads it meanwhile sees the one before. Raises OSError."""
    aside = path.with_suffix(".html.tmp")
    try:
        with open_file(aside, aside.parent) as file:
            write_all(file, page.encode())
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, numeric: bool = False
) -> str:
    """An HTML table.

    ``numeric``: every column but the first holds numbers and is aligned to the right.
    """

    def line(tag: str, cells: Sequence[object]) -> str:
        return f"<tr>{''.join(f'<{tag}>{esc(cell)}</{tag}>' for cell in cells)}</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    body = "".join(line("td", row) for row in rows)
    kind = ' class="numeric"' if numeric else ""
    return f'<div class="scroll"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


def metric_anchor(name: str) -> str:
    """The id of a metric's definition on the page."""
    return f"metric-{re.sub(r'[^a-zA-Z0-9]+', '-', name)}"


def metric_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of numbers whose first column has names of metrics, which lead to their
    definitions.
    """

    def named(name: object) -> str:
        known = str(name) in DEFINITIONS
        return f'<a href="#{metric_anchor(str(name))}">{esc(name)}</a>' if known else esc(name)

    lines = (
        f"<tr><td>{named(name)}</td>{''.join(f'<td>{esc(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    head = "".join(f"<th>{esc(cell)}</th>" for cell in header)
    return (
        f'<div class="scroll"><table '
        f'class="numeric"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


@cache
def plotly_js() -> str:
    """The plotting library's source, or nothing when it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs()


def chart_grid(made: Mapping[str, Json], charts: dict[str, Json]) -> str:
    """Places for the charts, which are added to ``charts`` by the id of their place.

    A figure's ``data`` and ``layout`` are plotly's; its ``note`` is a line of text under the title,
    and ``height`` is in rem.
    """
    boxes: list[str] = []
    for title, figure in made.items():
        name = f"chart{len(charts)}"
        charts[name] = {"data": figure["data"], "layout": figure.get("layout", {})}
        note = f"<small>{esc(figure['note'])}</small>" if figure.get("note") else ""
        height = f' style="height:{figure["height"]:g}rem"' if figure.get("height") else ""
        place = (
            f'<div id="{name}" class="chart" role="img" aria-label="{esc(title)}"{height}></div>'
        )
        boxes.append(f"<figure><figcaption>{esc(title)}{note}</figcaption>{place}</figure>")
    return f'<div class="grid">{"".join(boxes)}</div>' if boxes else ""


def folded(summary: str, body: str, *, key: str, opened: bool = False) -> str:
    """Something that opens on a click. summary: text. key: by which it stays open when the page is
    loaded anew.
    """
    begins = f'<details class="fold" data-key="{esc(key)}"{" open" if opened else ""}>'
    return f"{begins}<summary>{esc(summary)}</summary>{body}</details>"


def tiles(cells: Iterable[tuple[str, str, str]]) -> str:
    """Numbers to be seen first: (name, number, what stands below it), all text."""
    boxes = "".join(
        f'<div class="tile"><span>{esc(name)}</span><b>{esc(said)}</b>'
        f"<span>{esc(below)}</span></div>"
        for name, said, below in cells
    )
    return f'<div class="tiles">{boxes}</div>' if boxes else ""
