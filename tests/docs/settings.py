"""``python -m tests.docs.settings`` writes docs/settings.md from the schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tests.docs.blocks import ROOT
from valence.config.describe import SettingRow, settings_table
from valence.data.convert import CONVERSIONS
from valence.data.format_table import FORMATS, SHAPES, Format
from valence.methods import METHODS, ONLINE
from valence.methods.learning_rates import LEARNING_RATES

PAGE = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

All settings of a recipe but those under `loss`, which depend on the method: see [Losses](losses/index.md). `valence docs SETTING`, such as
`valence docs train.compile`, says more about a setting.

- To change a setting on the command line, append it: `valence train RECIPE train.seed=1`.
- `N` stands for an index in a list. A list with one item can be written as that item, without the index: `data.train.limit=3`.
- A model, a file of rows, a reward and a tracker can be written as a name: `model: owner/model`.
- Paths are relative to the working directory; data files are also looked up in the folder of the recipe. `~` is your home folder.
- Parentheses have the default of a setting, as code, and its other values. Without a default, it is `null`; without parentheses, a text or
  `null`.
- Numbers are above 0 unless another range is given. A default such as `16` stands for an integer, `1.0` for any number.

`python -m tests.docs.settings` writes this page.
"""

SHORT = {
    "a number of at least 0 and at most 1": "0 to 1",
    "a list of 2 items (each a number)": "two numbers",
    "a list of 2 items (a number below 0, a number above 0)": "two numbers, < 0 and > 0",
    "a list of 2 items (each a number of at least 0 and below 1)": "each ≥ 0 and < 1",
    "a list (each a whole number of at least 0)": "list of integers ≥ 0",
    "a whole number above 0 and": "integer",
    "a whole number above 0": "integer",
    "a whole number of at least": "integer ≥",
    "a whole number": "integer",
    "a number above 0 and": "number",
    "a number above 0": "number",
    "a number of at least": "number ≥",
    "a number above": "number >",
    "a number below": "number <",
    "a number": "any number",
    "above": ">",
    "at most": "≤",
    "below": "<",
    "one of ": "",
    " (each text)": "",
    " (each a section)": "",
    "a mapping of names to values": "mapping",
    "a section": "section",
    "a list of": "list of",
    "a list": "list",
}
"""Short forms of phrases about allowed values."""

LIKE_TRAIN = ("data.eval.N.", "data.test.N.", "mix.N.train.N.")
"""Lists of files, whose settings are those of ``data.train.N``."""
NOTES = {
    "data": "Items of `data.eval`, `data.test` and `mix.N.train` have the settings of `data.train.N`.\n\n"
}

SECTIONS = {
    "method": "The method",
    "model": "The model to train",
    "reference": "The reference model",
    "teacher": "The teacher of hindsight and distillation",
    "data": "Training, evaluation and test rows",
    "loss": "The loss",
    "train": "Optimizer and steps",
    "mix": "Additional losses",
    "reward": "Rewards of online training",
    "rollout": "Sampling completions in online training",
    "value": "The value head of ppo",
    "eval": "Evaluation",
    "parallel": "Several processes",
    "run": "The run: folder, checkpoints, trackers",
}
"""The title of each section."""

RATES = """\
## Default learning rates

`train.learning_rate: auto` uses the rate of the method, for all weights or for an adapter. `valence check RECIPE` shows it, the run records
it, and a resumed run keeps it. Small models need larger rates: those in [recipes](train/methods.md#recipes) are for a model with 135 million
weights. Ten times the rate is the advice of Schulman et al. 2025, LoRA Without Regret.

| methods | all weights | adapter |
| --- | --- | --- |
"""
TEN_TIMES = "ten times the rate for all weights: Schulman et al. 2025, LoRA Without Regret"


CONVERT = """\
## Conversions

`data.convert` converts rows into the kind that the method reads. In parentheses are the settings of the section `data` that it reads; those
in bold must be set.

"""
ROWS = """\
## Row formats

`format` takes these names, those of [feedback tools](feedback/import.md#tools), and those of
[public data sets](feedback/rows.md#public-data-sets-and-other-names). Optional columns are after the semicolon; every row may also have `weight`
and `info`. [Rows](feedback/rows.md) shows examples.
"""


def page() -> str:
    """The content of the page."""
    rows: dict[str, list[SettingRow]] = {}
    for row in settings_table():
        if row.name.startswith(LIKE_TRAIN):
            continue
        rows.setdefault(row.name.split(".")[0], []).append(row)
    del rows["loss"]  # which has no settings in the schema
    sections = "\n".join(
        f"## {SECTIONS[name]}\n\n{NOTES.get(name, '')}{settings_list(rows[name])}"
        for name in SECTIONS
        if name in rows
    )
    assert rows.keys() <= SECTIONS.keys()
    return "\n".join(
        (HEAD, sections, RATES + rates(), CONVERT + conversions(), ROWS + row_formats())
    )


def conversions() -> str:
    """The list of conversions."""
    items: list[str] = []
    for name, c in CONVERSIONS.items():
        names = [f"**`{s}`**" if s in c.required else f"`{s}`" for s in c.settings]
        settings = f" ({', '.join(names)})" if names else ""
        items.append(f"- `{name}`, {_either(c.reads)} to {c.gives}: {c.description}{settings}\n")
    return "".join(items)


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def row_formats() -> str:
    """The list of row formats, by the kind of row."""
    kinds: dict[str, list[str]] = {}
    for name, f in FORMATS.items():
        if name not in SHAPES:
            columns = "; ".join(filter(None, (_names(f, True), _names(f, False))))
            kinds.setdefault(f.gives, []).append(f"- `{name}`: {columns}\n")
    return "".join(f"\n{kind.capitalize()}:\n\n{''.join(names)}" for kind, names in kinds.items())


def shapes() -> str:
    """The rows of the table of public shapes in docs/feedback/rows.md."""
    return "".join(
        f"| `{name}` | {_names(f, True)} | {_names(f, False)} | {f.gives} |\n"
        for name, f in SHAPES.items()
    )


def other_names() -> str:
    """The rows of the table of other names of columns in docs/feedback/rows.md."""
    names: dict[str, dict[str, None]] = {}
    for name, f in FORMATS.items():
        for column, others in f.others.items() if name not in SHAPES else ():
            names.setdefault(column, {}).update(dict.fromkeys(others))
    return "".join(
        f"| `{column}` | `{' '.join(others)}` |\n" for column, others in names.items() if others
    )


def _names(f: Format, is_required: bool) -> str:
    columns = " ".join(column for column in f.parts if (column in f.required) is is_required)
    return f"`{columns}`" if columns else ""


def rates() -> str:
    """The rows of the table of default learning rates, with links to their sources."""
    rows = (
        f"| {r.methods} | {_rate(r.full)}: {r.full_source} | {_rate(r.adapter)}: "
        f"{r.adapter_source.replace(TEN_TIMES, 'ten times')} |\n".replace(f" ({_rate(r.full)})", "")
        for r in LEARNING_RATES.values()
    )
    link = r"[\1](https://arxiv.org/abs/\2)"
    return re.sub(r"(\w[\w ]+ et al\. \d+), arXiv ([\d.]+)", link, "".join(rows))


def settings_list(rows: Sequence[SettingRow]) -> str:
    """A list of settings with the allowed values, the default and the first paragraph of each.

    Settings of several sections that are the same are one item.
    """
    link = "[Default learning rates](#default-learning-rates)"
    names: dict[SettingRow, list[str]] = {}
    for row in rows:
        leaf = replace(row, name=row.name.rpartition(".")[2])
        names.setdefault(leaf, []).append(f"`{row.name}`")
    text = "".join(
        f"- {', '.join(same)} ({allowed_values(row)}): {row.summary}\n".replace(" (text):", ":")
        for row, same in names.items()
    )
    return text.replace("the table of default learning rates in docs/settings.md", link)


def allowed_values(row: SettingRow) -> str:
    """The default of a setting as code if it is not null, and the other values that it may have."""
    default = row.default.strip('"')
    if row.name.endswith("convert"):
        return "[conversion](#conversions)"
    if default == "null":
        return " or ".join(_short(value) for value in _values(row) if value != "null")
    if default == "required":
        return ", ".join([default, *(_short(value) for value in _values(row) if value != "text")])
    others = [value for value in _values(row) if value not in SHOWN_BY.get(_kind(default), ())]
    words = [_short(word) for value in others for word in value.removeprefix("one of ").split(", ")]
    if _kind(default) == "number":
        words = [re.sub(r"^(number|integer) ?", "", word) for word in words]
    return ", ".join([f"`{default}`", *(word for word in words if word not in (default, ""))])


SHOWN_BY = {
    "word": ("text",),
    "switch": ("true", "false"),
    "{}": ("a mapping of names to values",),
    "[]": ("a list (each a section)", "a list (each text)"),
}
"""Values that the default of a setting shows, by the kind of the default."""


def _kind(default: str) -> str:
    if default in ("true", "false"):
        return "switch"
    return (
        "number"
        if re.fullmatch(r"[\d.]+", default)
        else "word"
        if default[0].isalpha()
        else default
    )


def _values(row: SettingRow) -> list[str]:
    """The alternatives of what a setting takes."""
    text = row.type
    while text != (text := re.sub(r"a section \([^()]*\)", "a section", text)):
        pass
    return [value.strip('"') for value in text.split(" or ")]


def _short(text: str) -> str:
    """Allowed values in few words, without the limits that no recipe reaches."""
    text = re.sub(
        r"( and)? (at most [\d,]+,000\b|at most 65,536|at most 1,048,576|below 2\^63)", "", text
    )
    return re.sub("|".join(map(re.escape, SHORT)), lambda match: SHORT[match[0]], text)


def _rate(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


@cache
def setting_names() -> frozenset[str]:
    """Every setting of a recipe, those of the ``loss`` section of all methods among them."""
    methods = (*METHODS.values(), *ONLINE.values())
    of_methods = {f"loss.{name}" for method in methods for name in method.settings.model_fields}
    return frozenset({row.name for row in settings_table()} | of_methods)


def is_setting(name: str) -> bool:
    """Whether a setting or a section has this name, in which ``N`` stands for an index."""
    return name in setting_names() or any(
        setting_name.startswith(f"{name}.") for setting_name in setting_names()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
