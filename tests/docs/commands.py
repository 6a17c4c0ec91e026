"""``python -m tests.docs.commands`` writes docs/cli.md from the commands."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo

from tests.docs.blocks import ROOT
from valence import cli
from valence.cli.guide import COMMANDS, name

Row = tuple[str, str]
"""The label and the meaning of an argument or option."""
PAGE = ROOT / "docs" / "cli.md"
HEAD = """\
# Command line

All commands with their arguments and options. `--help` of a command says more, such as which options can be repeated.

- Commands run on the first GPU that PyTorch finds (CUDA, else MPS), else on the CPU. `CUDA_VISIBLE_DEVICES=1 valence sample ...` chooses
  another GPU, an empty value the CPU. `train`, `score`, `evaluate`, `sample` and `export` run in N processes with `--nproc N`, or under
  torchrun and `accelerate launch` ([several processes](scale.md)).
- The option `--install-completion` of `valence` sets up tab completion of commands, settings, recipes and runs in bash, zsh and fish.
- Parentheses have the default of an option.
- `RECIPE` stands for a YAML file, `RUN` for the folder of a run, and `MODEL` for the folder or hub id of a model or adapter. The model of a
  recipe is the one before training.
- A file of rows is .jsonl, .json, .csv, .tsv or .parquet (also .gz), or a section as in a recipe. A reward is a function, a rule, a reward
  model, the address of a server, or a section.

`python -m tests.docs.commands` writes this page.

## Common options

Several commands have these options. They list only the names, after *Also*.
"""
JSON = "Print JSON: see [Output for programs](#output-for-programs)."
"""The meaning of --json, which `--help` describes for each command."""
TAIL = """\
## Exit status

| Exit status | Meaning |
| --- | --- |
| 0 | done; also a run that ended early because of `run.early_stop`, `train.max_zero_gradient_steps` or `train.stop_on_collapse` |
| 1 | a defect of Valence, with a traceback; with `--nproc`, also a killed process |
| 2 | a mistake in the recipe, the data or the command line; a problem of the machine, such as a full disk; a judge that reached `max_cost`, or has less than `--min-agreement`. The message says where and how to fix it |
| 3 | `valence compare`: the model fails a gate (`--at-least`, `--max-broken`, `--max-forgetting`); `valence export`: an exported file [differs](ship.md#differences) from the run |
| 124 | `run.max_time` was reached |
| 129 | SIGHUP (the terminal was closed) |
| 130 | Ctrl-C; a second one exits immediately |
| 137 | killed (`kill -9`, or by the system when memory runs out) |
| 138 | SIGUSR1 |
| 143 | SIGTERM |

After 124 and above, the same command [resumes](train/runs.md) from the saved state, after 137 from the last checkpoint. torchrun and
`accelerate launch` turn all but 0 into 1.

## Output for programs

With `--json`, standard output has JSON only; messages go to standard error. On failure, the object has `status: "failed"`, `error` and a
stable `code`, such as `setting-unknown`. `valence docs CODE` explains it.

| Command | Output |
| --- | --- |
| `train` | one object per line: `{"event": "started", ...}`, each record of the log as in `metrics.jsonl`, and `{"event": "done", ...}` with the exit status and the paths of model and report |
| `report` | one object per run; of an A/B test, one object with `better` (`a`, `b` or null), `verdict`, `established_at`, `votes_left`, `e_values`, `threshold`, `alpha`, `share`, `min_votes`, and for `a` and `b` `run`, `step`, `thumbs_up`, `thumbs_down`, `votes`, `ups`, `rate` and `interval` |
| `sweep` | one object per trial, and a last one with the results |
| `import` | `votes`, `counts`, `follow_ups`, `files`, `feedback`, `skipped`, `models`, `weights`, `agreement` |
| `audit` | `kinds` (for each kind of row: `form`, `states`, `unusable`), `contradictions`, `contradicted_pairs`, `near_duplicates`, `agreement`, `personal`, `feedback`, `unrated`, `bad`, `out` |
| `export` | the verification |
| `inspect` | the tokens of each example, with `--signal` also their signals |
| `doctor` | one object per check |
| `select` | `prompts`, `selected`, `order`, `auc`, `interval`, `left_out`, `out` |
| `compare` | `baseline`, `candidate`, `prompts`, `duplicates`, `trained`, `answers`, `calibrations`, `notes`, `folder`; `judges`, each with `judge`, `win_rate` and `length_controlled` (`value`, `low`, `high`), `wins`, `ties`, `losses`, `failed`, `tags`, `clearest`, and of some `error`, `position` or `cost`; with assertions `assertions` (`number`, `baseline`, `candidate`, `unchecked`, `broken`, `fixed`); with lm-eval `benchmarks`; with a gate `at_least`, `max_broken`, `passed` |
"""


def page() -> str:
    functions = {name(command): command.callback for command in cli.app.registered_commands}
    options = {command: _options(functions[command]) for command in COMMANDS}
    common = _common(chain.from_iterable(options.values()))
    shared = _list(common.items()).replace("Settings to", "[Settings](settings.md) to")
    parts, panel = [HEAD, shared], ""
    for command, (title, example) in COMMANDS.items():
        if title != panel:
            panel = title
            parts.append(f"## {title}\n")
        parts += [f"### valence {command}\n", _summary(functions[command])]
        parts += [f"```sh\n{example}\n```\n", _command_options(options[command], common)]
    return "\n".join([*parts, TAIL])


def _common(rows: Iterable[Row]) -> dict[str, str]:
    """The options that at least three commands have, with the default if it is the same for all.

    Two commands are enough if the option has no other meaning.
    """
    meanings: dict[tuple[str, str], list[str]] = {}
    for label, meaning in rows:
        meanings.setdefault((label, _parts(meaning)[0]), []).append(meaning)
    counts = Counter(label for label, _ in meanings)
    return {
        label: text if len(set(same)) > 1 else same[0]
        for (label, text), same in sorted(meanings.items())
        if len(same) >= (2 if counts[label] == 1 and label.startswith("`-") else 3)
    }


def _command_options(rows: Sequence[Row], common: Mapping[str, str]) -> str:
    """The options of one command; those that are common by name and default."""
    names, others = list[str](), list[Row]()
    for label, meaning in rows:
        text, default = _parts(meaning)
        name = re.sub(r"^(`-\S+) .*`$", r"\1`", label)
        if common.get(label) == meaning:
            names.append(name)
        elif common.get(label) == text:
            names.append(f"{name} ({_code(default)})")
        else:
            others.append((label, meaning))
    return _list(others) + (f"- Also {', '.join(names)}\n" if names else "")


def _list(rows: Iterable[Row]) -> str:
    return "".join(f"- {_item(*row)}\n" for row in rows)


def _item(label: str, meaning: str) -> str:
    """An option with its default and the first sentence about it."""
    text, default = _parts(meaning)
    first = re.split(r"(?<=[\w)`'])(?<!e\.g)\. (?=[A-Z`-])", text)[0].rstrip(".")
    if default and default != _code(default):
        return f"{label} ({_code(default)}): {first}."
    return f"{label}: {first}. Default: {default}." if default else f"{label}: {first}."


def _code(default: str) -> str:
    """A default as code if it is a value."""
    return default if " " in default or default in ("detected", "unlimited") else f"`{default}`"


def _parts(meaning: str) -> tuple[str, str]:
    """The meaning of an option, and its default."""
    text, _, default = meaning.partition(" Default: ")
    return text, default.rstrip(".")


def _summary(function: Any) -> str:
    """The first paragraph about a command."""
    return " ".join(inspect.cleandoc(function.__doc__).partition("\n\n")[0].split()) + "\n"


def _options(function: Any) -> list[Row]:
    """The arguments and options, arguments first."""
    hints = get_type_hints(function, include_extras=True)
    rows = [
        _row(parameter, hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if get_origin(hints[parameter.name]) is Annotated
    ]
    rows = [(label, JSON if label == "`--json`" else meaning) for label, meaning in rows]
    return sorted(rows, key=lambda row: row[0].startswith("`-"))


def _row(parameter: inspect.Parameter, hint: Any) -> Row:
    """The label and the meaning of an argument or option."""
    kind, info = get_args(hint)[:2]
    meaning = " ".join((info.help or "").split())
    shown = not any(parameter.default is d for d in (inspect.Parameter.empty, None, False, True))
    shown = shown and parameter.default != []
    if shown and "Default" not in meaning:
        meaning += f" Default: {parameter.default}."
    if isinstance(info, ArgumentInfo):
        return f"`{info.metavar or parameter.name.upper()}`", meaning
    option = f"--{parameter.name.replace('_', '-')}"
    # In `Annotated`, typer takes the first name of an option for its default.
    first = [info.default] if isinstance(info.default, str) else []
    names = [*first, *(info.param_decls or ())]
    if kind in (bool, bool | None):
        names = names or [option, f"--no-{option[2:]}"]
        return ", ".join(f"`{part}`" for name in names for part in name.split("/")), meaning
    choices = "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    value = info.metavar or choices
    return ", ".join(f"`{name} {value}`".replace(" `", "`") for name in names or [option]), meaning


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
