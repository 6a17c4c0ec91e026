"""The kinds of rows that methods read: which examples are of a kind, and how they become one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from valence.data.convert import CONVERSIONS, Conversion, Unused, ratings_of, shared_ratings
from valence.data.example_store import ExampleStore
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
    "judgement": "completions rated up or down",
    "preference": "pairs of a chosen and a rejected completion",
    "demonstration": "completions to imitate",
    "ranking": "several scored completions per prompt",
    "prompt": "prompts",
    "scored": "completions with a label, a score or attributes",
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
    """The conversion of this name, with its settings.

    Raises UserError when its examples are not of this kind, or when it cannot use the threshold.
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
            f"{name} produces {WORDS[conversion.gives]}, but the method needs {WORDS[kind]}",
            code="conversion-mismatch",
            where="data.convert",
            fix="remove it, or choose another conversion or method",
        )
    if threshold is None and conversion and "threshold" in conversion.required:
        raise UserError(
            f"{name} needs a threshold",
            code="threshold-missing",
            where="data.threshold",
            fix="set it to the lowest score of a good answer",
        )
    reads_threshold = conversion is not None and "threshold" in conversion.settings
    if threshold is not None and not (reads_threshold and math.isfinite(threshold)):
        raise UserError(
            f"{threshold} has no effect here",
            code="threshold-no-effect",
            where="data.threshold",
            fix="remove it, or set it to a finite number and data.convert to a conversion of "
            "scores",
        )
    if conversion is None:
        return None
    values = {"top_n": top_n, "mask_truncated": mask_truncated}
    options = {name: value for name, value in values.items() if name in conversion.settings}
    return replace(conversion, run=partial(conversion.run, **options)) if options else conversion


def of_kind(
    examples: ExampleStore, kind: Kind, conversion: Conversion | None, threshold: float | None
) -> tuple[ExampleStore, list[tuple[Example, Unused]]]:
    """The examples as examples of this kind, and those that cannot be used, each with the reason.

    Examples that are converted are all in memory at once. Raises UserError at the first example of
    another kind that is not converted, and where ``scored`` answers share no rating.
    """
    target = conversion.gives if conversion else kind
    examples, failed = _split_failed(examples)
    others: dict[int, Example] = {}
    for i, e in enumerate(examples):
        is_converted = conversion is not None and conversion.takes(e)
        is_ready = _is_of_kind(e, target) or (_is_of_kind(e, kind) and not is_converted)
        if is_ready and is_converted:
            raise UserError(
                "the row has a label already, but the conversion would compute it from the score",
                code="row-label-and-score",
                where=str(e.origin),
                fix="remove data.convert, or set format: scored to read the score alone",
            )
        if not is_ready and not is_converted:
            raise _wrong_kind(e, kind)
        if not is_ready:
            others[i] = e
    converted, unused = conversion.run([*others.values()], threshold) if conversion else ([], [])
    usable = _without(examples, others)
    usable.extend(converted)
    if kind == "scored":
        shared_ratings(e for e in usable if isinstance(e, Judgement))
    return usable, [*failed, *unused]


def _without(examples: ExampleStore, indices: Collection[int]) -> ExampleStore:
    """The examples without those at these indices."""
    if not indices:
        return examples
    return ExampleStore(examples[i] for i in range(len(examples)) if i not in indices)


def imported_examples(
    examples: Sequence[Example], kind: Kind, conversion: Conversion | None
) -> list[Example]:
    """The examples of a feedback tool's votes that a method and its conversion read.

    If some have scores, a method for scored answers reads these and no thumbs. A method for prompts
    gets the prompt of every example, each once.
    """
    if kind == "prompt":
        prompts: dict[str, Example] = {}
        for e in examples:
            prompts.setdefault(content_id(e.prompt), Prompt(prompt=e.prompt, origin=e.origin))
        return list(prompts.values())
    scored = [e for e in examples if isinstance(e, Judgement) and e.score is not None]
    if kind == "scored" and conversion is None and scored:
        return list(scored)
    return [e for e in examples if _is_of_kind(e, kind) or (conversion and conversion.takes(e))]


def _split_failed(
    examples: ExampleStore,
) -> tuple[ExampleStore, list[tuple[Example, Unused]]]:
    """The examples without those whose reward failed, and these with the reason."""
    failed = {
        i: e
        for i, e in enumerate(examples)
        if isinstance(e, Judgement) and e.error and not ratings_of(e)
    }
    if not failed:
        return examples, []
    usable = _without(examples, failed)
    rated_prompts = {content_id(e.prompt) for e in usable}
    reasons = (
        Unused.REWARD_FAILED if content_id(e.prompt) in rated_prompts else Unused.ALL_REWARDS_FAILED
        for e in failed.values()
    )
    return usable, list(zip(failed.values(), reasons, strict=True))


def _is_of_kind(e: Example, kind: Kind) -> bool:
    if isinstance(e, Judgement) and kind in ("judgement", "scored"):
        return e.label is not None or (kind == "scored" and bool(ratings_of(e)))
    return KINDS[type(e)] == kind


def _wrong_kind(e: Example, kind: Kind) -> UserError:
    ways = [
        f"data.convert: {name}{' and data.threshold' if 'threshold' in c.required else ''}"
        for name, c in CONVERSIONS.items()
        if c.serves(kind) and c.takes(e)
    ]
    if kind == "prompt":
        ways.append("format: prompt on this file, to read only its prompts")
    if kind == "demonstration" and isinstance(e, Judgement) and e.label is None:
        ways.append(
            "format: demonstration (or messages) on this file, to imitate every answer, whatever "
            "its score"
        )
    if isinstance(e, Prompt) and e.info:
        ways.append(
            f"keys on this file, if its other columns ({', '.join(sorted(e.info))}) contain "
            f"the answers"
        )
    return UserError(
        f"the rows are {_described(e)}, but the method needs {WORDS[kind]}",
        code="kind-mismatch",
        where=str(e.origin),
        fix=(
            f"set {', or '.join(ways)}; or choose a method for such rows{_method_for(e)}"
            if ways
            else f"choose a method for such rows{_method_for(e)}, or use other data: "
            f"these rows cannot be converted"
        ),
    )


def _method_for(e: Example) -> str:
    """A method that reads such a row, in parentheses."""
    is_score = isinstance(e, Judgement) and e.label is None
    return f" ({METHOD_FOR['scored' if is_score else KINDS[type(e)]]})"


def _described(e: Example) -> str:
    if not isinstance(e, Judgement) or e.label is not None:
        return WORDS[KINDS[type(e)]]
    if e.score is not None:
        return "answers with a score and no label"
    return "answers with attributes and no label" if e.attributes else "answers without a rating"
