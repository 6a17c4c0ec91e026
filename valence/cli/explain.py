"""Descriptions of methods, for the command line and the pages of losses."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace

from valence.data.kind_names import WORDS
from valence.losses.average import Average
from valence.losses.guide import GUIDE, Guide
from valence.losses.modifiers import MODIFIERS, Modifier
from valence.methods import METHODS, ONLINE, WITHOUT_REWARD, Method, method_of
from valence.user_code.settings import setting_docs

AVERAGES: dict[Average, str] = {
    "token_mean": "over the trained tokens of the step",
    "seq_mean": "over the completions of the step",
    "pair_mean": "over the pairs of the step",
    "seq_mean_token_mean": "over the tokens of each completion, then over the completions of the "
    "step",
    "constant": "sums over the tokens of each completion, divided by `max_tokens`, then over the "
    "completions of the step",
    "class_mean": "over the completions of the smaller class of the step",
}
SIDES: dict[str, dict[str, str]] = {
    "judgement": {"chosen": "thumbs up", "rejected": "thumbs down"},
    "demonstration": {"chosen": "the demonstration"},
    "feedback": {"chosen": "tokens with a positive signal of the teacher"},
    "scored": {"chosen": "good completions", "rejected": "bad completions"},
    "ranking": {
        "chosen": "completions with a score above the mean",
        "rejected": "completions below the mean",
    },
}
"""Terms for chosen and rejected completions, for kinds of rows other than pairs."""
MOVES = {1: "more likely", 0: "unchanged", -1: "less likely"}
SCORES = {1: "score higher", 0: "unchanged", -1: "score lower"}


@dataclass(frozen=True, slots=True)
class Doc:
    """The parts of a loss's docstring: summary, formula, source with remarks, and tensors."""

    summary: str
    formula: str
    source: str
    tensors: str


def read_doc(text: str) -> Doc:
    """Split a docstring into its parts. The source starts at the first sentence with a year."""
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
    """The setting that turns a modifier on."""
    return next(iter(modifier.settings))


def loss_name(method: Method) -> str:
    """The name of the loss that a method trains with; that of the method for a user's loss."""
    names = (name for name, other in METHODS.items() if other.loss is method.loss)
    return next(names, method.name)


def online_method(method: Method) -> Method | None:
    """The online method with the same loss, if there is one."""
    if method.is_custom:
        return None if method.is_reward_model else method_of(method.name, online=True)
    return next((other for other in ONLINE.values() if other.loss is method.loss), None)


def method_doc(method: Method) -> Doc:
    """The docstring of the loss, with the summary of the method's guide if it has one."""
    doc, guide = read_doc(method.loss.fn.__doc__ or ""), _guide(method)
    return replace(doc, summary=guide.summary) if guide and guide.summary else doc


def builder_doc(method: Method) -> Doc:
    """How an online method builds examples from the completions of a round."""
    return read_doc(method.sample_builder.fn.__doc__ or "" if method.sample_builder else "")


def _guide(method: Method) -> Guide | None:
    """The guide of a method. That of a loss with a teacher is also about sampled completions."""
    is_shared = method.online and method.loss.needs_teacher
    return GUIDE.get(loss_name(method) if is_shared else method.name)


def added(method: Method) -> set[str]:
    """Settings that an online method adds to those of its loss, or gives another default."""
    bare = method_of(loss_name(method)).settings.model_fields
    return {
        n
        for n, field in method.settings.model_fields.items()
        if n not in bare or bare[n].default != field.default
    }


def facts(method: Method) -> dict[str, str]:
    """The properties of a method and the advice of its guide, by heading, if they apply."""
    loss, doc = method.loss, read_doc(method.loss.fn.__doc__ or "")
    guide = _guide(method)
    items = {
        "rows": WORDS[method.kind],
        "optional columns": _columns(method),
        "reference": _reference(method),
        "teacher": _teacher(method),
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
    items |= online_facts(method) if method.online else {}
    return {heading: text for heading, text in items.items() if text}


def online_facts(method: Method) -> dict[str, str]:
    """The properties of an online method that differ from those of its loss."""
    reads = method.sample_builder.reads if method.sample_builder else ()
    rewards = "a reward if there is one" if method.name in WITHOUT_REWARD else "the reward"
    items = {
        "rows": f"prompts; other columns are passed to {rewards}",
        "reference": _online_reference(method),
        "completions": f"`rollout.num_rollouts` per prompt, at least {method.min_rollouts}",
    }
    if "top_n" in reads:
        items["completions"] += (
            "; trains on the `rollout.top_n` best of groups with different rewards, without "
            "truncated ones (`rollout.mask_truncated`) and those below `rollout.min_reward`"
        )
    if method.loss.needs_teacher and method.loss.data == "feedback":
        items["completions"] += "; without those that have no text for the teacher"
        items["completions"] += " (`teacher.context`)"
    if method.rollout_defaults["replace_tied"]:
        items["completions"] += (
            "; prompts whose completions have equal rewards are replaced (`rollout.replace_tied`)"
        )
    return items


def _columns(method: Method) -> str:
    """The optional columns of the rows."""
    if method.online:
        return ""
    columns = ["`margin`"] if "margin" in method.loss.reads else []
    columns += ["`soft`"] if "smoothing" in method.loss.modifiers else []
    return ", ".join(columns)


def _reference(method: Method) -> str:
    if not method.needs_reference:
        return "no"
    return (
        "yes"
        if "ref" in {name[:3] for name in method.loss.reads}
        else "for stored completions, in place of the policy that sampled them; online, only with "
        "a KL penalty"
    )


def _online_reference(method: Method) -> str:
    if _has_other_teacher(method):
        return "no"
    reads = method.sample_builder.reads if method.sample_builder else ()
    needs_reference = method.asks_reference or "ref_t" in reads
    return "yes" if needs_reference else "only to log the KL (`rollout.measure_kl`)"


def _has_other_teacher(method: Method) -> bool:
    """Whether its teacher must be another model."""
    return method.loss.needs_teacher and method.loss.data != "feedback"


def _teacher(method: Method) -> str:
    if not method.loss.needs_teacher:
        return ""
    other = "another model with the same tokens (`teacher.model`)"
    return other if _has_other_teacher(method) else f"the model itself, or {other}"


def _first_step(method: Method) -> str:
    """The direction of a step while policy and reference are equal, or all scores are 0."""
    if _has_other_teacher(method):
        return "makes the tokens that the teacher finds likelier more likely"
    sides, moves = SIDES.get(method.loss.data, {}), SCORES if method.is_reward_model else MOVES
    directions = {sides.get(side, side): value for side, value in method.loss.direction.items()}
    changes = [f"{side} {moves[value]}" for side, value in directions.items() if value]
    unchanged = [f"leaves {side} {moves[value]}" for side, value in directions.items() if not value]
    return "; ".join([*([f"makes {', '.join(changes)}"] if changes else []), *unchanged])


def _line(text: str) -> str:
    return " ".join(text.split())
