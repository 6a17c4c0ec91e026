"""``python -m tests.docs.losses`` writes docs/losses/ from the table of losses, the docstrings and
the guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.docs.blocks import ROOT
from tests.docs.settings import allowed_values
from tests.units import ADVANTAGES
from valence.cli.explain import Doc, builder_doc, facts, loss_name, method_doc, read_doc, switch
from valence.config.describe import SettingRow, settings_table
from valence.losses.modifiers import MODIFIERS
from valence.methods import METHODS, ONLINE, Method
from valence.user_code.settings import setting_docs

FOLDER = ROOT / "docs" / "losses"

INDEX = """\
# Losses

Each method trains with one loss. These pages have its formula, source, use and settings. `valence docs NAME` prints all about one loss,
also its training curves. [Choose a method](../train/methods.md) helps you to choose.

@overview
## Notation

| symbol | meaning |
| --- | --- |
| `logp`, `ref`, `old` | log-probability (nats) of a completion, summed over its tokens, under the policy, the reference, and the policy that sampled it |
| `_t` | suffix: of one token |
| `_w`, `_l` | suffixes: of the chosen and the rejected completion of a pair |
| `n` | number of tokens of the completion, with its end-of-turn token |
| `r` | log-ratio, `logp - ref` |
| `d` | `r_w - r_l` |
| `s` | sigmoid, `1/(1 + exp(-x))` |
| `e`, `wrong` | probability that a label is wrong: @label_smoothing, or `1 - soft` with the column `soft` |
| `margin` | required lead of the chosen completion: the column `margin`, else 0 |
| `z0` | reference point of kto: the mean of `r` over each prompt of the step with another row's completion (mismatched completions), at least 0 |
| `delta` | threshold of bco and bco_pair: running mean, saved with the run, of the midpoint between the mean `beta*r` of the good and of the bad completions of a step |
| `A`, `rho` | advantage; probability of a token (or completion) under the policy, divided by that under the policy that sampled it |
| `G`, `R` | completions per prompt; reward (or score) of a completion |
| `G_t`, `V_t` | return and value estimate at a token; `G` and `V` in the [value](modifiers.md#value) term |
| `mean_g`, `std_g` | mean and standard deviation of `R` over the completions of a prompt |
| `score`, `target` | output of a reward model; the row's score, or 1 for thumbs up and 0 for thumbs down |
| `[S]`, `[P]`, `[T]`, `[A]` | one value per completion, pair, token, attribute |
| `sg` | stop-gradient |

Every row can have a `weight`. The loss of a step is the weighted sum over its examples, divided by their number, not by the sum of weights.

## How to read these pages

- A page begins with what applies to most of its losses. A loss lists only what differs, and has those common settings that its formula or
  source names.
- *Average* says what the loss is averaged over.
- *First step* is the direction in which a step moves the model while policy and reference are equal.
- *Implicit reward* is the value of `rewards/*` in the log (see [Metrics](../metrics.md)).
- [Settings](../settings.md) explains the values in parentheses.
- [Modifiers](modifiers.md) name the losses that support them, and [Python](../api/losses.md) the tensors and shapes that a loss reads.
"""

FAMILIES: dict[str, tuple[str, str, Callable[[Method], bool]]] = {
    "thumbs": (
        "Losses for thumbs",
        "These losses train on single completions rated up or down.",
        lambda m: m.kind == "judgement",
    ),
    "pairs": (
        "Losses for pairs",
        "These losses train on pairs of a chosen and a rejected completion of one prompt.",
        lambda m: m.kind == "preference" and not m.is_reward_model,
    ),
    "demonstrations": (
        "Losses for demonstrations",
        "These losses imitate the completions in the rows (demonstrations).",
        lambda m: m.kind == "demonstration",
    ),
    "feedback": (
        "Losses for feedback in words",
        "These losses train on completions with what their readers wrote about them, which the "
        "teacher also reads ([Learn from what people write](../train/hindsight.md)).",
        lambda m: m.kind == "feedback",
    ),
    "policy-gradient": (
        "Policy-gradient losses",
        "These losses train on several scored completions per prompt: those in your rows or, with "
        "a `reward`, those that the policy samples ([online training](online.md)).",
        lambda m: m.kind == "ranking",
    ),
    "reward-models": (
        "Losses of reward models",
        "These losses train a model that scores completions, for use as a "
        "[reward](../online/rewards.md).",
        lambda m: m.is_reward_model,
    ),
}
"""Page name -> title, introduction, and the methods on it."""

MODIFIERS_PAGE = """\
# Modifiers

Modifiers are settings of the `loss` section that change what a loss reads, or add a term to it. With a loss that does not support them, they
are errors, as are contradictory combinations. They apply in this order:

1. @humanline, @ld_alpha and @shared_weight clamp or weight the log-probabilities of tokens, before they are summed.
2. @label_smoothing, @f_divergence, @wpo and @correction change the values that the loss function reads.
3. @nll_weight, @kl_weight and @value add a term.

The metrics `logps/*` and `logratio/*` are computed without modifiers. Symbols: [Notation](index.md#notation).
"""
ONLINE_PAGE = """\
# Advantages and examples of online training

With a [`reward`](../settings.md#rewards-of-online-training), rows are prompts, and the policy samples a round of completions for them.
Symbols: [Notation](index.md#notation).

## Advantages

Policy-gradient methods train on every completion, with one advantage per token: the *Advantage* of the [loss](policy-gradient.md), with the
reward as score, but for these methods.
"""
BUILDERS_HEAD = """\
## Demonstrations, pairs and thumbs

Other online methods make examples from the completions, and train on those.
"""
LABELS = {
    "when": "Use",
    "rows": "Rows",
    "reference": "Reference model",
    "teacher": "Teacher",
    "advantage": "Advantage",
    "average": "Average",
    "first step": "First step",
    "implicit reward": "Implicit reward",
}
"""The facts on these pages. Modifiers have their page, and the index explains columns."""
NOTATION = "Symbols: [Notation](index.md#notation).\n"
COMMON = f"{NOTATION.rstrip()} Unless a loss says otherwise:\n"
LITERAL = re.compile(r"`[^`]*`|@\w+|[*_<|]")
"""Code and links, which stay as they are, and single characters to escape."""
PAPER = re.compile(r"([A-Z][\w' -]*(?: et al\.)? \d{4}), arXiv ([\d.]+\d)")
"""Authors and year, and the number on arXiv."""


def pages() -> dict[str, str]:
    """The content of each file in docs/losses/."""
    texts = {"index": INDEX.replace("@overview", _overview())}
    for name, (title, introduction, is_member) in FAMILIES.items():
        methods = [method for method in METHODS.values() if is_member(method)]
        common, rows = _common_facts(methods), _common_settings(methods)
        shown = {heading: text for heading, text in common.items() if heading != "rows"}
        parts = [f"# {title}\n", f"{introduction}\n"]
        if len(methods) > 1:
            parts += [COMMON, _facts_list(shown) + _settings_list(rows.values())]
        else:
            parts += [NOTATION]
        sections = [_section(method, common, rows) for method in methods]
        texts[name] = "\n".join([*parts, *sections])
    texts["modifiers"] = "\n".join([MODIFIERS_PAGE, *(_modifier(name) for name in MODIFIERS)])
    builders = dict.fromkeys(
        method.sample_builder.fn
        for method in ONLINE.values()
        if method.name not in ADVANTAGES and method.sample_builder
    )
    texts["online"] = "\n".join(
        [
            ONLINE_PAGE,
            *(_advantage(fn) for fn in dict.fromkeys(ADVANTAGES.values()) if _has_settings(fn)),
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


def _overview() -> str:
    """The losses of each page."""
    rows = [
        f"| [{title}]({name}.md) | {', '.join(f'@{m.name}' for m in METHODS.values() if is_member(m))} |"
        for name, (title, _, is_member) in FAMILIES.items()
    ]
    modifiers = ", ".join(f"@{switch(modifier)}" for modifier in MODIFIERS.values())
    rows.append(f"| [Modifiers](modifiers.md) | {modifiers} |")
    rows.append(
        "| [Online training](online.md) | advantages, and the examples made from completions |"
    )
    return "\n".join(["| page | content |", "| --- | --- |", *rows, ""])


def _facts(method: Method) -> dict[str, str]:
    """The properties of a method by heading, in the order of `LABELS`."""
    items = facts(method)
    return {heading: items[heading] for heading in LABELS if heading in items}


def _common_facts(methods: Sequence[Method]) -> dict[str, str]:
    """The properties that at least a third of the methods of a page have, perhaps with additions."""
    common = dict[str, str]()
    for heading in LABELS.keys() - {"when"}:
        texts = [_facts(method).get(heading, "") for method in methods]
        counts = {text: sum(_added(other, text) is not None for other in texts) for text in texts}
        text = max(counts, key=counts.__getitem__)
        is_common = counts[text] > 1 and 3 * counts[text] >= len(methods)
        if text and (is_common or heading == "rows"):
            common[heading] = text
    return {heading: common[heading] for heading in LABELS if heading in common}


def _common_settings(methods: Sequence[Method]) -> dict[str, SettingRow]:
    """The settings whose meaning is the same for several losses of a page, by name."""
    tables = {method.loss.fn: _settings_of(method) for method in methods}
    rows = [row for table in tables.values() for row in table]
    counts: dict[SettingRow, int] = {
        row: sum(
            other.name == row.name and _added(other.meaning, row.meaning) is not None
            for other in rows
        )
        for row in rows
    }
    common = dict[str, SettingRow]()
    for row in sorted(counts, key=counts.__getitem__, reverse=True):
        if counts[row] > 1 and 3 * counts[row] >= len(tables):
            common.setdefault(row.name, row)
    return common


def _added(text: str, common: str) -> str | None:
    """What a property adds to that of most losses of the page; None if it differs from it."""
    start = common.rstrip(".")
    if text.startswith((f"{start}, ", f"{start}; ")):
        return text[len(start) + 2 :]
    return "" if text == common else None


def _facts_list(items: Mapping[str, str]) -> str:
    return "".join(f"- {LABELS[heading]}: {_text(text)}\n" for heading, text in items.items())


def _section(method: Method, common: Mapping[str, str], rows: Mapping[str, SettingRow]) -> str:
    """The section of a loss: only what differs from most losses of the page."""
    items = dict.fromkeys(common, "none") | _facts(method)
    items = {h: _difference(items[h], common.get(h, "")) for h in LABELS if h in items}
    items = {heading: text for heading, text in items.items() if text}
    doc = method_doc(method)
    first = next(other for other in METHODS.values() if other.loss.fn is method.loss.fn)
    if first is not method:
        formula = f"Formula, source and other settings: @{first.name}."
        doc = replace(doc, summary=f"{doc.summary} {formula}", formula="", source="")
        rows = {row.name: row for row in _settings_of(first)}
    settings = [_changed(row, rows.get(row.name)) for row in _settings_of(method)]
    settings = [row for row in settings if row is not None]
    parts = [
        f"## {method.name}\n",
        _description(doc),
        _facts_list(items) + _settings_list(settings),
    ]
    online = ONLINE.get(method.name)
    if online and online.sample_builder and online.sample_builder.settings:
        parts.append(f"Online training adds [settings](online.md#{method.name}).\n")
    return "\n".join(parts)


def _changed(row: SettingRow, other: SettingRow | None) -> SettingRow | None:
    """A setting without what another loss or the page says about it; None if nothing is left."""
    added = _added(row.meaning, other.meaning) if other else None
    if other is None or added is None:
        return row
    is_same = (row.type, row.default) == (other.type, other.default)
    return None if is_same and not added else replace(row, meaning=added)


def _difference(text: str, common: str) -> str:
    """A property of a loss, without that of most losses of the page."""
    added = _added(text, common)
    return f"also {added}" if added else text if added is None else ""


def _settings_list(rows: Iterable[SettingRow]) -> str:
    lines = (f"- `{row.name}` ({_text(allowed_values(row))}): {_text(row.meaning)}" for row in rows)
    return "".join(f"{line.removesuffix(': ')}\n" for line in lines)


def _settings_of(method: Method) -> list[SettingRow]:
    """The settings of a loss that are not on the page of modifiers."""
    rows = settings_table(method.settings, "loss.")
    return [row for row in rows if row.meaning and not _is_of_modifier(row, method)]


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
    description = _description(read_doc(modifier.fn.__doc__ or ""))
    supported = f"- Supported by {_supporters(methods)}\n"
    return "\n".join([f"## {switch(modifier)}\n", description, supported + _settings_list(rows)])


def _supporters(methods: Sequence[Method]) -> str:
    """The losses that support a modifier, by page."""
    parts = list[str]()
    for name, (title, _, is_member) in FAMILIES.items():
        members = [method for method in METHODS.values() if is_member(method)]
        having = [f"@{method.name}" for method in members if method in methods]
        others = [f"@{method.name}" for method in members if method not in methods]
        if len(having) > len(others):
            link = f"[{title[0].lower()}{title[1:]}]({name}.md)"
            parts.append(f"all {link}" + (f" but {', '.join(others)}" if others else ""))
        elif having:
            parts.append(", ".join(having))
    return "; ".join(parts)


def _has_settings(fn: Callable[..., Any]) -> bool:
    """Whether an advantage differs from that of stored completions, by a KL penalty."""
    return bool(setting_docs(fn.__doc__ or ""))


def _advantage(fn: Callable[..., Any]) -> str:
    names = [name for name, credit in ADVANTAGES.items() if credit is fn]
    return _online_section(names, ", ".join(names))


def _builder(fn: Callable[..., Any]) -> str:
    names = [
        name
        for name, method in ONLINE.items()
        if method.sample_builder and method.sample_builder.fn is fn
    ]
    losses = [METHODS[loss_name(ONLINE[name])] for name in names]
    if len(names) == 1:
        return _online_section(names, names[0], f"- Loss: @{losses[0].name}\n")
    title = f"{names[0]} and similar methods"
    users = f"- Methods: `online_` and the name of a loss, for {_supporters(losses)}\n"
    return _online_section(names, title, users)


def _online_section(names: Sequence[str], title: str, users: str = "") -> str:
    """What online methods make of a round of completions, with the settings."""
    method = ONLINE[names[0]]
    settings = method.sample_builder.settings if method.sample_builder else {}
    rows = [row for row in settings_table(method.settings, "loss.") if _name(row) in settings]
    parts = [f"### {title}\n", _description(builder_doc(method))]
    items = users + _settings_list(rows)
    return "\n".join([*parts, *([items] if items else [])])


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
    return re.sub(PAPER, r"[\1](https://arxiv.org/abs/\2)", escaped)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in pages().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
