"""The text of `valence --help`, and the panel, order and example of each command."""

from __future__ import annotations

import typer

HELP = """Fine-tune language models on human or automatic feedback.

Get started:

1. `valence demo` trains a small model on examples that come with Valence.
2. `valence init FILE` writes a recipe for your feedback: thumbs (`kto`), pairs (`dpo`) or demonstrations (`sft`). `valence docs` lists all methods and recipes, such as those with a reward (`grpo`).
3. `valence check RECIPE` checks the settings and the rows, and estimates memory.
4. `valence train RECIPE` trains the model and writes the folder `run.dir`. If it was stopped, rerun it to resume.
5. Open `report.html` in that folder, and try the model: `valence sample RUN --prompt TEXT`.

`valence doctor` checks this machine. Every command has `--help` with an example.
"""

TRAIN, MODELS, DATA, SETUP = "Train", "Use a model", "Feedback data", "Setup and reference"

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (TRAIN, "valence demo"),
    "init": (TRAIN, "valence init feedback.csv"),
    "check": (TRAIN, "valence check recipe.yaml train.batch_size=8"),
    "train": (TRAIN, "valence train recipe.yaml run.dir=runs/first"),
    "sweep": (TRAIN, "valence sweep recipe.yaml --over loss.beta=0.03,0.1,0.3 --out sweeps/beta"),
    "report": (TRAIN, "valence report runs/first runs/second"),
    "evaluate": (MODELS, "valence evaluate runs/first --data held_out.jsonl --out metrics.json"),
    "sample": (MODELS, 'valence sample runs/first --prompt "Why is the sky blue?" -n 2'),
    "score": (MODELS, "valence score runs/first --data rows.jsonl --out scored.jsonl"),
    "compare": (
        MODELS,
        "valence compare recipe.yaml runs/first --prompts held_out.jsonl --judge runs/judge",
    ),
    "export": (MODELS, "valence export runs/first my-model"),
    "serve": (MODELS, "valence serve runs/first --out feedback.jsonl"),
    "import": (DATA, "valence import open-webui export.json --out feedback.jsonl"),
    "split": (DATA, "valence split feedback.csv --share 0.2"),
    "collect": (DATA, "valence collect runs/first --out feedback.jsonl"),
    "audit": (DATA, "valence audit feedback.jsonl --model runs/first --out review.jsonl"),
    "select": (
        DATA,
        "valence select prompts.jsonl --rated feedback.jsonl --model runs/first --out next.jsonl",
    ),
    "inspect": (DATA, "valence inspect recipe.yaml --row 2"),
    "doctor": (SETUP, "valence doctor recipe.yaml"),
    "docs": (SETUP, "valence docs kto"),
}
"""The panel and the example of each command, in the order of the help."""

RENAMED = {
    "resume": "valence train RUN",
    "runs": "valence report",
    "ab": "valence report FILE",
    "serve-reward": "valence serve --reward REWARD",
    "losses": "valence docs NAME",
    "rewards": "valence docs NAME",
    "recipes": "valence init --recipe NAME",
}
"""Commands of earlier versions, and what does their work."""


def arrange(app: typer.Typer) -> None:
    """Set the panel, the order and the example of each command.

    A command that is not in ``COMMANDS`` comes last, unchanged.
    """
    order = {name: index for index, name in enumerate(COMMANDS)}
    for command in app.registered_commands:
        panel, example = COMMANDS.get(name(command), (None, None))
        if panel and example:
            command.rich_help_panel, command.epilog = panel, f"Example: `{example}`"
    app.registered_commands.sort(key=lambda command: order.get(name(command), len(order)))


def name(command: typer.models.CommandInfo) -> str:
    """The name of a command on the command line."""
    return command.name or (command.callback.__name__ if command.callback else "")
