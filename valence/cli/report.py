"""The command that tells of runs: the page of one, or several compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from valence.cli.common import app
from valence.errors import UserError
from valence.terminal import escape_control, write_line

PAGE = Path("comparison.html")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write to this file. Default: report.html in the folder of one run, "
            "comparison.html here for several; with --md "
            "the terminal.",
        ),
    ] = None,
    md: Annotated[
        bool, typer.Option("--md", help="Markdown instead of a page, as for a pull request.")
    ] = False,
) -> None:
    """Write the page of a run again, or compare several runs on one page: numbers, settings that
    differ, curves, rows on which they disagree. Runs that are not finished are told of with what
    they have.
    """
    from valence.reports.compared import find_runs, read_runs
    from valence.reports.comparison import (
        comparison_markdown,
        comparison_page,
        refuse_others,
        write_out,
    )
    from valence.reports.page import report_markdown
    from valence.reports.rundata import read_run

    found = find_runs(runs)
    several = len(found) > 1
    target = out or (PAGE if several and not md else None)
    if target:
        refuse_others(target)
    if md:
        content = (
            comparison_markdown(read_runs(found))
            if several
            else report_markdown(read_run(found[0].path))
        )
    else:
        content = (
            comparison_page(read_runs(found))
            if several
            else _page_of(found[0].path, copied=bool(target))
        )
    if target:
        write_out(target, content)
    write_line(escape_control(str(target or content.rstrip())))


def _page_of(run_dir: Path, *, copied: bool) -> str:
    """Writes the page of a run again.

    Returns where it is, or what it holds if that is to be copied.
    """
    from valence.reports.page import MARK, write_page

    try:
        page = write_page(run_dir)
        return f"{page.read_text(encoding='utf-8')}{MARK}\n" if copied else str(page)
    except OSError as error:
        fix = "make the folder writable; `--md` writes nothing into it"
        raise UserError(
            f"the page cannot be written ({error.strerror})",
            code="file-not-writable",
            where=str(run_dir),
            fix=fix,
        ) from error
