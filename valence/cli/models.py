"""Commands that use a trained model: measure it, ask it, write it for other programs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from valence.cli.common import Nproc, Overrides, Step, app, console, processes
from valence.errors import UserError

if TYPE_CHECKING:
    from valence.dist.protocol import Group


@app.command()
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|RECIPE", help="A run's folder, or a recipe (measures the policy as it starts).")
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="A file of rows, all of which are measured; may be given several times. Default: the recipe's data.eval.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write metrics and rows to this file as JSON.")] = None,
    step: Step = None,
    nproc: Nproc = None,
) -> None:
    """Measure a run, or the policy a recipe starts from, on held-out rows."""
    with processes(nproc) as group:
        run = _run_of(target, [*_held_out(data), *(overrides or [])], step=step, group=group)
        if "eval" not in run.prepared.corpora:
            raise UserError("there are no rows to measure on", where=str(target), fix="give --data, or data.eval in the recipe")
        found = run.evaluate()
    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in found.metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
    if out and group.rank == 0:
        from valence.training.folder import finite

        report = {"step": run.step, "metrics": found.metrics, "rows": [finite(row) for row in found.rows]}
        _write(out, json.dumps(report, indent=1, ensure_ascii=False))


@app.command()
def sample(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|RECIPE", help="A run's folder, or a recipe (samples from the policy as it starts).")
    ],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="A question; may be given several times.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="A file whose rows have a prompt (the rest of a row is not read); may be given several times."
        ),
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, max=65536, help="Answers per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Fixes the draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write prompts and answers to this file, one JSON object a line.")
    ] = None,
    step: Step = None,
    nproc: Nproc = None,
) -> None:
    """Answer prompts with a run's model."""
    from valence.data.load import load
    from valence.rollout.protocol import Sampling
    from valence.training.evaluate import as_text
    from valence.types import Chat, Content

    how = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    asked: list[Content] = [Chat(({"role": "user", "content": text},)) for text in prompt or []]
    if data:
        from valence.config.schema import Source

        asked += [example.prompt for example in load([Source(path=path, format="prompt") for path in data], "prompt").examples]
    if not asked:
        raise UserError("there is nothing to answer", where="sample", fix="give --prompt or --data")
    with processes(nproc) as group:
        run = _run_of(target, ["data.eval=[]"], step=step, group=group)
        answered = run.sample(asked, how, number)
    lines: list[str] = []
    for content, answers in zip(asked, answered, strict=True):
        text = as_text(content, run.prepared.tokenizer)
        shown: Any = [dict(m) for m in content.messages] if isinstance(content, Chat) else text
        for completion in answers:
            lines.append(
                json.dumps({"prompt": shown, "completion": completion.text, "stop": completion.stop}, ensure_ascii=False)
            )
            if not out:
                console.print(f"> {text}", style="bold", markup=False, soft_wrap=True)
                console.print(f"{completion.text}\n", markup=False, highlight=False, soft_wrap=True)
    if out and group.rank == 0:
        _write(out, "\n".join(lines) + "\n")


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    to: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the model.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone instead of merged weights.")] = False,
    step: Step = None,
    nproc: Nproc = None,
) -> None:
    """Write a run's weights as a folder that transformers loads and vLLM serves."""
    from valence.dist.together import by_first
    from valence.training.finish import write_model

    with processes(nproc) as group:
        by_first(group, partial(_check_can_be_made, to))
        run = _run_of(run_dir, ["data.eval=[]"], keeps=_needed_to_write(run_dir), step=step, group=group)
        _check_writes(run, run_dir, adapter)
        write_model(run, to, "adapter" if adapter else "merged")
    console.print(str(to), markup=False, soft_wrap=True)


def _check_writes(run: Any, run_dir: Path, adapter: bool) -> None:
    """Raises UserError when there is no adapter that could be written by itself."""
    if adapter and run.prepared.method.of_scores:
        what = "a reward model is written whole: its head is what an adapter would be worth nothing without"
        raise UserError(what, where=str(run_dir), fix="leave out --adapter")
    if adapter and run.recipe.model.lora is None and run.recipe.model.adapter is None:
        raise UserError("the run trained all weights: there is no adapter", where=str(run_dir), fix="leave out --adapter")


def _needed_to_write(run_dir: Path) -> tuple[str, ...]:
    """Lists of rows without which a run's model cannot be written: a reward model's training rows say how it scores."""
    from valence.training.restore import method_of_run

    return ("train",) if method_of_run(run_dir).of_scores else ()


def _run_of(target: Path, overrides: list[str], *, group: Group, keeps: tuple[str, ...] = (), step: str | None = None) -> Any:
    """The run of a folder with its newest weights, or those of a step, or that of a recipe before its first step. keeps: its own
    lists of rows that are read."""
    from valence.config.load import load_recipe
    from valence.training.build import build_models
    from valence.training.loop import Run
    from valence.training.methods import method_of
    from valence.training.restore import restore
    from valence.training.setup import prepare

    overrides = [*(f"data.{name}=[]" for name in ("train", "test") if name not in keeps), *overrides]
    if target.is_dir():
        return restore(target, overrides=overrides, at=_at(step), console=console, group=group)
    if step is not None:
        raise UserError("a recipe has no checkpoints", where="--step", fix="name a run's folder")
    prepared = prepare(load_recipe(target, overrides, method_of=method_of, training=False))
    return Run(prepared, *build_models(prepared, group=group), console=console, world=group)


def _at(step: str | None) -> Any:
    """--step as a number, the word best, or nothing."""
    if step is None or step == "best":
        return step
    if not step.isdecimal():
        raise UserError(f"{step} is neither a step nor the word best", where="--step", fix="name a step of the run's checkpoints")
    return int(step)


def _held_out(files: list[str] | None) -> list[str]:
    """Overrides that measure all rows of these files."""
    if not files:
        return []
    listed = json.dumps([{"path": path} for path in files], ensure_ascii=False)
    return [f"data.eval={listed}", "data.limit=null", "eval.max_examples=null"]


def _check_can_be_made(folder: Path) -> None:
    if folder.exists():
        raise UserError("this exists already", where=str(folder), fix="name a folder that does not exist")
    try:
        folder.mkdir(parents=True)
        folder.rmdir()
    except OSError as error:
        raise UserError(
            f"the folder cannot be made ({error.strerror})", where=str(folder), fix="name one in a place that you may write to"
        ) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write ({error.strerror})", where=str(path), fix="name a file in a folder that exists") from error
