"""``python -m tests.docs.losses`` writes docs/losses/ from the table of losses, the docstrings and
the guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tests.docs.blocks import ROOT
from tests.docs.settings import table
from tests.units import ADVANTAGES
from valence.cli.explain import Doc, builder_doc, facts, loss_name, method_doc, read_doc, switch
from valence.config.describe import SettingRow, settings_table
from valence.losses.modifiers import MODIFIERS
from valence.methods import METHODS, ONLINE, Method

FOLDER = ROOT / "docs" / "losses"

INDEX = """\
# Losses

Each method of Valence trains with one loss. For each loss, these pages list the formula, source, inputs and settings, when to use it, and what
its training curves look like. `valence docs NAME` prints the same in a terminal. [Choose a method](../train/methods.md) helps you to choose.

## Notation

| symbol | meaning |
| --- | --- |
| `logp`, `ref`, `old` | log-probability (nats) of a completion, summed over its tokens, under the policy, the reference, and the policy that sampled the completion |
| `_t` | suffix: of one token |
| `_w`, `_l` | suffixes: of the chosen and the rejected completion of a pair |
| `n` | number of tokens in the completion, including its end-of-turn token |
| `r` | log-ratio, `logp - ref` |
| `d` | `r` of the chosen completion minus `r` of the rejected one |
| `s` | sigmoid, `1/(1 + exp(-x))` |
| `e`, `wrong` | probability that a label is wrong: @label_smoothing, or `1 - soft` of the row |
| `margin` | required lead of the chosen completion, from the column `margin` of the row; 0 if the row has none |
| `z0` | reference point of kto: the mean of `r` over the mismatched completions of the step (each prompt with the completion of another row), clamped at 0 from below |
| `delta` | threshold of bco and bco_pair. Each step computes the mean `beta*r` of each class (thumbs up and thumbs down, or chosen and rejected) and takes the midpoint of the two means; `delta` is the running mean of these midpoints, saved with the run |
| `A`, `rho` | advantage; ratio of the probability of a token (or completion) under the policy to that under the policy that sampled it |
| `G`, `R` | number of completions per prompt; reward (or score) of a completion |
| `G_t`, `V_t` | return and value estimate at a token; `G` and `V` in the formula of the [value](modifiers.md#value) term |
| `mean_g`, `std_g` | mean and standard deviation of `R` over the completions of a prompt |
| `score`, `target` | output of a reward model; the score in the row, or 1 for thumbs up and 0 for thumbs down |
| `[S]`, `[P]`, `[T]`, `[A]` | one value per completion, pair, token, attribute |

Every row can have a `weight`. The loss of a step is the weighted sum over its examples, divided by the number of examples and not by the
sum of weights. *Average* says what the loss is averaged over. *First step* is the direction in which a step moves the model while policy
and reference are equal. For logged metrics, see [Metrics](../metrics.md).
"""

FAMILIES: dict[str, tuple[str, str, Callable[[Method], bool]]] = {
    "thumbs": (
        "Losses for thumbs",
        "These losses train on single completions rated up or down.",
        lambda m: m.kind == "judgement",
    ),
    "pairs": (
        "Losses for pairs",
        "These losses train on pairs of a chosen and a rejected completion of one prompt. "
        "[Notation](index.md#notation) defines the symbols.",
        lambda m: m.kind == "preference" and not m.is_reward_model,
    ),
    "demonstrations": (
        "Losses for demonstrations",
        "These losses train a model to imitate the completions in the rows (demonstrations).",
        lambda m: m.kind == "demonstration",
    ),
    "feedback": (
        "Losses for feedback in words",
        "These losses train on completions with what their readers wrote about them. The teacher "
        "is the model itself, which also reads the feedback. "
        "[Learn from what people write](../train/hindsight.md) explains the method.",
        lambda m: m.kind == "feedback",
    ),
    "policy-gradient": (
        "Policy-gradient losses",
        "These losses train on several scored completions per prompt. The completions are stored in "
        "your rows or, with a `reward`, sampled by the policy (see [online training](online.md)). "
        "[Notation](index.md#notation) defines the symbols.",
        lambda m: m.kind == "ranking",
    ),
    "reward-models": (
        "Losses of reward models",
        "These losses train a model that scores completions. You can use it as a "
        "[reward](../online/rewards.md). [Notation](index.md#notation) defines the symbols.",
        lambda m: m.is_reward_model,
    ),
}
"""Page name -> title, introduction, and the methods on it."""

MODIFIERS_PAGE = """\
# Modifiers

Modifiers are settings of the `loss` section. They change the log-probabilities or weights that a loss reads, or add a term to the loss.
Each loss lists the modifiers that it supports; all others are errors.
[Notation](index.md#notation) defines the symbols.

You can combine modifiers. They apply in this order:

1. @humanline, @ld_alpha and @shared_weight clamp or weight the log-probabilities of tokens. Losses of whole completions then sum them.
2. @label_smoothing, @f_divergence, @wpo and @correction change the values that the loss function reads.
3. @nll_weight, @kl_weight and @value add a term to the loss.

Contradictory combinations are errors. The metrics `logps/*` and `logratio/*` are computed without modifiers.
"""
ONLINE_PAGE = """\
# Advantages and examples of online training

With a [`reward`](../settings.md), rows are prompts, and the policy samples completions for them. A round of completions becomes
training examples in one of two ways. [Notation](index.md#notation) defines the symbols.

## Advantages

Policy-gradient methods train on every completion, with one advantage per token. In online training, the formulas below replace the
*Advantage* of the [policy-gradient losses](policy-gradient.md), which is for stored completions. Set the settings in the `loss` section of
the recipe.
"""
BUILDERS_HEAD = """\
## Demonstrations, pairs and thumbs

Other online methods select, pair or label completions by their rewards, or show a teacher what the rewards say, and train on the result.
Below, the loss of each method follows its name in parentheses.
"""
LABELS = {
    "rows": "Rows",
    "reference": "Reference model",
    "average": "Average",
    "reads": "Reads",
    "advantage": "Advantage",
    "first step": "First step",
    "implicit reward": "Implicit reward (`rewards/*`)",
    "modifiers": "Modifiers",
    "when": "When to use it",
    "curves": "Training curves",
}
NO_SETTINGS = "No setting of the `loss` section applies here.\n"
LITERAL = re.compile(r"`[^`]*`|@\w+|[*_<|]")
"""Code and links, which stay as they are, and single characters to escape."""


def pages() -> dict[str, str]:
    """The content of each file in docs/losses/."""
    texts = {"index": "\n".join([INDEX, _overview()])}
    for name, (title, introduction, is_member) in FAMILIES.items():
        sections = [_section(method) for method in METHODS.values() if is_member(method)]
        texts[name] = "\n".join([f"# {title}\n", f"{introduction}\n", *sections])
    texts["modifiers"] = "\n".join([MODIFIERS_PAGE, *(_modifier(name) for name in MODIFIERS)])
    builders = dict.fromkeys(
        method.sample_builder.fn
        for method in ONLINE.values()
        if method.name not in ADVANTAGES and method.sample_builder
    )
    texts["online"] = "\n".join(
        [
            ONLINE_PAGE,
            *(_advantage(fn) for fn in dict.fromkeys(ADVANTAGES.values())),
            BUILDERS_HEAD,
            *(_builder(fn) for fn in builders),
        ]
    )
    places = {
        heading: name
        for name, text in texts.items()
        for heading in re.findall(r"^## (\w+)$", text, re.MULTILINE)
    }
    return {f"{name}.md": _with_links(text, name, places) for name, text in texts.items()}


def _with_links(text: str, page: str, places: dict[str, str]) -> str:
    """Replace @name by a link to the heading of that name."""

    def link(match: re.Match[str]) -> str:
        place = places[match[1]]
        return f"[{match[1]}]({'' if place == page else f'{place}.md'}#{match[1]})"

    return re.sub(r"@(\w+)", link, text)


def _reference(family: str, needed: bool) -> str:
    if not needed:
        return "no"
    return "stored completions, or a KL penalty" if family == "policy-gradient" else "yes"


def _overview() -> str:
    lines = ["## All losses\n"]
    for name, (title, _, is_member) in FAMILIES.items():
        lines += [
            f"### [{title}]({name}.md)\n",
            "| loss | reference | summary |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| @{m.name} | {_reference(name, m.needs_reference)} | {_text(method_doc(m).summary)} |"
            for m in METHODS.values()
            if is_member(m)
        ]
        lines.append("")
    lines.append(
        "See also [Modifiers](modifiers.md) and [Advantages and examples of online training](online.md)."
    )
    return "\n".join(lines) + "\n"


def _section(method: Method) -> str:
    modifiers = ", ".join(f"@{switch(MODIFIERS[name])}" for name in method.loss.modifiers)
    items = facts(method) | {"modifiers": modifiers or "none"}
    lines = [f"- {LABELS[heading]}: {_text(text)}" for heading, text in items.items()]
    rows = [
        row for row in settings_table(method.settings, "loss.") if not _is_of_modifier(row, method)
    ]
    parts = [f"## {method.name}\n", _description(method_doc(method)), "\n".join(lines) + "\n"]
    parts.append(table(rows) if rows else NO_SETTINGS)
    online = ONLINE.get(method.name)
    if online and online.sample_builder and online.sample_builder.settings:
        parts.append(f"Online training adds further [settings](online.md#{method.name}).\n")
    return "\n".join(parts)


def _is_of_modifier(row: SettingRow, method: Method) -> bool:
    """Whether a setting is on the page of modifiers: its default is that of the modifier."""
    name = _name(row)
    return name not in method.loss.defaults and any(
        name in MODIFIERS[m].settings for m in method.loss.modifiers
    )


def _modifier(name: str) -> str:
    modifier = MODIFIERS[name]
    methods = [method for method in METHODS.values() if name in method.loss.modifiers]
    # the method with the fewest defaults of its own for this modifier
    plain = min(
        methods, key=lambda method: len(method.loss.defaults.keys() & modifier.settings.keys())
    )
    rows = [
        row for row in settings_table(plain.settings, "loss.") if _name(row) in modifier.settings
    ]
    supported = "Supported by " + ", ".join(f"@{method.name}" for method in methods) + ".\n"
    description = _description(read_doc(modifier.fn.__doc__ or ""))
    return "\n".join([f"## {switch(modifier)}\n", description, supported, table(rows)])


def _advantage(fn: Callable[..., Any]) -> str:
    names = [name for name, credit in ADVANTAGES.items() if credit is fn]
    return _online_section(names, ", ".join(names), ", ".join(f"@{name}" for name in names))


def _builder(fn: Callable[..., Any]) -> str:
    names = [
        name
        for name, method in ONLINE.items()
        if method.sample_builder and method.sample_builder.fn is fn
    ]
    title = names[0] if len(names) == 1 else f"{names[0]} and similar methods"
    return _online_section(
        names, title, ", ".join(f"{name} (@{loss_name(ONLINE[name])})" for name in names)
    )


def _online_section(names: Sequence[str], title: str, methods: str) -> str:
    """What online methods make of a round of completions, with the settings."""
    method = ONLINE[names[0]]
    settings = method.sample_builder.settings if method.sample_builder else {}
    rows = [row for row in settings_table(method.settings, "loss.") if _name(row) in settings]
    parts = [f"### {title}\n", _description(builder_doc(method)), f"Used by {methods}.\n"]
    return "\n".join([*parts, table(rows) if rows else NO_SETTINGS])


def _name(row: SettingRow) -> str:
    return row.name.split(".")[1]


def _description(doc: Doc) -> str:
    parts = [
        _text(doc.summary),
        f"```text\n{doc.formula}\n```" if doc.formula else "",
        _text(doc.source),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    """Prose with Markdown characters escaped, and papers as links."""
    escaped = LITERAL.sub(lambda m: m[0] if len(m[0]) > 1 else f"\\{m[0]}", text)
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", escaped)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in pages().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
