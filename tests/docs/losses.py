"""``python -m tests.docs.losses`` writes docs/losses.md from the table of losses, the docstrings
and the guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tests.docs.blocks import ROOT
from tests.docs.settings import table
from valence.cli.explain import Doc, facts, loss_name, own_doc, read_doc, switch
from valence.config.describe import SettingRow, settings_table
from valence.data.kinds import WORDS
from valence.losses.advantage import CREDITS
from valence.losses.modifiers import MODIFIERS
from valence.trainer.methods import METHODS, ONLINE, Method

PAGE = ROOT / "docs" / "losses.md"
HEAD = """\
# Losses

Every method of Valence: what it computes, where it is from, what it reads, its settings, when to use it and what its curves look
like. Made by `python -m tests.docs.losses`; `valence losses NAME` shows the same for one.

## Which one

| what you have | begin with | or |
| --- | --- | --- |
| answers judged up or down | @kto | @bco if the verdicts can be trusted, @apo_zero_unpaired to save time |
| pairs of a better and a worse answer | @dpo | @ipo or @hinge if it overfits |
| pairs, some labelled the wrong way round | @dpo with @label_smoothing | @robust_dpo; a probability each, as column `soft` |
| pairs whose answers differ in length | @dpo_norm | @simpo; dpo with @ld_alpha |
| pairs, after dpo made good answers unlikely | @dpo with @nll_weight | @nca, @apo_zero, @dpop for answers that are nearly alike |
| pairs whose chosen answers are worse than the model's own | @apo_down | |
| pairs of another model's answers | @dpo with @wpo | |
| pairs that the model has sampled, round after round | @sppo | @dpo |
| pairs, and no memory or time for a reference | @simpo | @cpo, @slic |
| pairs, and a model that was never fine-tuned | @orpo | @sft on the chosen answers, then @dpo |
| several scored answers to each prompt | @grpo | @ppo if scores compare across prompts; @dpo with `data.convert` |
| prompts and a reward | @grpo | @rloo, @reinforce_pp to have the divergence in the reward; @ppo for a value head |
| the same, and answers that are long | @dapo | @dr_grpo if they grow too long; @gspo, @cispo |
| answers to imitate | @sft | @dft to forget less |
| pairs, and the aim is a reward model | @bradley_terry | |
| thumbs, numbers or stars, and the aim is a reward model | @pointwise | @ordinal for stars |

Rows of one kind become another's with [`data.convert`](settings.md).

## Letters

| letter | is |
| --- | --- |
| `logp`, `ref` | summed log-probability (nats) of an answer's tokens under the policy, under the reference; `_t`: of one token |
| `_w`, `_l` | of the chosen answer of a pair, of the rejected one |
| `n` | number of the answer's tokens, its end-of-turn token among them |
| `r` | log-ratio, `logp - ref` |
| `d` | `r` of the chosen answer minus `r` of the rejected one |
| `s` | the sigmoid, `1/(1 + exp(-x))` |
| `e`, `wrong` | probability that a verdict is wrong: @label_smoothing, or `1 - soft` of the row |
| `margin` | by how much the chosen answer should win, from the row's column; 0 without one |
| `z0` | kto's reference point: the mean of `r` over mismatched answers of the whole step, not below 0 |
| `delta` | bco's threshold: the running mean over steps of the middle between both classes' mean `beta*r`, saved with the run |
| `A`, `rho` | advantage: how much better a token was than expected; ratio of its probability to that when it was sampled |
| `G`, `R` | answers to a prompt; the reward (or score) of one |
| `score`, `target` | what a reward model says of an answer; what the row says: its score, or 1 for thumbs up and 0 for down |
| `[S]`, `[P]`, `[T]`, `[A]` | one number for each answer, pair, token, attribute |

The loss of a step is the weighted sum over its examples, divided by their number (*Average*) and never by the sum of the
weights. Every row may have a `weight`. *First step* says where one goes as long as policy and reference agree. What is logged is
in [metrics.md](metrics.md).
"""
MODIFIERS_HEAD = """\
## Modifiers

Settings that change the log-probabilities or the weights that a loss reads, or add a term. A method takes those that it lists;
others are unknown settings there. They combine: tokens are clamped or weighted first, then summed, then scored, and terms are
added to the loss ([why](decisions/0015-modifiers-outside-the-loss-functions.md)). Two that cannot go together are an error.
Metrics show the answers as they were measured, without any of these.
"""
CREDIT_HEAD = """\
## Advantages of the policy's own answers

With a [`reward`](settings.md), rows are prompts that the policy answers itself, and these take the place of the *Advantage*
above: `R` is the reward, over all answers of a round. Their settings are those of the method.
"""
MAKER_HEAD = """\
## Rows of the policy's own answers

With a reward, other methods make rows of the answers to a prompt, and train on these with the loss that their name ends in.
"""
SHOWN = {
    "rows": "Rows",
    "reference": "Reference model",
    "average": "Average",
    "reads": "Reads",
    "advantage": "Advantage",
    "first step": "First step",
    "implicit reward": "Implicit reward (`rewards/*`)",
    "modifiers": "Modifiers",
    "when": "When to use it",
    "curves": "Its curves",
}
LITERAL = re.compile(r"`[^`]*`|@\w+|[*_<|]")
"""What stays as it is in prose, and single signs that do not.

A name behind @ becomes a link to its heading.
"""


def page() -> str:
    """The page as it should be now."""
    parts = [HEAD, _overview()]
    for kind, words in WORDS.items():
        sections = [_section(method) for method in METHODS.values() if method.kind == kind]
        parts += [f"## Methods that read {words}\n", *sections] if sections else []
    parts += [MODIFIERS_HEAD, *(_modifier(name) for name in MODIFIERS)]
    parts += [CREDIT_HEAD, *(_credit(fn) for fn in dict.fromkeys(CREDITS.values()))]
    parts += [
        MAKER_HEAD,
        *(
            _maker(fn)
            for fn in dict.fromkeys(
                m.makes.fn for m in ONLINE.values() if m.name not in CREDITS and m.makes
            )
        ),
    ]
    return re.sub(r"@(\w+)", r"[\1](#\1)", "\n".join(parts))


def _overview() -> str:
    lines = ["## All of them\n", "| method | reference | in a sentence |", "| --- | --- | --- |"]
    lines += [
        f"| @{m.name} | {'yes' if m.needs_reference else 'no'} | "
        f"{_text(read_doc(m.loss.fn.__doc__ or '').summary)} |"
        for m in METHODS.values()
    ]
    return "\n".join(lines) + "\n"


def _section(method: Method) -> str:
    told = facts(method) | {
        "modifiers": ", ".join(f"@{switch(MODIFIERS[name])}" for name in method.loss.modifiers)
        or "none"
    }
    lines = [f"- {SHOWN[heading]}: {_text(text)}" for heading, text in told.items()]
    rows = [row for row in settings_table(method.settings, "loss.") if _is_own(row, method)]
    parts = [
        f"### {method.name}\n",
        _described(read_doc(method.loss.fn.__doc__ or "")),
        "\n".join(lines) + "\n",
    ]
    return "\n".join([*parts, table(rows) if rows else "No settings of its own.\n"])


def _is_own(row: SettingRow, method: Method) -> bool:
    """A setting of the loss itself, or one whose default is another than the modifier's."""
    name = _name(row)
    return name in method.loss.defaults or not any(
        name in MODIFIERS[m].settings for m in method.loss.modifiers
    )


def _modifier(name: str) -> str:
    modifier = MODIFIERS[name]
    takers = [method for method in METHODS.values() if name in method.loss.modifiers]
    plain = min(
        takers, key=lambda method: len(method.loss.defaults.keys() & modifier.settings.keys())
    )
    rows = [
        row for row in settings_table(plain.settings, "loss.") if _name(row) in modifier.settings
    ]
    taken = "Taken by " + ", ".join(f"@{method.name}" for method in takers) + ".\n"
    return "\n".join(
        [
            f"### {switch(modifier)}\n",
            _described(read_doc(modifier.fn.__doc__ or "")),
            taken,
            table(rows),
        ]
    )


def _credit(fn: Callable[..., Any]) -> str:
    takers = [name for name, credit in CREDITS.items() if credit is fn]
    return _made(takers, f"Of {', '.join(takers)}", ", ".join(f"@{name}" for name in takers))


def _maker(fn: Callable[..., Any]) -> str:
    takers = [name for name, method in ONLINE.items() if method.makes and method.makes.fn is fn]
    first, more = takers[0], " and the like" if len(takers) > 1 else ""
    return _made(
        takers,
        f"Of {first}{more}",
        ", ".join(f"{name} (@{loss_name(ONLINE[name])})" for name in takers),
    )


def _made(takers: Sequence[str], title: str, told: str) -> str:
    """What becomes of a round's answers, and the settings of that."""
    method = ONLINE[takers[0]]
    own = method.makes.settings if method.makes else {}
    rows = [row for row in settings_table(method.settings, "loss.") if _name(row) in own]
    parts = [f"### {title}\n", _described(own_doc(method)), f"For {told}.\n"]
    return "\n".join([*parts, table(rows) if rows else "No settings of its own.\n"])


def _name(row: SettingRow) -> str:
    return row.name.split(".")[1]


def _described(doc: Doc) -> str:
    parts = [
        _text(doc.summary),
        f"```text\n{doc.formula}\n```" if doc.formula else "",
        _text(doc.source),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    """Prose in which stars, underscores and the like stand for themselves, and papers are links."""
    plain = LITERAL.sub(lambda m: m[0] if len(m[0]) > 1 else f"\\{m[0]}", text)
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", plain)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
