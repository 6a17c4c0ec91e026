"""What the help says besides each command's own words: which commands go together, in which order,
and an example of each.
"""

from __future__ import annotations

import typer

HELP = """Align language models with feedback.

The shortest path, from what you have to a report of what happened:

1. What you have: thumbs (`kto`), pairs (`dpo`), demonstrations (`sft`), prompts and a reward (`grpo`): `recipes/` has one each.
2. `valence check RECIPE` says what would happen, and what is wrong with the rows.
3. `valence train RECIPE` does it, into the folder that `run.dir` names. Stopped, the same command goes on.
4. `report.html` in that folder shows what happened, and `valence sample RUN --prompt TEXT` asks the model.

`valence doctor` says whether this machine is ready. Every command has `--help` with an example; README.md and `docs/` beside the
source tell more.
"""

TRAIN, ASK = "Train", "Measure, ask and export"
LOOK, JUDGE, OTHER = "Look and compare", "Rewards, and rows of your own", "This machine"

COMMANDS: dict[str, tuple[str, str]] = {
    "check": (TRAIN, "valence check recipes/kto.yaml train.batch_size=8"),
    "train": (TRAIN, "valence train recipes/kto.yaml run.dir=runs/first"),
    "resume": (TRAIN, "valence resume runs/first"),
    "runs": (LOOK, "valence runs"),
    "report": (LOOK, "valence report runs/first runs/second"),
    "inspect": (LOOK, "valence inspect recipes/kto.yaml --row 2"),
    "losses": (LOOK, "valence losses kto"),
    "evaluate": (ASK, "valence evaluate runs/first --data held_out.jsonl --out found.json"),
    "sample": (ASK, 'valence sample runs/first --prompt "Why is the sky blue?" -n 2'),
    "compare": (
        ASK,
        "valence compare recipes/kto.yaml runs/first --prompts held_out.jsonl --judge runs/judge",
    ),
    "export": (ASK, "valence export runs/first my-model"),
    "import": (JUDGE, "valence import open-webui export.json --out feedback.jsonl"),
    "collect": (JUDGE, "valence collect runs/first --out feedback.jsonl"),
    "audit": (JUDGE, "valence audit feedback.jsonl --model runs/first --out review.jsonl"),
    "select": (
        JUDGE,
        "valence select prompts.jsonl --rated feedback.jsonl --model runs/first --out next.jsonl",
    ),
    "score": (JUDGE, "valence score runs/first --data rows.jsonl --out scored.jsonl"),
    "rewards": (JUDGE, "valence rewards exact_match"),
    "serve-reward": (JUDGE, "valence serve-reward exact_match --port 5000"),
    "doctor": (OTHER, "valence doctor recipes/kto.yaml"),
}
"""By command, in the order of the help: its panel, and an example."""


def arrange(app: typer.Typer) -> None:
    """Puts panels, order and examples into the help.

    A command that the table above lacks stays as it is, behind the others.
    """
    order = {name: place for place, name in enumerate(COMMANDS)}
    for command in app.registered_commands:
        panel, example = COMMANDS.get(_name(command), (None, None))
        if panel and example:
            command.rich_help_panel, command.epilog = panel, f"Example: `{example}`"
    app.registered_commands.sort(key=lambda command: order.get(_name(command), len(order)))


def _name(command: typer.models.CommandInfo) -> str:
    return command.name or (command.callback.__name__ if command.callback else "")
