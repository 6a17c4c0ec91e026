"""Several runs on one self-contained page: what they came to, where they differ, their curves
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from valence.errors import UserError
from valence.files import check_path
from valence.reports.compared import Compared
from valence.reports.comparison_charts import curves, frontier, key, over_time
from valence.reports.comparison_tables import (
    MARK,
    RANKED,
    Disagreement,
    TablePart,
    disagreements,
    gaps,
    percent,
    tables,
    what,
)
from valence.reports.console import esc
from valence.reports.curves import title_of
from valence.reports.formatting import text
from valence.reports.html import chart_grid, document, folded, plotly_js, table, write_aside
from valence.reports.rows import Json

NO_CURVES = "Curves need plotly: `pip install plotly`, then write the page again."


def comparison_page(runs: Sequence[Compared]) -> str:
    """The page as HTML."""
    charts: dict[str, Json] = {}
    plotly = bool(plotly_js())
    warnings = "".join(f'<div class="sign"><p>{esc(each)}</p></div>' for each in gaps(runs))
    sections = [
        ("Not to be overlooked", warnings),
        *((part.title, _part(part)) for part in tables(runs)),
    ]
    sections += _curves(runs, charts) if plotly else [("Curves", f"<p>{esc(NO_CURVES)}</p>")]
    sections.append(("Rows on which the runs disagree", _rows(disagreements(runs))))
    return document(
        f"{len(runs)} runs compared", f"{MARK}<p>{esc(what(runs))}</p>", sections, charts
    )


def write_out(path: Path, content: str) -> None:
    """Writes a page or Markdown in one piece.

    Raises UserError where something else lies, or when it cannot be written.
    """
    refuse_others(path)
    try:
        write_aside(path, content)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror})",
            code="file-not-writable",
            where=str(path),
            fix="name a file in a folder that exists",
        ) from error


def refuse_others(path: Path) -> None:
    """Raises UserError when what lies there was not written by `valence report`, or nothing can lie
    there.
    """
    check_path(path)
    try:
        known = not path.exists() or (path.is_file() and MARK.encode() in path.read_bytes())
    except OSError:
        known = False
    if not known:
        raise UserError(
            "this exists, and is nothing that `valence report` wrote",
            code="path-exists",
            where=str(path),
            fix="name another file with --out",
        )


def _part(part: TablePart) -> str:
    notes = "".join(f"<p>{esc(note)}</p>" for note in part.notes)
    return notes + table(part.header, part.rows, numeric=part.numeric)


def _curves(runs: Sequence[Compared], charts: dict[str, Json]) -> list[tuple[str, str]]:
    """Sections with charts, which are added to ``charts``.

    Each has the key of the runs at its top.
    """
    held_out, training = curves(runs)
    means = "Longer curves show means of neighbouring records."
    groups = [
        ("Curves of held-out rows", "Against optimizer steps.", held_out),
        ("Curves of training", f"Against optimizer steps. {means}", training),
        (
            "Against time",
            "The runs do not take the same time for a step: the same against minutes of "
            "training, without evaluations and saves.",
            over_time(runs),
        ),
        *((title, said, {title: figure}) for title, (said, figure) in frontier(runs).items()),
    ]
    titled = [
        (title, said, {title_of(name): figure for name, figure in found.items()})
        for title, said, found in groups
        if found
    ]
    made = [
        (title, f"<p>{esc(said)}</p>{key(runs)}{chart_grid(found, charts)}")
        for title, said, found in titled
    ]
    return made or [("Curves", "<p>No two runs have logged the same numbers.</p>")]


def _rows(found: Sequence[Disagreement]) -> str:
    shown = (_row(each, place) for place, each in enumerate(found))
    return "".join((f"<p>{esc(RANKED)}</p>", *shown)) if found else ""


def _row(each: Disagreement, place: int) -> str:
    """It opens on a click; the first is open."""
    texts = "".join(
        f'<h4>{esc(name)}</h4><pre dir="auto">{esc(said)}</pre>'
        for name, said in each.texts.items()
    )
    header = ("run", "rank", "reward", *(["answer"] if each.answers else []))
    rows = [
        (label, percent(share), text(reward), *([each.answers[label]] if each.answers else []))
        for label, (share, reward) in each.places.items()
    ]
    ranks = ", ".join(f"{label} {percent(share)}" for label, (share, _) in each.places.items())
    return folded(
        f"{each.origin}: {ranks}", texts + table(header, rows), key=f"row{place}", opened=not place
    )
