"""The kinds of rows that methods read: which examples are of a kind, and how they become one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from valence.data.convert import (
    CONVERSIONS,
    Conversion,
    Unused,
    ratings_of,
    shared_ratings,
    threshold_setting,
)
from valence.data.example_store import ExampleStore
from valence.data.kind_names import COLUMNS_OF, METHOD_FOR, TEACHER_METHOD_FOR, WORDS
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
            fix=f"set data.convert to one of {', '.join(CONVERSIONS)}",
        )
    if conversion is not None and not conversion.serves(kind):
        raise UserError(
            f"{name} produces {WORDS[conversion.gives]}, but the method needs {WORDS[kind]}",
            code="conversion-mismatch",
            where="data.convert",
            fix="remove data.convert, or set it to one of "
            + ", ".join(other for other, c in CONVERSIONS.items() if c.serves(kind)),
        )
    if threshold is None and conversion and "threshold" in conversion.required:
        raise UserError(
            f"{name} needs the smallest score with thumbs up",
            code="threshold-missing",
            where="data.threshold",
            fix="set data.threshold to the lowest score of a good answer",
        )
    reads_threshold = conversion is not None and "threshold" in conversion.settings
    if threshold is not None and not (reads_threshold and math.isfinite(threshold)):
        raise UserError(
            "the threshold has no effect: "
            + (f"{name} does not read it" if name else "rows are not converted")
            if not reads_threshold
            else f"the threshold is {threshold}, but must be a finite number",
            code="threshold-no-effect",
            where="data.threshold",
            fix="remove it, or set data.convert to a conversion of scores"
            if not reads_threshold
            else "set it to a number",
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
                "the row already has a label, but data.convert would compute another one from its "
                "score",
                code="row-label-and-score",
                where=str(e.origin),
                fix="remove data.convert to use the label, or set format: scored on this file to "
                "use the score",
            )
        if not is_ready and not is_converted:
            raise _wrong_kind(e, kind, examples)
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
    if isinstance(e, Judgement) and kind == "feedback":
        return bool(e.feedback)
    if isinstance(e, Judgement) and kind in ("judgement", "scored"):
        return e.label is not None or (kind == "scored" and bool(ratings_of(e)))
    return KINDS[type(e)] == kind


def _wrong_kind(e: Example, kind: Kind, examples: Iterable[Example]) -> UserError:
    groups = isinstance(e, Judgement) and kind in ("ranking", "preference")
    condition = " if prompts have several rated completions" if groups else ""
    scores = [s.score for s in examples if isinstance(s, Judgement) and s.score is not None]
    threshold = f" and {threshold_setting(scores)}" if scores else " and data.threshold"
    ways = [
        f"data.convert: {name}{threshold if 'threshold' in c.required else ''}" + condition
        for name, c in CONVERSIONS.items()
        if c.serves(kind) and c.takes(e)
    ]
    if kind == "ranking":
        ways.insert(0, "reward, to train on completions that the model samples for these prompts")
    if kind == "prompt":
        ways.append("format: prompt on this file, to read only its column of prompts")
    if kind == "demonstration" and isinstance(e, Judgement) and e.label is None:
        ways.append(
            "format: demonstration (or messages) on this file, to imitate every answer, whatever "
            "its score"
        )
    if isinstance(e, Prompt) and e.info:
        keys = "chosen: COLUMN, rejected" if kind == "preference" else "completion"
        columns = ", ".join(sorted(e.info))
        ways.append(f"keys: {{{keys}: COLUMN}}, if other columns ({columns}) contain the answers")
    is_unlabelled = isinstance(e, Judgement) and e.label is None
    actual_kind = "scored" if is_unlabelled else KINDS[type(e)]
    methods = METHOD_FOR[actual_kind]
    if other := TEACHER_METHOD_FOR.get(actual_kind):
        methods += f", or {other} with a larger model as its teacher"
    way = (
        f"set {', or '.join(ways)}"
        if ways
        else f"use rows with the columns {COLUMNS_OF[kind]} (these rows cannot be converted)"
    )
    return UserError(
        f"the rows contain {_described(e)}, but the method needs {WORDS[kind]}",
        code="kind-mismatch",
        where=str(e.origin),
        fix=f"{way}; or use a method for such rows, such as {methods}",
    )


def _described(e: Example) -> str:
    if not isinstance(e, Judgement) or e.label is not None:
        return WORDS[KINDS[type(e)]]
    if e.score is not None:
        return "answers with a score and no label"
    return "answers with attributes and no label" if e.attributes else "answers without a rating"
