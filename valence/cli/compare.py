"""The command that compares the answers of two models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from valence import completion
from valence.cli.common import (
    GATE_FAILED,
    Overrides,
    Quiet,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    command_line,
    console,
    json_console,
    stoppable,
    with_options,
)
from valence.errors import UserError
from valence.options import CompareOptions
from valence.terminal import Terminal, json_line, print_message, print_table, write_line

if TYPE_CHECKING:
    from valence.apps.compare.compare_models import ModelComparison


MAX_BROKEN = 10
"""Broken assertions that are listed."""
MAX_ANSWER = 300
"""Characters of an answer that are shown."""


@app.command()
@with_options
def compare(
    baseline: Annotated[
        str,
        typer.Argument(
            metavar="BASELINE",
            help="Model to compare with. It is a run, a recipe (its model before training), or "
            "the folder or hub id of a model.",
            autocompletion=completion.runs_or_recipes,
        ),
    ],
    candidate: Annotated[
        str,
        typer.Argument(
            metavar="CANDIDATE",
            help="Model that should be better. It is a run, a recipe or a model.",
            autocompletion=completion.runs_or_recipes,
        ),
    ],
    options: CompareOptions,
    overrides: Overrides = None,
    max_broken: Annotated[
        int | None,
        typer.Option(
            "--max-broken",
            min=0,
            metavar="N",
            help="Gate: the candidate may fail at most N assertions that the baseline passes. "
            "Otherwise, exit with status 3.",
        ),
    ] = None,
    at_least: Annotated[
        float | None,
        typer.Option(
            "--at-least",
            min=0.0,
            max=1.0,
            metavar="RATE",
            help="Gate: smallest win rate of the candidate. If it is lower for a judge, exit with "
            "status 3.",
        ),
    ] = None,
    step: Step = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result as a JSON object. Other output goes to standard error."
        ),
    ] = False,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compare the answers of two models on held-out prompts: the candidate's win rate with its
    confidence interval, overall and by tag.

    With --at-least, --max-broken or --max-forgetting, the exit status is a release gate. `--step`
    is the checkpoint of the baseline. `valence report RUN RUN` compares training metrics.
    """
    terminal = json_console() if as_json else console
    try:
        with stoppable():
            from valence.apps.compare.compare_models import compare_models

            result = compare_models(
                baseline,
                candidate,
                options,
                overrides=allow_remote_code(trust_remote_code, overrides),
                at=checkpoint_of(step),
                console=terminal,
                command=command_line(),
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    limits = {
        "at_least": at_least,
        "max_broken": max_broken,
        "max_forgetting": options.max_forgetting,
    }
    has_gate = any(limit is not None for limit in limits.values())
    failures = result.failed_gates(**limits)
    if as_json:
        gate = {**limits, "passed": not failures}
        shown = {name: value for name, value in gate.items() if value is not None and has_gate}
        write_line(json_line({"status": "done", **result.to_dict(), **shown}))
    else:
        _print_comparison(result, terminal)
    if has_gate and not as_json:
        state = f"failed: {'; '.join(failures)}" if failures else "passed"
        print_message(terminal, f"release gate {state}", "red" if failures else "")
    if failures:
        raise typer.Exit(GATE_FAILED)


def _print_comparison(result: ModelComparison, terminal: Terminal) -> None:
    from valence.apps.compare.compare_models import REPORT
    from valence.reports.win_rates import (
        BENCHMARKS,
        HEADER,
        assertion_note,
        benchmark_row,
        judge_notes,
        rates_row,
        verdicts_of,
        warnings_of,
    )

    facts: dict[str, Any] = result.to_dict()
    if facts["judges"]:
        title = f"\nWin rate of {facts['candidate']} over {facts['baseline']}"
        print_message(terminal, title, "bold")
    tables = {"": {judge["judge"]: judge for judge in facts["judges"]}}
    tables |= {f"\nBy tag: {judge['judge']}": judge["tags"] for judge in facts["judges"]}
    for title, rows in tables.items():
        if rows:
            if title:
                print_message(terminal, title)
            cells = [rates_row(name, rates) for name, rates in rows.items()]
            terminal.print(_table(HEADER, cells))
    lengths = [
        f"{facts[side]} {answers['mean_characters']:.0f}"
        for side, answers in facts["answers"].items()
    ]
    if lengths:
        print_message(terminal, f"\nmean characters per answer: {', '.join(lengths)}")
    if benchmarks := facts.get("benchmarks"):
        print_message(terminal, "\nBenchmarks of lm-eval")
        print_table(terminal, _table(BENCHMARKS, [benchmark_row(row) for row in benchmarks]))
    for note in [note for judge in facts["judges"] for note in judge_notes(judge)]:
        print_message(terminal, note)
    if facts.get("assertions"):
        print_message(terminal, assertion_note(facts["assertions"]))
        for broken in facts["assertions"]["broken"][:MAX_BROKEN]:
            print_message(terminal, f"  broken: {broken['assertion']} on {broken['prompt'][:60]!r}")
            print_message(terminal, f"    answer: {shortened(broken['answer'])!r}")
    for verdict in verdicts_of(facts):
        print_message(terminal, verdict, "bold")
    for warning in warnings_of(facts):
        print_message(terminal, warning, "yellow")
    print_message(terminal, f"report: {Path(result.folder) / REPORT}")


def shortened(text: str) -> str:
    """A text of which the middle is left out if it is long."""
    half = MAX_ANSWER // 2
    return text if len(text) <= MAX_ANSWER else f"{text[:half]} ... {text[-half:]}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with complete numbers, in which long names continue on the next line."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(header):
        table.add_column(column, no_wrap=number > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
