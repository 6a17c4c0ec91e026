"""Commands that use a model: evaluate it, sample from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from valence import completion
from valence.cli.common import (
    Nproc,
    Overrides,
    Quiet,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    command_line,
    console,
    processes,
    stoppable,
    with_options,
)
from valence.errors import UserError, refuse_unused
from valence.files import check_path
from valence.options import SampleOptions, changed_options
from valence.storage import writing
from valence.terminal import Terminal, print_message

if TYPE_CHECKING:
    from valence.distributed.process_group import Group


@app.command()
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|RECIPE",
            help="A run, or a recipe (its model before training).",
            autocompletion=completion.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="File of rows. It can also be a section as in a recipe: '{path: FILE, keys: "
            "{...}}'. The recipe's column names apply where they fit. Can be repeated. "
            "Default: data.eval.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for the metrics and the rows.")
    ] = None,
    step: Step = None,
    trust_reward: Annotated[
        bool,
        typer.Option(
            "--trust-reward",
            help="For an online run: run the reward functions of its recipe, and send completions "
            "to its reward servers.",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Evaluate a run, or the model of a recipe before training, on held-out rows."""
    settings = allow_remote_code(trust_remote_code, overrides)
    if out is not None:
        _check_output(out)
    with processes(nproc) as group:
        from valence.reports.verdict import held_out_verdict
        from valence.targets import overrides_to_measure

        settings = [*overrides_to_measure(target, data or [], settings), *settings]
        run = open_run_or_recipe(
            target, settings, step=step, group=group, rewards=True, trust_reward=trust_reward
        )
        if "eval" not in run.prepared.corpora:
            raise UserError(
                "there are no rows to evaluate on",
                code="rows-missing",
                where=str(target),
                fix="add --data FILE, or set data.eval in the recipe",
            )
        evaluation = run.evaluate()
    verdict = held_out_verdict(None, {"metrics": evaluation.metrics, "rows": evaluation.rows})
    if verdict.state != "unmeasured" or any(row.get("in_train") for row in evaluation.rows):
        print_message(console, verdict.sentence)
    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in evaluation.metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
    if out and group.rank == 0:
        from valence.training.folder import finite

        report = {
            "step": run.step,
            "metrics": evaluation.metrics,
            "rows": [finite(row) for row in evaluation.rows],
        }
        _write(out, json.dumps(report, indent=1, ensure_ascii=False))


@app.command()
@with_options
def sample(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE|MODEL",
            help="Model to sample from. It is a run, a recipe (its model before training), or the "
            "folder or hub id of a model or adapter.",
            autocompletion=completion.runs_or_recipes,
        ),
    ],
    options: SampleOptions,
    overrides: Overrides = None,
    step: Step = None,
    quiet: Quiet = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Sample answers from a model, and print them or write them to a file for `valence score` and
    `valence train`.
    """
    _check_options(options)
    model: dict[str, Any] = {
        "overrides": allow_remote_code(trust_remote_code, overrides),
        "at": checkpoint_of(step),
        "console": console,
    }
    with processes(nproc) as group, stoppable():
        from valence.jobs.sample_rows import answers, sample_rows
        from valence.training.evaluate import answer_text

        if options.out:
            sample_rows(target, options, **model, command=command_line(), group=group)
        else:
            terminal = Terminal(quiet=console.quiet)  # answers are printed with --quiet, too
            for text, answer in answers(target, options, **model, group=group):
                print_message(terminal, f"> {text}", "bold")
                print_message(terminal, answer_text(answer))
                if answer.episode is not None and answer.episode.error:
                    print_message(terminal, f"({answer.episode.error})", "dim")
                if answer.stop == "length":
                    note = f"(truncated at {len(answer.tokens)} tokens; raise --max-new-tokens)"
                    print_message(terminal, note, "dim")
                print_message(terminal, "")


def _check_options(options: SampleOptions) -> None:
    """Raise UserError for options without effect, or that exclude each other."""
    if options.system is not None and not options.prompt:
        fix = "add --prompt TEXT, or write the system message into the rows of --data"
        refuse_unused(["--system"], "without --prompt", fix)
    if options.out is None:
        unused = changed_options(options, "append", "fresh")
        refuse_unused(unused, "without --out", "add --out FILE.jsonl")
    if options.fresh and options.append:
        raise UserError(
            "--append adds answers to the file, but --fresh starts a new one",
            code="option-conflict",
            where="--append",
            fix="remove --append or --fresh",
        )


def open_run_or_recipe(
    target: Path,
    overrides: list[str],
    *,
    group: Group,
    lists: tuple[Literal["train", "eval", "test"], ...] = ("eval",),
    step: str | None = None,
    rewards: bool = False,
    trust_reward: bool = False,
) -> Any:
    """A run with its newest weights or those of ``step``, or that of a recipe before its first
    step.

    lists: lists of rows to read. rewards: load the rewards of the recipe.
    trust_reward: also load rewards of a run folder that are code or a server.
    """
    from valence.config.load import LISTS
    from valence.targets import load_target
    from valence.training.open_run import open_recipe, restore

    needed = set(lists)
    if needed & {"train", "eval"} and load_target(str(target), overrides).recipe.data.split:
        needed |= {"train", "eval"}  # the share that is held out is a part of data.train
    settings = [*(f"data.{name}=[]" for name in LISTS if name not in needed), *overrides]
    options: dict[str, Any] = {
        "group": group,
        "at": checkpoint_of(step),
        "console": console,
        "rewards": rewards,
    }
    if target.is_dir():
        return restore(target, overrides=settings, trust_reward=trust_reward, **options)
    return open_recipe(target, settings, **options)


def _check_output(path: Path) -> None:
    """Raise UserError for a file that cannot exist, before the work for its content."""
    check_path(path)
    if path.is_dir() or not path.parent.is_dir():
        missing = f"the folder {path.parent} does not exist"
        raise UserError(
            "the path is a folder" if path.is_dir() else missing,
            code="file-not-writable",
            where=str(path),
            fix="choose a file in an existing folder",
        )


def _write(path: Path, text: str) -> None:
    with writing(path, "choose a file in an existing folder where you have write permission"):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
