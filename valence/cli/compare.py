"""The command that compares the answers of two models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import (
    GATE_FAILED,
    ModelOverrides,
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
)
from valence.cli.models import AtOnce
from valence.errors import UserError
from valence.terminal import Terminal, json_line, print_message, print_table, write_line

if TYPE_CHECKING:
    from valence.apps.compare.compare_models import ModelComparison


MAX_BROKEN = 10
"""Broken assertions that are listed."""
MAX_ANSWER = 300
"""Characters of an answer that are shown."""


@app.command()
def compare(
    baseline: Annotated[
        str,
        typer.Argument(
            metavar="BASELINE",
            help="Model to compare with: a run folder, a recipe for its model before training, "
            "or the folder or hub id of a model.",
            autocompletion=complete.runs_or_recipes,
        ),
    ],
    candidate: Annotated[
        str,
        typer.Argument(
            metavar="CANDIDATE",
            help="Model that should be better: a run folder, a recipe, or the folder or hub id "
            "of a model.",
            autocompletion=complete.runs_or_recipes,
        ),
    ],
    overrides: ModelOverrides = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File of held-out prompts for both models. Can be repeated.",
        ),
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(
            "--judge",
            metavar="REWARD",
            help="Judge of the answers: a rule, a function (package.module:function), a reward "
            "model or the address of a server, or a section as in a recipe ("
            "'{reward: NAME, settings: {...}}'), also as a YAML file. Can be repeated; each judge "
            "has a win rate.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="Folder for the answers, the verdicts, compare.json and report.html. Rerun with "
            "the same folder to resume.",
        ),
    ] = Path("comparison"),
    assertions: Annotated[
        list[str] | None,
        typer.Option(
            "--assertions",
            metavar="FILE",
            help="File of prompts with a column `assert`. Both models answer them; judges do not "
            "compare these answers. Can be repeated. Prompts of --prompts may have assertions too.",
        ),
    ] = None,
    max_broken: Annotated[
        int | None,
        typer.Option(
            "--max-broken",
            min=0,
            metavar="N",
            help="Release gate: exit with status 3 if the candidate fails more than N assertions "
            "that the baseline passes.",
        ),
    ] = None,
    at_least: Annotated[
        float | None,
        typer.Option(
            "--at-least",
            min=0.0,
            max=1.0,
            metavar="RATE",
            help="Release gate: exit with status 3 if the win rate of the candidate is below this "
            "for a judge.",
        ),
    ] = None,
    votes: Annotated[
        Path | None,
        typer.Option(
            "--votes",
            metavar="FILE",
            help="The --out file of `valence collect BASELINE CANDIDATE`: its raters become "
            "another judge. Without --prompts, no answers are sampled.",
        ),
    ] = None,
    lm_eval: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--lm-eval",
            metavar="BASELINE CANDIDATE",
            help="The --output_path of lm_eval for both models, or a result file of each. Without "
            "--prompts, no model answers.",
        ),
    ] = None,
    lm_eval_tasks: Annotated[
        str | None,
        typer.Option(
            "--lm-eval-tasks",
            metavar="TASKS",
            help="Evaluate both models on tasks, groups or tags of lm-eval, separated by commas, "
            "such as arc_easy,hellaswag; or on YAML files of tasks. Without --prompts, no model "
            "answers prompts.",
        ),
    ] = None,
    lm_eval_include: Annotated[
        list[Path] | None,
        typer.Option(
            "--lm-eval-include",
            metavar="FOLDER",
            help="A folder with YAML files of your own tasks for lm-eval. Can be repeated.",
        ),
    ] = None,
    lm_eval_fewshot: Annotated[
        int | None,
        typer.Option(
            "--lm-eval-fewshot",
            min=0,
            help="Examples before each question. Default: those of the task.",
        ),
    ] = None,
    lm_eval_limit: Annotated[
        int | None,
        typer.Option(
            "--lm-eval-limit",
            min=1,
            help="Ask only the first N questions of each task, to try it out.",
        ),
    ] = None,
    lm_eval_chat: Annotated[
        bool | None,
        typer.Option(
            "--lm-eval-chat/--no-lm-eval-chat",
            help="Ask the questions of lm-eval with the chat templates of the models, or as plain "
            "text. Default: with chat templates if the models are prompted with them.",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--labels",
            metavar="FILE",
            help="File of thumbs or pairs from people. First measures how well each judge agrees "
            "with them. Can be repeated.",
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            "--min-agreement",
            min=0.0,
            max=1.0,
            help="Refuse a judge with less agreement with --labels than this. Default: 0.6.",
        ),
    ] = None,
    allow_below: Annotated[
        bool,
        typer.Option("--allow-below", help="Accept judges below --min-agreement."),
    ] = False,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            metavar="COLUMN",
            help="Column of the prompts to group the win rates by. Default: tags or tag.",
        ),
    ] = None,
    max_failed: Annotated[
        float,
        typer.Option(
            "--max-failed",
            min=0.0,
            max=1.0,
            help="Fail if a judge gives no verdict on more than this fraction of the prompts.",
        ),
    ] = 0.1,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum tokens per answer.")
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0.0,
            help="Sampling temperature; 0 takes the most likely token.",
        ),
    ] = 0.7,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="Sample from the smallest set of most likely tokens with this total probability.",
        ),
    ] = 1.0,
    at_once: AtOnce = None,
    seed: Annotated[
        int, typer.Option(help="Random seed of the answers and of the confidence intervals.")
    ] = 0,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Rename the folder of an earlier comparison, and start over."),
    ] = False,
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
    """Compare the answers of two models on held-out prompts: the candidate's win rate over the
    baseline with its confidence interval, overall and by tag.

    With --at-least, the exit status is a release gate. `--step` is the checkpoint of the baseline.
    To compare training metrics instead, use `valence report RUN RUN`.
    """
    terminal = json_console() if as_json else console
    try:
        with stoppable():
            from valence.apps.compare.compare_models import compare_models
            from valence.apps.compare.run_benchmarks import BenchmarkTasks
            from valence.jobs.sample_rows import Draws

            options = {
                "--lm-eval-include": tuple(lm_eval_include or ()) or None,
                "--lm-eval-fewshot": lm_eval_fewshot,
                "--lm-eval-limit": lm_eval_limit,
                "--lm-eval-chat": lm_eval_chat,
            }
            tasks = None
            if lm_eval_tasks is not None:
                tasks = BenchmarkTasks(
                    names=tuple(filter(None, map(str.strip, lm_eval_tasks.split(",")))),
                    include=tuple(lm_eval_include or ()),
                    num_fewshot=lm_eval_fewshot,
                    limit=lm_eval_limit,
                    as_chat=lm_eval_chat,
                )
            elif unused := [name for name, value in options.items() if value is not None]:
                raise UserError(
                    "the option has no effect without tasks",
                    code="option-unused",
                    where=unused[0],
                    fix="add --lm-eval-tasks, or remove it",
                )
            result = compare_models(
                baseline,
                candidate,
                out,
                prompts=prompts or [],
                assertions=assertions or [],
                judges=judge or [],
                votes=votes,
                lm_eval=lm_eval,
                lm_eval_tasks=tasks,
                labels=labels or [],
                min_agreement=min_agreement,
                allow_below=allow_below,
                draws=Draws(1, temperature, top_p, max_new_tokens, at_once, seed),
                tag=tag,
                max_failed=max_failed,
                overrides=allow_remote_code(trust_remote_code, overrides),
                at=checkpoint_of(step),
                fresh=fresh,
                console=terminal,
                command=command_line(),
            )
    except UserError as error:
        if as_json:
            write_line(json_line({"status": "failed", "code": error.code, "error": str(error)}))
        raise
    has_gate = at_least is not None or max_broken is not None
    failures = result.failed_gates(at_least, max_broken)
    if as_json:
        gate = {"at_least": at_least, "max_broken": max_broken, "passed": not failures}
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
