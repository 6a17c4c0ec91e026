"""What there is to know about a method, in words: for the command line and for the page of
losses.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from valence.data.kinds import WORDS
from valence.losses.average import Average
from valence.losses.guide import GUIDE
from valence.losses.modifiers import MODIFIERS, Modifier
from valence.trainer.methods import METHODS, ONLINE, Method, setting_docs

AVERAGES: dict[Average, str] = {
    "token_mean": "over the trained tokens of the step",
    "seq_mean": "over the answers of the step",
    "pair_mean": "over the pairs of the step",
    "seq_mean_token_mean": "over the tokens of each answer, then over the answers of the step",
    "constant": "sums over the tokens of each answer, divided by `max_tokens`, then over the "
    "answers of the step",
    "class_mean": "over the answers of the smaller class of the step",
}
SIDES: dict[str, dict[str, str]] = {
    "judgement": {"chosen": "thumbs up", "rejected": "thumbs down"},
    "demonstration": {"chosen": "the demonstration"},
    "scored": {"chosen": "good answers", "rejected": "bad answers"},
    "ranking": {"chosen": "answers above the mean score", "rejected": "answers below it"},
}
"""What chosen and rejected are called, by kind of rows, where they are no pairs."""
MOVES = {1: "likelier", 0: "as likely as before", -1: "less likely"}
SCORES = {1: "scored higher", 0: "scored as before", -1: "scored lower"}


@dataclass(frozen=True, slots=True)
class Doc:
    """The parts of a loss's docstring: a sentence; the formula; where it is from, with remarks; the
    tensors that it reads.
    """

    summary: str
    formula: str
    source: str
    tensors: str


def read_doc(text: str) -> Doc:
    """Takes a docstring apart.

    Its formula ends where the first sentence with a year begins: the source.
    """
    summary, *more = inspect.cleandoc(text).split("\n\n")
    if more and setting_docs(text):
        more.pop()
    formula, tensors = (*more, "", "")[:2]
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z])", formula)
    first = next(
        (i for i, sentence in enumerate(sentences) if re.search(r"\b(?:19|20)\d\d\b", sentence)),
        len(sentences),
    )
    return Doc(
        _line(summary),
        " ".join(sentences[:first]),
        _line(" ".join(sentences[first:])),
        _line(tensors),
    )


def switch(modifier: Modifier) -> str:
    """The setting that a modifier is known by."""
    return next(iter(modifier.settings))


def loss_name(method: Method) -> str:
    """What the loss is called that the method trains with."""
    return next(name for name, other in METHODS.items() if other.loss is method.loss)


def with_reward(method: Method) -> Method | None:
    """The method that trains with the same loss on the policy's own answers, if there is one."""
    return next((own for own in ONLINE.values() if own.loss is method.loss), None)


def own_doc(method: Method) -> Doc:
    """What the answers of a round become, of a method that learns from the policy's own."""
    return read_doc(method.sample_builder.fn.__doc__ or "" if method.sample_builder else "")


def added(method: Method) -> set[str]:
    """Settings that such a method has beside those of its loss, or with another default."""
    bare = METHODS[loss_name(method)].settings.model_fields
    return {
        n
        for n, field in method.settings.model_fields.items()
        if n not in bare or bare[n].default != field.default
    }


def facts(method: Method) -> dict[str, str]:
    """What follows from the method's row, and what its guide says, by heading.

    What does not apply is left out.
    """
    loss, doc = method.loss, read_doc(method.loss.fn.__doc__ or "")
    guide = GUIDE.get(method.name)
    found = {
        "rows": WORDS[method.kind] + _columns(method),
        "reference": _reference(method),
        "average": AVERAGES.get(loss.average, loss.average),
        "reads": doc.tensors,
        "advantage": _line(loss.credit.__doc__ or "") if loss.credit and not method.online else "",
        "first step": _first_step(method),
        "implicit reward": re.split(r"[:.]$|: ", _line(loss.reward.__doc__ or ""))[0]
        if loss.reward
        else "",
        "modifiers": ", ".join(f"`{switch(MODIFIERS[name])}`" for name in loss.modifiers) or "none",
        "when": guide.when if guide else "",
        "curves": guide.curves if guide else "",
    }
    found |= own_facts(method) if method.online else {}
    return {heading: text for heading, text in found.items() if text}


def own_facts(method: Method) -> dict[str, str]:
    """Those of a method that learns from the policy's own answers, beside what it shares with its
    loss.
    """
    reads = method.sample_builder.reads if method.sample_builder else ()
    needed = method.asks_reference or "ref_t" in reads
    found = {
        "rows": "prompts alone; other columns reach the reward",
        "reference": "yes" if needed else "to log the divergence, as `rollout.measure_kl` says",
        "answers": f"`rollout.num_rollouts` to each prompt, {method.min_rollouts} or more",
    }
    if "top_n" in reads:
        found["answers"] += (
            "; the `rollout.top_n` best are trained on, of groups whose rewards differ, without "
            "truncated ones (`rollout.mask_truncated`) and those below `rollout.min_reward`"
        )
    if method.resamples:
        found["answers"] += (
            "; prompts whose answers all have the same reward are replaced by others"
        )
    return found


def _columns(method: Method) -> str:
    if method.online:
        return ""
    more = ["`margin`"] if "margin" in method.loss.reads else []
    more += ["`soft`"] if "smoothing" in method.loss.modifiers else []
    return f", which may have {' and '.join(more)}" if more else ""


def _reference(method: Method) -> str:
    if not method.needs_reference:
        return "no"
    return (
        "yes"
        if "ref" in {name[:3] for name in method.loss.reads}
        else "yes, in place of the policy that gave the answers"
    )


def _first_step(method: Method) -> str:
    """Where a step goes as long as policy and reference agree, or all scores are 0."""
    sides, moves = SIDES.get(method.loss.data, {}), SCORES if method.is_reward_model else MOVES
    return ", ".join(
        f"{sides.get(side, side)} {moves[direction]}"
        for side, direction in method.loss.direction.items()
    )


def _line(text: str) -> str:
    return " ".join(text.split())
