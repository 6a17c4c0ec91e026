"""The command that writes the report of a run, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from valence.cli.common import app
from valence.storage import writing
from valence.terminal import escape_control, write_line

PAGE = Path("comparison.html")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or folders that contain runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write to this file. Default: report.html in the run folder for one run, "
            "comparison.html in the current folder for several runs, and standard output with "
            "--md.",
        ),
    ] = None,
    md: Annotated[
        bool,
        typer.Option(
            "--md", help="Print Markdown instead of HTML, for example for a pull request."
        ),
    ] = False,
) -> None:
    """Rewrite the report of a run, or compare several runs: metrics, settings that differ, curves,
    and rows on which the runs disagree.

    Unfinished runs are reported with the data so far.
    """
    from valence.reports.comparable_runs import find_runs, read_runs
    from valence.reports.comparison import (
        comparison_markdown,
        comparison_page,
        refuse_others,
        write_out,
    )
    from valence.reports.page import report_markdown
    from valence.reports.run_record import RunRecord

    lines = find_runs(runs)
    several = len(lines) > 1
    target = out or (PAGE if several and not md else None)
    if target:
        refuse_others(target)
    if md:
        content = (
            comparison_markdown(read_runs(lines))
            if several
            else report_markdown(RunRecord.read(lines[0].path))
        )
    else:
        content = (
            comparison_page(read_runs(lines))
            if several
            else _page_of(lines[0].path, copied=bool(target))
        )
    if target:
        write_out(target, content)
    write_line(escape_control(str(target or content.rstrip())))


def _page_of(run_dir: Path, *, copied: bool) -> str:
    """Rewrite the report of a run.

    Returns its path, or its content if ``copied``.
    """
    from valence.reports.page import MARK, write_page

    with writing(run_dir, "make the folder writable, or print Markdown with --md"):
        page = write_page(run_dir)
        return f"{page.read_text(encoding='utf-8')}{MARK}\n" if copied else str(page)
