"""Turning rows of one kind into another, only when asked to. Rows that cannot be used come back with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from valence.types import Content, Demonstration, Example, Judgement, Kind, Preference, Ranking, content_id

Converted = tuple[list[Example], list[tuple[Example, str]]]
"""What was made, and the rows that nothing was made of, each with the reason."""

T = TypeVar("T", bound=Example)


def pairs_to_judgements(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Each chosen answer judged up and, next to it, its rejected one judged down."""
    made, unused = _nothing()
    for e in examples:
        if isinstance(e, Preference):
            made += [
                Judgement(prompt=e.prompt, completion=side, label=label, weight=e.weight, origin=e.origin)
                for side, label in ((e.chosen, True), (e.rejected, False))
            ]
    return made, unused


def scores_to_judgements(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Thumbs up at the threshold or above. A ranking gives one judgement per answer."""
    assert threshold is not None
    made, unused = _nothing()
    for e in examples:
        if isinstance(e, Judgement) and e.score is not None:
            made.append(replace(e, label=e.score >= threshold))
        elif isinstance(e, Ranking):
            made += [
                Judgement(
                    prompt=e.prompt,
                    completion=completion,
                    label=score >= threshold,
                    score=score,
                    weight=e.weight,
                    origin=e.origin,
                )
                for completion, score in zip(e.completions, e.scores, strict=True)
            ]
    return made, unused


def chosen_to_demonstrations(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The chosen answer of a pair, an answer judged up, or the best of a ranking, to be imitated."""
    made, unused = _nothing()
    for e in examples:
        if isinstance(e, Judgement) and not e.label:
            unused.append((e, "judged down"))
            continue
        if isinstance(e, Preference):
            completion = e.chosen
        elif isinstance(e, Ranking):
            completion = e.completions[e.scores.index(max(e.scores))]
        else:
            assert isinstance(e, Judgement)
            completion = e.completion
        made.append(Demonstration(prompt=e.prompt, completion=completion, weight=e.weight, origin=e.origin))
    return made, unused


def judgements_to_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Answers judged up against answers judged down, for each prompt that has both.

    The shorter side is used again in turn, so every answer is in a pair. An answer judged both ways is in none.
    """
    made, unused = _nothing()
    for group in _by_prompt(e for e in examples if isinstance(e, Judgement)):
        up, down = ([e for e in group if e.label is label] for label in (True, False))
        both = {content_id(e.completion) for e in up} & {content_id(e.completion) for e in down}
        unused += [(e, "the same answer is judged both ways") for e in group if content_id(e.completion) in both]
        up, down = ([e for e in side if content_id(e.completion) not in both] for side in (up, down))
        if not up or not down:
            unused += [(e, f"its prompt has no other answer judged {'down' if e.label else 'up'}") for e in up + down]
            continue
        made += [_pair(up[i % len(up)], down[i % len(down)]) for i in range(max(len(up), len(down)))]
    return made, unused


def scores_to_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The best against the worst answer of each ranking, and of each prompt with scored answers.

    ``threshold``: the smallest difference of their scores that makes a pair. Equal scores never do.
    """
    made, unused = _nothing()
    groups = _by_prompt(e for e in examples if isinstance(e, Judgement))
    for group in (*groups, *([e] for e in examples if isinstance(e, Ranking))):
        answers = [answer for e in group for answer in _scored(e)]
        best, worst = max(answers, key=lambda a: a[1]), min(answers, key=lambda a: a[1])
        reason = _no_pair(len(answers), best, worst, threshold or 0.0)
        if reason is not None:
            unused += [(e, reason) for e in group]
            continue
        made.append(
            Preference(
                prompt=group[0].prompt,
                chosen=best[0],
                rejected=worst[0],
                weight=min(best[2].weight, worst[2].weight),
                origin=best[2].origin,
            )
        )
        unused += [
            (e, "its score is between the best and the worst of its prompt")
            for e in group
            if e is not best[2] and e is not worst[2]
        ]
    return made, unused


def _nothing() -> Converted:
    return [], []


Scored = tuple[Content, float, Judgement | Ranking]


def _scored(e: Example) -> list[Scored]:
    if isinstance(e, Ranking):
        return [(completion, score, e) for completion, score in zip(e.completions, e.scores, strict=True)]
    assert isinstance(e, Judgement)
    assert e.score is not None
    return [(e.completion, e.score, e)]


def _no_pair(count: int, best: Scored, worst: Scored, threshold: float) -> str | None:
    if count < 2:
        return "its prompt has no other scored answer"
    if best[1] == worst[1]:
        return "all answers of its prompt have the same score"
    if best[1] - worst[1] < threshold:
        return "the scores of its prompt differ by less than the threshold"
    return "the best and the worst answer are the same" if best[0] == worst[0] else None


def _pair(up: Judgement, down: Judgement) -> Preference:
    return Preference(
        prompt=up.prompt, chosen=up.completion, rejected=down.completion, weight=min(up.weight, down.weight), origin=up.origin
    )


def _by_prompt(examples: Iterable[T]) -> Iterable[list[T]]:
    groups: dict[str, list[T]] = {}
    for e in examples:
        groups.setdefault(content_id(e.prompt), []).append(e)
    return groups.values()


@dataclass(frozen=True, slots=True)
class Conversion:
    """``run(rows it takes, threshold)``; ``gives``: the kind of what it makes."""

    run: Callable[[Sequence[Example], float | None], Converted]
    takes: Callable[[Example], bool]
    gives: Kind
    threshold: Literal["needed", "optional", "none"] = "none"


def _is_labelled(e: Example) -> bool:
    return isinstance(e, Judgement) and e.label is not None


def _is_scored(e: Example) -> bool:
    return isinstance(e, Ranking) or (isinstance(e, Judgement) and e.score is not None)


CONVERSIONS: dict[str, Conversion] = {
    "pairs_to_judgements": Conversion(pairs_to_judgements, lambda e: isinstance(e, Preference), "judgement"),
    "judgements_to_pairs": Conversion(judgements_to_pairs, _is_labelled, "preference"),
    "scores_to_judgements": Conversion(scores_to_judgements, _is_scored, "judgement", "needed"),
    "scores_to_pairs": Conversion(scores_to_pairs, _is_scored, "preference", "optional"),
    "chosen_to_demonstrations": Conversion(
        chosen_to_demonstrations, lambda e: isinstance(e, Preference | Ranking) or _is_labelled(e), "demonstration"
    ),
}
