"""Commands that use a trained model: measure it, ask it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from valence.cli import complete
from valence.cli.common import (
    Nproc,
    Overrides,
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

Longest = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        help="Longest answer, in tokens. Default: the recipe's rollout.max_new_tokens, or 256 "
        "(512 with --out).",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0.0,
        help="0 takes the most likely token. Default: the recipe's rollout.temperature, or 0.7 "
        "(1 with --out).",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Draw from the most likely tokens that have this probability together. Default: the "
        "recipe's, or 1.",
    ),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        "--at-once",
        min=1,
        help="Answers that are sampled at once, and lost when killed. Default: 64.",
    ),
]


@app.command()
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|RECIPE",
            help="A run's folder, or a recipe (measures the policy as it starts).",
            autocompletion=complete.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file of rows, all of which are measured, or a section as in a recipe "
            "('{path: FILE, keys: {...}}'); may be "
            "given several times. Columns are named as in the recipe's data where they fit. "
            "Default: the recipe's data.eval.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write metrics and rows to this file as JSON.")
    ] = None,
    step: Step = None,
    trust_reward: Annotated[
        bool,
        typer.Option(
            "--trust-reward",
            help="Execute the reward functions, or ask the reward servers, that the folder of an "
            "online run names.",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Measure a run, or the policy a recipe starts from, on held-out rows."""
    ours = allow_remote_code(trust_remote_code, overrides)
    with processes(nproc) as group:
        from valence.reports.verdict import held_out_verdict
        from valence.trainer.targets import overrides_to_measure

        ours = [*overrides_to_measure(target, data or [], ours), *ours]
        run = open_run_or_recipe(
            target, ours, step=step, group=group, rewards=True, trust_reward=trust_reward
        )
        if "eval" not in run.prepared.corpora:
            raise UserError(
                "there are no rows to measure on",
                code="rows-missing",
                where=str(target),
                fix="give --data, or data.eval in the recipe",
            )
        found = run.evaluate()
    verdict = held_out_verdict(None, {"rows": found.rows})
    if verdict.state != "unmeasured":
        print_message(console, verdict.sentence)
    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in found.metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
    if out and group.rank == 0:
        from valence.runs.folder import finite

        report = {
            "step": run.step,
            "metrics": found.metrics,
            "rows": [finite(row) for row in found.rows],
        }
        _write(out, json.dumps(report, indent=1, ensure_ascii=False))


@app.command()
def sample(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE|MODEL",
            help="A run's folder, a recipe (samples from the policy as it starts), or a model's "
            "or adapter's folder or hub id.",
            autocompletion=complete.runs_or_recipes,
        ),
    ],
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            help="A prompt as text, which the run's data.as_chat makes a user message or not; "
            "may be given several times.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file whose rows have a prompt or text (other columns go along as `info`); "
            "may be given several times. "
            "Default, with --out: the prompts that a recipe with a reward trains on.",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "-n",
            min=1,
            max=65536,
            help="Answers per prompt. Default: the recipe's, if it has a reward; else 1.",
        ),
    ] = None,
    max_new_tokens: Longest = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    at_once: AtOnce = None,
    seed: Annotated[int, typer.Option(help="Fixes the draws.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the answers to this .jsonl, with their tokens; go on with it where it "
            "ends.",
        ),
    ] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append", help="Write behind what --out holds: other prompts, or another seed."
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an earlier --out aside and start anew.")
    ] = False,
    step: Step = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="With --out, print nothing but mistakes.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    nproc: Nproc = None,
) -> None:
    """Answer prompts with a model: on the terminal, or into a file that `valence score` and
    `valence train` read. Stopped, it goes on where it was.
    """
    ours = allow_remote_code(trust_remote_code, overrides)
    asked = {
        "data": data or [],
        "questions": prompt or [],
        "overrides": ours,
        "at": checkpoint_of(step),
    }
    with processes(nproc) as group, stoppable():
        from valence.jobs.sample_rows import Draws, answers, sample_rows

        draws = Draws(number, temperature, top_p, max_new_tokens, at_once, seed)
        if out:
            files = {"fresh": fresh, "append": append, "quiet": quiet, "command": command_line()}
            sample_rows(target, out, draws, **asked, **files, console=console, group=group)
        else:
            for text, answer in answers(target, draws, **asked, console=console, group=group):
                print_message(console, f"> {text}", "bold")
                print_message(console, answer.text)
                if answer.stop == "length":
                    cut = (
                        f"(cut off after {len(answer.tokens)} tokens; --max-new-tokens allows more)"
                    )
                    print_message(console, cut, "dim")
                print_message(console, "")


def open_run_or_recipe(
    target: Path,
    overrides: list[str],
    *,
    group: Group,
    keeps: tuple[str, ...] = (),
    step: str | None = None,
    rewards: bool = False,
    trust_reward: bool = False,
) -> Any:
    """Open the run of a folder, or that of a recipe before its first step.

    step: of the checkpoint to load; the newest by default. keeps: lists of the recipe's rows that
    are read. rewards: load those that the recipe names. trust_reward: also those of a run's folder
    that are code or a server.
    """
    from valence.lifecycle.restore import open_recipe, restore

    ours = [*(f"data.{name}=[]" for name in ("train", "test") if name not in keeps), *overrides]
    how: dict[str, Any] = {
        "group": group,
        "at": checkpoint_of(step),
        "console": console,
        "rewards": rewards,
    }
    if target.is_dir():
        return restore(target, overrides=ours, trust_reward=trust_reward, **how)
    return open_recipe(target, ours, **how)


def _write(path: Path, text: str) -> None:
    check_path(path)
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"cannot write ({error.strerror})",
            code="file-not-writable",
            where=str(path),
            fix="name a file in a folder that exists",
        ) from error
