"""The command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from valence.errors import UserError

app = typer.Typer(
    help="Align language models with feedback. A recipe is a YAML file that names a method, a model and data: `valence losses` "
    "lists the methods, `valence check RECIPE` says what would happen, `valence train RECIPE` does it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Console()

RecipeArg = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, e.g. train.seed=1; `valence check RECIPE` lists them all."),
]

STOPPED = 130  # the shell's number for a program ended by Ctrl-C; documented in the README
MISTAKE = 2


def main() -> None:
    """Runs a command. Exit status: 0 done, 2 the user's mistake, 130 stopped by a signal (state saved), 1 a defect."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app(standalone_mode=True)
    except UserError as error:
        Console(stderr=True).print(f"valence: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


def _version(asked: bool) -> None:
    if asked:
        from valence import __version__

        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def valence(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    del version


@app.command()
def train(
    recipe: RecipeArg,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run in the same folder aside and start anew.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but mistakes.")] = False,
) -> None:
    """Train: audit the data, run the recipe, write model, log and report into its run folder."""
    from valence.api import train as run_recipe
    from valence.training.loop import Interrupted

    try:
        run = run_recipe(recipe, overrides=overrides or [], fresh=fresh, quiet=quiet, console=console, command=_command())
    except Interrupted as stopped:
        console.print(
            f"{stopped}; its state is in the run's checkpoints, which `valence evaluate`, `sample` and `export` read",
            style="yellow",
            markup=False,
        )
        sys.exit(STOPPED)
    if not quiet and run.folder:
        for name, what in (("model", "model"), ("metrics.jsonl", "log"), ("report.html", "report")):
            console.print(f"{what:>7}  {run.folder.path / name}", markup=False, soft_wrap=True)


@app.command()
def check(recipe: RecipeArg, overrides: Overrides = None) -> None:
    """Everything short of training: the settings and where each came from, the data, steps, predicted memory and time."""
    from valence.api import show_audit
    from valence.config.load import load_recipe
    from valence.training.methods import method_of
    from valence.training.plan import describe, make_plan
    from valence.training.setup import prepare

    source = load_recipe(recipe, overrides or [], method_of=method_of)
    table = _settings_table("value", "from")
    for name, setting in source.settings.items():
        style = "dim" if setting.is_default else ""
        table.add_row(name, json.dumps(setting.value, ensure_ascii=False, default=str), setting.origin, style=style)
    console.print(table)
    prepared = prepare(source)
    show_audit(prepared, console)
    for line in describe(make_plan(prepared)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def score(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL|RUN", help="A recipe; with --data also a model's folder or hub id, or a run's folder."
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Score the answers of this file of rows; may be given several times.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the rows with their scores to this .jsonl; go on with it where it ends.")
    ] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="A model to compare with: adds rewards.")] = None,
    beta: Annotated[
        float | None,
        typer.Option(
            "--beta", help="Of the rewards. Default: the recipe's, or 0.1; a run is scored with the reward that it trains."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 (default), bfloat16 or float64.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Longest row, in tokens. Default: 1024.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens that run at once. Default: 8192.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="Format of the rows. Default: detected.")] = None,
    column: Annotated[str, typer.Option("--column", help="Name of the new column.")] = "valence",
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier --out aside and start anew.")] = False,
    verify: Annotated[
        int, typer.Option(min=0, help="Of a reference cache: compute this many sequences once more afterwards, and compare.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but mistakes.")] = False,
) -> None:
    """With --data and --out: write log-probabilities and rewards of every answer beside its row. Else: fill a recipe's reference
    cache, so that its training runs no reference. Stopped, it goes on where it was."""
    settings = {"model.dtype": dtype, "data.max_length": max_length, "reference.model": reference}
    ours = [f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None]
    try:
        if data and out and not verify:
            from valence.training.score_rows import score_rows

            score_rows(
                target, data, out, overrides=[*(overrides or []), *ours], format=format, beta=beta, tokens=tokens, column=column,
                fresh=fresh, console=console, quiet=quiet,
            )  # fmt: skip
        else:
            _check_fills(target, any((data, out, ours, beta, tokens, format, fresh, column != "valence")))
            from valence.training.score import score as fill

            fill(target, overrides or [], verify=verify, console=console, quiet=quiet, command=_command())
    except KeyboardInterrupt:
        console.print("stopped; what was computed is kept, and the same command goes on from there", style="yellow")
        sys.exit(STOPPED)


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
) -> None:
    """Measure a run, or the policy a recipe starts from, on held-out rows."""
    run = _run_of(target, [*_held_out(data), *(overrides or [])])
    if "eval" not in run.prepared.corpora:
        raise UserError("there are no rows to measure on", where=str(target), fix="give --data, or data.eval in the recipe")
    found = run.evaluate()
    table = Table("metric", "value", box=None, pad_edge=False)
    for name, value in found.metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
    if out:
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
    run = _run_of(target, ["data.eval=[]"])
    lines: list[str] = []
    for content, answers in zip(asked, run.sample(asked, how, number), strict=True):
        text = as_text(content, run.prepared.tokenizer)
        shown: Any = [dict(m) for m in content.messages] if isinstance(content, Chat) else text
        for completion in answers:
            lines.append(
                json.dumps({"prompt": shown, "completion": completion.text, "stop": completion.stop}, ensure_ascii=False)
            )
            if not out:
                console.print(f"> {text}", style="bold", markup=False, soft_wrap=True)
                console.print(f"{completion.text}\n", markup=False, highlight=False, soft_wrap=True)
    if out:
        _write(out, "\n".join(lines) + "\n")


@app.command()
def inspect(
    recipe: RecipeArg,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option("--row", min=1, help="Which row, counted from 1 over the list's files, bad rows too.")] = 1,
    stage: Annotated[Literal["row", "example", "tokens", "all"], typer.Option(help="How far along its way.")] = "all",
    which: Annotated[Literal["train", "eval", "test"], typer.Option("--list", help="Which of the recipe's lists.")] = "train",
) -> None:
    """Show a row as it is read, the examples made of it, and their tokens with the trained ones coloured; or why it is bad."""
    from valence.training.look import look

    for part in look(recipe, overrides or [], which=which, number=row, stage=stage):
        console.print(part)


@app.command()
def losses(name: Annotated[str | None, typer.Argument(help="One loss, with its settings.")] = None) -> None:
    """List the losses, or explain one."""
    from valence.config.describe import settings_table
    from valence.training.explain import facts, read_doc
    from valence.training.methods import METHODS, method_of
    from valence.types import plural

    if name is None:
        table = Table("loss", "reads", "reference", "what it does", box=None, pad_edge=False)
        for method in METHODS.values():
            summary = read_doc(method.loss.fn.__doc__ or "").summary
            table.add_row(method.name, plural(method.kind), "yes" if method.needs_reference else "no", escape(summary))
        console.print(table)
        return
    method = method_of(name)
    doc = read_doc(method.loss.fn.__doc__ or "")
    for part in filter(None, (doc.summary, doc.formula, doc.source)):
        console.print(f"{part}\n", markup=False, highlight=False)
    told = Table(box=None, pad_edge=False, show_header=False)
    told.add_column(no_wrap=True)
    for heading, words in facts(method).items():
        told.add_row(heading, escape(words))
    console.print(told)
    table = _settings_table("type", "default", "meaning")
    for line in settings_table(method.settings, "loss."):
        table.add_row(*map(escape, (line.name, line.type, line.default, line.meaning)))
    console.print(table)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    to: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the model.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone instead of merged weights.")] = False,
) -> None:
    """Write a run's newest weights as a folder that transformers loads and vLLM serves."""
    from valence.training.finish import write_model

    if to.exists():
        raise UserError("this exists already", where=str(to), fix="name a folder that does not exist")
    _check_can_be_made(to)
    run = _run_of(run_dir, ["data.eval=[]"], keeps=_needed_to_write(run_dir))
    if adapter and run.prepared.method.of_scores:
        what = "a reward model is written whole: its head is what an adapter would be worth nothing without"
        raise UserError(what, where=str(run_dir), fix="leave out --adapter")
    if adapter and run.recipe.model.lora is None and run.recipe.model.adapter is None:
        raise UserError("the run trained all weights: there is no adapter", where=str(run_dir), fix="leave out --adapter")
    write_model(run, to, "adapter" if adapter else "merged")
    console.print(str(to), markup=False, soft_wrap=True)


def _needed_to_write(run_dir: Path) -> tuple[str, ...]:
    """Lists of rows without which a run's model cannot be written: a reward model's training rows say how it scores."""
    from valence.training.restore import method_of_run

    return ("train",) if method_of_run(run_dir).of_scores else ()


def _run_of(target: Path, overrides: list[str], keeps: tuple[str, ...] = ()) -> Any:
    """The run of a folder with its newest weights, or that of a recipe before its first step. keeps: its own lists of rows that
    are read."""
    from valence.config.load import load_recipe
    from valence.training.build import build_models
    from valence.training.loop import Run
    from valence.training.methods import method_of
    from valence.training.restore import restore
    from valence.training.setup import prepare

    overrides = [*(f"data.{name}=[]" for name in ("train", "test") if name not in keeps), *overrides]
    if target.is_dir():
        return restore(target, overrides=overrides, console=console)
    prepared = prepare(load_recipe(target, overrides, method_of=method_of, training=False))
    return Run(prepared, *build_models(prepared), console=console)


def _check_fills(target: str, for_rows: bool) -> None:
    """Raises UserError unless `score` was called as it is to fill a reference cache."""
    if for_rows or not (Path(target).is_file() or Path(target).suffix in (".yaml", ".yml")):
        raise UserError(
            "rows are scored with --data FILE and --out FILE, a recipe's reference cache is filled with neither",
            where="score",
            fix="give both (and not --verify), or a recipe alone",
        )


def _settings_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for column in columns:
        table.add_column(column)
    return table


def _held_out(files: list[str] | None) -> list[str]:
    """Overrides that measure all rows of these files."""
    if not files:
        return []
    listed = json.dumps([{"path": path} for path in files], ensure_ascii=False)
    return [f"data.eval={listed}", "data.limit=null", "eval.max_examples=null"]


def _check_can_be_made(folder: Path) -> None:
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


def _command() -> str:
    import shlex

    return shlex.join(["valence", *sys.argv[1:]])


if __name__ == "__main__":
    main()
