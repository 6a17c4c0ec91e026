"""Commands that use a model: evaluate it, sample from it, export it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import (
    Nproc,
    Overrides,
    RunArg,
    Step,
    TrustRemoteCode,
    allow_remote_code,
    app,
    checkpoint_of,
    command_line,
    console,
    processes,
    stoppable,
)
from valence.errors import UserError
from valence.files import check_path
from valence.terminal import print_message

if TYPE_CHECKING:
    from valence.distributed.process_group import Group

MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        help="Maximum tokens per answer. Default: the recipe's rollout.max_new_tokens, else 256 "
        "(512 with --out).",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0.0,
        help="Sampling temperature; 0 takes the most likely token. Default: the recipe's "
        "rollout.temperature, else 0.7 (1 with --out).",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Sample from the smallest set of most likely tokens with this total probability. "
        "Default: the recipe's rollout.top_p, else 1.",
    ),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        "--at-once",
        min=1,
        help="Answers per batch. If the command is killed, at most one batch is lost. Default: 64.",
    ),
]


@app.command()
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|RECIPE",
            help="A run folder, or a recipe to evaluate its model before training.",
            autocompletion=complete.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="File of rows, or a section as in a recipe ('{path: FILE, keys: {...}}'). Can be "
            "repeated. All rows are used, and the recipe's column names apply where they fit. "
            "Default: the recipe's data.eval.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the metrics and the rows to this JSON file.")
    ] = None,
    step: Step = None,
    trust_reward: Annotated[
        bool,
        typer.Option(
            "--trust-reward",
            help="For an online run: allow the reward functions of its "
            "recipe to run, and its reward servers to receive completions.",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Evaluate a run, or the model of a recipe before training, on held-out rows."""
    settings = allow_remote_code(trust_remote_code, overrides)
    with processes(nproc) as group:
        from valence.reports.verdict import held_out_verdict
        from valence.trainer.targets import overrides_to_measure

        settings = [*overrides_to_measure(target, data or [], settings), *settings]
        run = _open_run(
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
    verdict = held_out_verdict(None, {"rows": evaluation.rows})
    if verdict.state != "unmeasured":
        print_message(console, verdict.sentence)
    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in evaluation.metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
    if out and group.rank == 0:
        from valence.runs.folder import finite

        report = {
            "step": run.step,
            "metrics": evaluation.metrics,
            "rows": [finite(row) for row in evaluation.rows],
        }
        _write(out, json.dumps(report, indent=1, ensure_ascii=False))


@app.command()
def sample(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE|MODEL",
            help="A run folder, a recipe to sample from its model before training, or the folder "
            "or hub id of a model or adapter.",
            autocompletion=complete.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            help="Text of a prompt. It becomes a user message if data.as_chat says so (default: if "
            "the model has a chat template). Can be repeated.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="File of rows with a column `prompt` or `text`; other columns are copied to "
            "`info`. Can be repeated. Default with --out: the training prompts of a recipe with a "
            "reward.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "-n",
            min=1,
            max=65536,
            metavar="N",
            help="Answers per prompt. Default: rollout.num_rollouts of a recipe with a reward, "
            "else 1.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    at_once: AtOnce = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the answers with their tokens to this .jsonl file. If it exists, resume "
            "it.",
        ),
    ] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append", help="Append answers to other prompts, or with another seed, to --out."
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Rename an existing --out file, and start over.")
    ] = False,
    step: Step = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="With --out, print only errors.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Sample answers from a model, and print them or write them to a file for `valence score` and
    `valence train`. If the command was stopped, rerun it to resume.
    """
    settings = allow_remote_code(trust_remote_code, overrides)
    request = {
        "data": data or [],
        "questions": prompt or [],
        "overrides": settings,
        "at": checkpoint_of(step),
    }
    with processes(nproc) as group, stoppable():
        from valence.jobs.sample_rows import Draws, answers, sample_rows

        draws = Draws(number, temperature, top_p, max_new_tokens, at_once, seed)
        if out:
            files = {"fresh": fresh, "append": append, "quiet": quiet, "command": command_line()}
            sample_rows(target, out, draws, **request, **files, console=console, group=group)
        else:
            for text, answer in answers(target, draws, **request, console=console, group=group):
                print_message(console, f"> {text}", "bold")
                print_message(console, answer.text)
                if answer.stop == "length":
                    note = f"(truncated at {len(answer.tokens)} tokens; raise --max-new-tokens)"
                    print_message(console, note, "dim")
                print_message(console, "")


@app.command()
def export(
    run_dir: RunArg,
    to: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write the model to.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapter instead of merged weights.")
    ] = False,
    step: Step = None,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Export the weights of a run to a folder that transformers and vLLM can load."""
    with processes(nproc) as group:
        from valence.distributed.process_group import run_on_first_rank

        run_on_first_rank(group, partial(_check_new_folder, to))
        settings = allow_remote_code(trust_remote_code, ["data.eval=[]"])
        lists = _needed_lists(run_dir)
        run = _open_run(run_dir, settings, lists=lists, step=step, group=group)
        _check_adapter(run, run_dir, adapter)
        writer = replace(run.model_writer, log=run_dir / "metrics.jsonl")
        writer.write(to, "adapter" if adapter else "merged")
    print_message(console, str(to))


def _check_adapter(run: Any, run_dir: Path, adapter: bool) -> None:
    """Raise UserError if --adapter is set and the adapter cannot be exported by itself."""
    if adapter and run.prepared.method.is_reward_model:
        raise UserError(
            "the adapter of a reward model cannot be exported: it does not include the head",
            code="adapter-not-exportable",
            where=str(run_dir),
            fix="remove --adapter to export the merged model",
        )
    if adapter and run.recipe.model.lora is None and run.recipe.model.adapter is None:
        raise UserError(
            "the run trained all weights and has no adapter",
            code="adapter-missing",
            where=str(run_dir),
            fix="remove --adapter",
        )


def _needed_lists(run_dir: Path) -> tuple[str, ...]:
    """The lists of rows that an export needs: a reward model is saved with the mean and standard
    deviation of its scores of training rows.
    """
    from valence.trainer.targets import method_of_run

    return ("train",) if method_of_run(run_dir).is_reward_model else ()


def _open_run(
    target: Path,
    overrides: list[str],
    *,
    group: Group,
    lists: tuple[str, ...] = (),
    step: str | None = None,
    rewards: bool = False,
    trust_reward: bool = False,
) -> Any:
    """A run with its newest weights or those of ``step``, or that of a recipe before its first
    step.

    lists: lists of rows to read besides data.eval. rewards: load the rewards of the recipe.
    trust_reward: also load rewards of a run folder that are code or a server.
    """
    from valence.lifecycle.restore import open_recipe, restore

    settings = [
        *(f"data.{name}=[]" for name in ("train", "test") if name not in lists),
        *overrides,
    ]
    options: dict[str, Any] = {
        "group": group,
        "at": checkpoint_of(step),
        "console": console,
        "rewards": rewards,
    }
    if target.is_dir():
        return restore(target, overrides=settings, trust_reward=trust_reward, **options)
    return open_recipe(target, settings, **options)


def _check_new_folder(folder: Path) -> None:
    check_path(folder)
    if folder.exists():
        raise UserError(
            "the path already exists",
            code="path-exists",
            where=str(folder),
            fix="choose a path that does not exist",
        )
    try:
        folder.mkdir(parents=True)
        folder.rmdir()
    except OSError as error:
        raise UserError(
            f"the folder cannot be created ({error.strerror})",
            code="folder-not-writable",
            where=str(folder),
            fix="choose a path where you have write permission",
        ) from error


def _write(path: Path, text: str) -> None:
    check_path(path)
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror})",
            code="file-not-writable",
            where=str(path),
            fix="choose a file in an existing folder where you have write permission",
        ) from error
