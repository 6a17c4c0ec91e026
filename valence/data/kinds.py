"""The kinds of rows that methods read: their Examples, conversions to them, and messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from valence.data.convert import CONVERSIONS, Conversion, Unused, best_to_demonstrations
from valence.data.example_store import ExampleStore
from valence.data.verdicts import shared_verdicts, verdicts
from valence.errors import UserError
from valence.types import (
    Demonstration,
    Example,
    Judgement,
    Kind,
    Preference,
    Prompt,
    Ranking,
    content_id,
)

KINDS: dict[type[Example], Kind] = {
    Judgement: "judgement",
    Preference: "preference",
    Demonstration: "demonstration",
    Ranking: "ranking",
    Prompt: "prompt",
}
WORDS: dict[Kind, str] = {
    "judgement": "answers judged up or down",
    "preference": "pairs of a chosen and a rejected answer",
    "demonstration": "answers to imitate",
    "ranking": "several scored answers to each prompt",
    "prompt": "prompts alone",
    "scored": "answers with a label, a score or attributes",
}
METHOD_FOR: dict[Kind, str] = {
    "judgement": "kto",
    "preference": "dpo",
    "demonstration": "sft",
    "ranking": "grpo",
    "prompt": "grpo with a reward",
    "scored": "pointwise",
}
"""The method to suggest for rows of each kind."""


def conversion_to(
    kind: Kind,
    name: str | None,
    threshold: float | None,
    top_n: int = 1,
    mask_truncated: bool = True,
) -> Conversion | None:
    """The conversion of this name.

    Raises UserError when it does not make ``kind``, or does not go with the threshold.
    """
    conversion = CONVERSIONS.get(name) if name is not None else None
    if name is not None and conversion is None:
        raise UserError(
            f"there is no conversion {name!r}",
            code="conversion-unknown",
            where="data.convert",
            fix=f"use one of {', '.join(CONVERSIONS)}",
        )
    if conversion is not None and not conversion.serves(kind):
        raise UserError(
            f"{name} makes {WORDS[conversion.gives]}, and the method needs {WORDS[kind]}",
            code="conversion-mismatch",
            where="data.convert",
            fix="remove it, or choose another conversion or method",
        )
    use = conversion.threshold if conversion else "none"
    if threshold is None and use == "needed":
        raise UserError(
            f"{name} needs a threshold",
            code="threshold-missing",
            where="data.threshold",
            fix="set it to the score from which an answer is good",
        )
    if threshold is not None and (use == "none" or not math.isfinite(threshold)):
        raise UserError(
            f"{threshold} has no effect here",
            code="threshold-no-effect",
            where="data.threshold",
            fix="remove it, or set it to a finite number and data.convert to a conversion of "
            "scores",
        )
    if conversion is not None and conversion.run is best_to_demonstrations:
        return replace(
            conversion,
            run=partial(best_to_demonstrations, top_n=top_n, mask_truncated=mask_truncated),
        )
    return conversion


def of_kind(
    examples: ExampleStore, kind: Kind, conversion: Conversion | None, threshold: float | None
) -> tuple[ExampleStore, list[tuple[Example, Unused]]]:
    """These examples as the kind, and those that the conversion made nothing of, each with the
    reason. Raises UserError at the first that is of another kind and is not converted, and where
    ``scored`` answers share no sort of verdict.

    Examples that are converted are all held in memory.
    """
    made = conversion.gives if conversion else kind
    examples, failed = _without_failed(examples)
    other: list[Example] = []
    others = set[int]()
    for i, e in enumerate(examples):
        takes = conversion is not None and conversion.takes(e)
        is_ready = _is(e, made) or (_is(e, kind) and not takes)
        if is_ready and takes:
            raise UserError(
                "the row has a label already, and the conversion would make it from the score",
                code="row-label-and-score",
                where=str(e.origin),
                fix="remove data.convert, or set format: scored to read the score alone",
            )
        if not is_ready and not takes:
            raise _wrong_kind(e, kind)
        if not is_ready:
            other.append(e)
            others.add(i)
    converted, unused = conversion.run(other, threshold) if conversion else ([], [])
    found = _without(examples, others)
    found.extend(converted)
    if kind == "scored":
        shared_verdicts(e for e in found if isinstance(e, Judgement))
    return found, [*failed, *unused]


def _without(examples: ExampleStore, indices: set[int]) -> ExampleStore:
    """The examples but for those at these indices."""
    if not indices:
        return examples
    return ExampleStore(examples[i] for i in range(len(examples)) if i not in indices)


def imported_examples(
    examples: Sequence[Example], kind: Kind, conversion: Conversion | None
) -> list[Example]:
    """Of the Examples that the votes of a feedback tool made, those that a method and its
    conversion read.

    Where there are scores, a method of scored answers reads these and no thumbs. Prompts are those
    of all Examples, each once.
    """
    if kind == "prompt":
        prompts: dict[str, Example] = {}
        for e in examples:
            prompts.setdefault(content_id(e.prompt), Prompt(prompt=e.prompt, origin=e.origin))
        return list(prompts.values())
    scores = [e for e in examples if isinstance(e, Judgement) and e.score is not None]
    if kind == "scored" and conversion is None and scores:
        return list(scores)
    return [e for e in examples if _is(e, kind) or (conversion and conversion.takes(e))]


def _without_failed(
    examples: ExampleStore,
) -> tuple[ExampleStore, list[tuple[Example, Unused]]]:
    """The examples, and apart from them those whose reward failed, each with the reason."""
    failed = {
        i: e
        for i, e in enumerate(examples)
        if isinstance(e, Judgement) and e.error and not verdicts(e)
    }
    if not failed:
        return examples, []
    others = _without(examples, set(failed))
    judged = {content_id(e.prompt) for e in others}
    return others, [
        (
            e,
            Unused.REWARD_FAILED if content_id(e.prompt) in judged else Unused.ALL_REWARDS_FAILED,
        )
        for e in failed.values()
    ]


def _is(e: Example, kind: Kind) -> bool:
    if isinstance(e, Judgement) and kind in ("judgement", "scored"):
        return e.label is not None or (kind == "scored" and bool(verdicts(e)))
    return KINDS[type(e)] == kind


def _wrong_kind(e: Example, kind: Kind) -> UserError:
    ways = [
        f"data.convert: {name}{' and data.threshold' if c.threshold == 'needed' else ''}"
        for name, c in CONVERSIONS.items()
        if c.serves(kind) and c.takes(e)
    ]
    if kind == "prompt":
        ways.append("format: prompt on this file, to read only its prompts")
    if kind == "demonstration" and isinstance(e, Judgement) and e.label is None:
        ways.append(
            "format: demonstration (or messages) on this file, to imitate every answer whatever "
            "its score"
        )
    if isinstance(e, Prompt) and e.info:
        ways.append(
            f"keys on this file, if its other columns ({', '.join(sorted(e.info))}) hold the "
            f"answers"
        )
    return UserError(
        f"the rows are {_described(e)}, and the method needs {WORDS[kind]}",
        code="kind-mismatch",
        where=str(e.origin),
        fix=(
            f"set {', or '.join(ways)}; or choose a method for such rows{_methods(e)}"
            if ways
            else f"choose a method for such rows{_methods(e)}, or other data: no conversion "
            f"makes the one of the other"
        ),
    )


def _methods(e: Example) -> str:
    """A method that reads such a row, in parentheses."""
    is_score = isinstance(e, Judgement) and e.label is None
    return f" ({METHOD_FOR['scored' if is_score else KINDS[type(e)]]})"


def _described(e: Example) -> str:
    if not isinstance(e, Judgement) or e.label is not None:
        return WORDS[KINDS[type(e)]]
    if e.score is not None:
        return "answers with a score and no label"
    return "answers with attributes and no label" if e.attributes else "answers that nobody judged"
