"""The command that lists runs, and writes reports and the result of an A/B test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from valence import completion
from valence.cli.common import app, console
from valence.errors import refuse_unused
from valence.storage import writing
from valence.terminal import escape_control, json_line, print_message, print_table, write_line

if TYPE_CHECKING:
    from valence.apps.serve.experiment import AbResult

PAGE = Path("comparison.html")
RUNS = Path("runs")


@app.command()
def report(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN|FILE...",
            help="Runs, folders with runs, or the --out file of an A/B test (`valence serve`). "
            "Default: list the folder runs.",
            autocompletion=completion.run_folders,
        ),
    ] = None,
    list_only: Annotated[
        bool,
        typer.Option("--list", help="List the runs: state, step, time left and last metrics."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write to this file. Default: report.html in the run folder; of several runs, "
            "comparison.html; with --md, standard output.",
        ),
    ] = None,
    md: Annotated[
        bool,
        typer.Option("--md", help="Markdown instead of HTML."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object per run of the list, or the result of an A/B test.",
        ),
    ] = False,
) -> None:
    """List runs, rewrite the report of a run, compare runs, or show the result of an A/B test.

    A comparison has metrics, settings that differ, curves, and rows on which the runs disagree. An
    A/B test may be looked at at any time: the error probability stays at most 5 %.
    """
    paths = paths or []
    is_test = len(paths) == 1 and (paths[0].is_file() or paths[0].suffix == ".jsonl")
    lists = not is_test and (list_only or not paths or as_json)
    if lists or is_test:
        flags = {"--list": list_only and is_test, "--out": out is not None, "--md": md}
        unused = [flag for flag, is_set in flags.items() if is_set]
        refuse_unused(unused, "on a list or an A/B test", "name the runs to report on")
    if is_test:
        _show_test(paths[0], as_json)
    elif lists:
        _list_runs(paths or [RUNS], as_json)
    else:
        _report(paths, out, md)


def _list_runs(folders: list[Path], as_json: bool) -> None:
    from valence.reports import runs

    lines = [line for folder in folders for line in runs.list_runs(folder)]
    if not as_json:
        print_table(console, runs.table(lines))
    for line in runs.as_json(lines) if as_json else ():
        write_line(json_line(line))


def _report(paths: list[Path], out: Path | None, md: bool) -> None:
    from valence.reports.comparable_runs import find_runs, read_runs
    from valence.reports.comparison import (
        comparison_markdown,
        comparison_page,
        refuse_others,
        write_out,
    )
    from valence.reports.page import report_markdown
    from valence.reports.run_record import RunRecord

    lines = find_runs(paths)
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


def _show_test(file: Path, as_json: bool) -> None:
    from valence.apps.serve.experiment import read_result

    result = read_result(file)
    if as_json:
        write_line(json.dumps(result.to_dict()))
        return
    print_table(console, _test_table(result))
    print_message(console, result.verdict)
    if result.better is None:
        highest = max(result.e_values)
        print_message(
            console, f"e-value {highest:.3g}; {result.threshold:g} establishes a difference"
        )


def _test_table(result: AbResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("side")
    table.add_column("model", overflow="fold")
    for column in ("step", "share", "thumbs up", "down", "voters", "up", "95 % interval"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, side, share in (
        ("A", result.a, 1 - result.share),
        ("B", result.b, result.share),
    ):
        low, high = side.interval
        table.add_row(
            name,
            escape_control(side.run),
            str(side.step),
            f"{share:.0%}",
            str(side.thumbs_up),
            str(side.thumbs_down),
            str(side.votes),
            "" if side.rate is None else f"{side.rate:.0%}",
            f"{low:.0%} to {high:.0%}",
        )
    return table
