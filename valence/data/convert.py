"""Convert examples of one kind into another: the conversions of ``data.convert``, and their table.

A conversion returns the new examples, and the examples that it cannot use with the reason. ``info``
is copied where one example becomes another, and dropped where several become one.

A leaf: it imports types and errors only, so that the settings can name the conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import Any, TypeVar

from valence.errors import UserError
from valence.types import (
    Content,
    Demonstration,
    Example,
    Judgement,
    Kind,
    Preference,
    Ranking,
    content_id,
)


class Unused(StrEnum):
    """Why a conversion does not use an example."""

    UNDECIDED = "its soft label does not prefer the chosen completion"
    NO_OTHER_JUDGED = "its prompt has no other rated completion"
    NO_OTHER_UP = "its prompt has no other completion rated up"
    NO_OTHER_DOWN = "its prompt has no other completion rated down"
    NO_OTHER_SCORED = "its prompt has no other scored completion"
    JUDGED_DOWN = "it is rated down"
    JUDGED_BOTH_WAYS = "its completion is rated both up and down"
    SAME_SCORES = "all completions of its prompt have the same score"
    BETWEEN_BEST_AND_WORST = "its score is between the best and the worst of its prompt"
    WITHIN_THRESHOLD_OF_ALL = "its score differs from no other of its prompt by data.threshold"
    DIFFERENCE_BELOW_THRESHOLD = "the scores of its prompt differ by less than data.threshold"
    SAME_COMPLETION = "the best and the worst completion of its prompt are the same"
    TRUNCATED = "it was truncated"
    BELOW_THRESHOLD = "its score is below data.threshold"
    LOWEST_SCORE = "no other completion of its prompt has a smaller score"
    NOT_IN_TOP_N = "other completions of its prompt have larger scores"
    TIED_WITH_EARLIER = "a completion of its prompt with the same score comes before it"
    REWARD_FAILED = "its reward failed"
    ALL_REWARDS_FAILED = "its reward failed, and no other completion of its prompt has a score"


Converted = tuple[list[Example], list[tuple[Example, Unused]]]
"""The new examples, and the examples without use, each with the reason."""
ScoredAnswer = tuple[Content, float, Judgement | Ranking]
"""An answer, its score, and the example that it is from."""

E = TypeVar("E", bound=Example)


def pairs_to_judgements(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Each chosen answer with thumbs up and, next to it, its rejected answer with thumbs down.

    Drops margin and soft label.
    """
    pairs, unused = _decided_pairs(examples)
    judgements = [
        Judgement(prompt=e.prompt, completion=completion, label=label, **_common(e))
        for e in pairs
        for completion, label in ((e.chosen, True), (e.rejected, False))
    ]
    return [*judgements], unused


def pairs_to_rankings(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The chosen answer with the score 1 and the rejected answer with -1.

    Drops margin and soft label.
    """
    pairs, unused = _decided_pairs(examples)
    rankings = [
        Ranking(
            prompt=e.prompt,
            completions=(e.chosen, e.rejected),
            scores=(1.0, -1.0),
            **_common(e),
        )
        for e in pairs
    ]
    return [*rankings], unused


def scores_to_judgements(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Thumbs up at the threshold or above. A ranking becomes one judgement per answer."""
    assert threshold is not None
    judgements = [
        replace(judgement, label=judgement.score >= threshold)
        for e in examples
        for judgement in ([e] if isinstance(e, Judgement) else _ranked_judgements(e))
        if judgement.score is not None
    ]
    return [*judgements], []


def rankings_to_scored(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Each answer of a ranking with its score (of k ranks: -1 down to -k), and no label."""
    return [judgement for e in examples for judgement in _ranked_judgements(e)], []


def scores_to_rankings(examples: Sequence[Example], threshold: float | None) -> Converted:
    """All rated answers of a prompt as one ranking, by their scores, or else by their labels: 1 for
    up and -1 for down.

    The weight of a ranking is the smallest weight of its rows. Raises UserError when some rows have
    only a score and others only a label.
    """
    judgements = [e for e in examples if isinstance(e, Judgement)]
    by_score = "score" in shared_ratings(judgements, ("score", "label"))
    rankings: list[Example] = []
    unused: list[tuple[Example, Unused]] = []
    for group in _by_prompt(judgements):
        if len(group) == 1:
            unused.append((group[0], Unused.NO_OTHER_JUDGED))
            continue
        scores = (e.score if by_score else (1.0 if e.label else -1.0) for e in group)
        rankings.append(
            Ranking(
                prompt=group[0].prompt,
                completions=tuple(e.completion for e in group),
                scores=tuple(score for score in scores if score is not None),
                weight=min(e.weight for e in group),
                origin=group[0].origin,
            )
        )
    return rankings, unused


def chosen_to_demonstrations(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The chosen answer of a pair, answers with thumbs up, and the best answer of a ranking."""
    demonstrations: list[Example] = []
    unused: list[tuple[Example, Unused]] = []
    for e in examples:
        if isinstance(e, Preference) and _is_undecided(e):
            unused.append((e, Unused.UNDECIDED))
        elif isinstance(e, Judgement) and not e.label:
            unused.append((e, Unused.JUDGED_DOWN))
        elif isinstance(e, Preference):
            demonstrations.append(_demonstration(e, e.chosen))
        elif isinstance(e, Ranking):
            best = e.completions[e.scores.index(max(e.scores))]
            demonstrations.append(_demonstration(e, best))
        elif isinstance(e, Judgement):
            demonstrations.append(_demonstration(e, e.completion))
    return demonstrations, unused


def best_to_demonstrations(
    examples: Sequence[Example],
    threshold: float | None,
    top_n: int = 1,
    mask_truncated: bool = True,
) -> Converted:
    """The ``top_n`` answers with the largest scores of each ranking, and of each prompt with scored
    answers. Of equal scores, the first in the file is taken.

    Drops a prompt whose answers all have the same score. ``threshold``: the smallest score to
    imitate, also for a prompt with a single answer; without a threshold, the answers that share the
    lowest score of a prompt are not imitated. ``mask_truncated``: leave out answers that are known
    to be truncated.
    """
    demonstrations: list[Example] = []
    unused: list[tuple[Example, Unused]] = []
    for group in _scored_groups(examples):
        answers = sorted((answer for e in group for answer in _scored_answers(e)), key=_negative)
        reasons = [
            _reason_not_imitated(answer, answers, threshold, mask_truncated) for answer in answers
        ]
        allowed = [answer for answer, reason in zip(answers, reasons, strict=True) if not reason]
        demonstrations += [_demonstration(e, completion) for completion, _, e in allowed[:top_n]]
        excluded = [
            (e, reason) for (_, _, e), reason in zip(answers, reasons, strict=True) if reason
        ]
        excluded += [
            (e, Unused.TIED_WITH_EARLIER if score == allowed[top_n - 1][1] else Unused.NOT_IN_TOP_N)
            for _, score, e in allowed[top_n:]
        ]
        unused += [(e, reason) for e, reason in excluded if isinstance(e, Judgement)]
        if len(excluded) == len(answers) and isinstance(group[0], Ranking):
            unused.append((group[0], excluded[0][1]))
    return demonstrations, unused


def _reason_not_imitated(
    answer: ScoredAnswer,
    group: Sequence[ScoredAnswer],
    threshold: float | None,
    mask_truncated: bool,
) -> Unused | None:
    """Why an answer must not be imitated, whatever ``top_n`` is; None if it may be imitated.

    group: the answers to its prompt, best first.
    """
    _, score, example = answer
    if threshold is None or len(group) > 1:
        if len(group) < 2:
            return Unused.NO_OTHER_SCORED
        if group[0][1] == group[-1][1]:
            return Unused.SAME_SCORES
    if mask_truncated and isinstance(example, Judgement) and example.is_truncated:
        return Unused.TRUNCATED
    if threshold is not None:
        return Unused.BELOW_THRESHOLD if score < threshold else None
    return Unused.LOWEST_SCORE if score == group[-1][1] else None


def judgements_to_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Answers with thumbs up against answers with thumbs down, for each prompt that has both.

    Answers of the smaller side are used repeatedly, so that every answer is in a pair. An answer
    with both labels is in none.
    """
    pairs: list[Example] = []
    unused: list[tuple[Example, Unused]] = []
    for group in _by_prompt(e for e in examples if isinstance(e, Judgement)):
        up, down = ([e for e in group if e.label is label] for label in (True, False))
        both = {content_id(e.completion) for e in up} & {content_id(e.completion) for e in down}
        unused += [(e, Unused.JUDGED_BOTH_WAYS) for e in group if content_id(e.completion) in both]
        up, down = (
            [e for e in side if content_id(e.completion) not in both] for side in (up, down)
        )
        if not up or not down:
            unused += [
                (e, Unused.NO_OTHER_DOWN if e.label else Unused.NO_OTHER_UP) for e in up + down
            ]
            continue
        rounds = ((up[i % len(up)], down[i % len(down)]) for i in range(max(len(up), len(down))))
        pairs += [_pair(u, u.completion, d, d.completion) for u, d in rounds]
    return pairs, unused


def scores_to_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The best against the worst answer of each ranking, and of each prompt with scored answers.

    ``threshold``: the smallest difference of scores that makes a pair. Equal scores never do. Sets
    no margin.
    """

    def best_and_worst(answers: Sequence[ScoredAnswer]) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
        return [(min(answers, key=_negative), max(answers, key=_negative))]

    return _pairs_of_scores(examples, threshold, best_and_worst, Unused.BETWEEN_BEST_AND_WORST)


def scores_to_all_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Every two answers to a prompt whose scores differ, of rankings and of scored answers.

    ``threshold``: the smallest difference of scores that makes a pair. Equal scores never do. Sets
    no margin.
    """

    def every_two(answers: Sequence[ScoredAnswer]) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
        return list(combinations(sorted(answers, key=_negative), 2))

    return _pairs_of_scores(examples, threshold, every_two, Unused.WITHIN_THRESHOLD_OF_ALL)


def _pairs_of_scores(
    examples: Sequence[Example],
    threshold: float | None,
    choose: Callable[[Sequence[ScoredAnswer]], Iterable[tuple[ScoredAnswer, ScoredAnswer]]],
    unpaired: Unused,
) -> Converted:
    """The pairs that ``choose`` returns, better answer first, if their scores differ enough.

    unpaired: why an example is in no pair of its group while others are.
    """
    pairs: list[Example] = []
    unused: list[tuple[Example, Unused]] = []
    for group in _scored_groups(examples):
        answers = [answer for e in group for answer in _scored_answers(e)]
        chosen = [
            (a, b)
            for a, b in choose(answers)
            if a[0] != b[0] and a[1] > b[1] and a[1] - b[1] >= (threshold or 0.0)
        ]
        used = {id(e) for pair in chosen for _, _, e in pair}
        reason = unpaired if chosen else _reason_without_pair(answers, threshold or 0.0)
        unused += [(e, reason) for e in group if id(e) not in used]
        pairs += [_pair(up, better, down, worse) for (better, _, up), (worse, _, down) in chosen]
    return pairs, unused


def _reason_without_pair(answers: Sequence[ScoredAnswer], threshold: float) -> Unused:
    scores = [score for _, score, _ in answers]
    if len(answers) < 2:
        return Unused.NO_OTHER_SCORED
    if max(scores) == min(scores):
        return Unused.SAME_SCORES
    if max(scores) - min(scores) < threshold:
        return Unused.DIFFERENCE_BELOW_THRESHOLD
    return Unused.SAME_COMPLETION


def _negative(answer: ScoredAnswer) -> float:
    """Sorts answers by score, the best first and equal scores in their order."""
    return -answer[1]


def _decided_pairs(
    examples: Sequence[Example],
) -> tuple[list[Preference], list[tuple[Example, Unused]]]:
    pairs = [e for e in examples if isinstance(e, Preference)]
    unused: list[tuple[Example, Unused]] = [
        (e, Unused.UNDECIDED) for e in pairs if _is_undecided(e)
    ]
    return [e for e in pairs if not _is_undecided(e)], unused


def _is_undecided(e: Preference) -> bool:
    return e.soft is not None and e.soft <= 0.5


def _common(e: Example) -> dict[str, Any]:
    return {"weight": e.weight, "info": e.info, "origin": e.origin}


def _demonstration(e: Judgement | Preference | Ranking, completion: Content) -> Demonstration:
    """One of the example's answers, to imitate."""
    return Demonstration(prompt=e.prompt, completion=completion, **_common(e))


def _ranked_judgements(e: Example) -> list[Judgement]:
    assert isinstance(e, Ranking)
    return [
        Judgement(prompt=e.prompt, completion=completion, score=score, **_common(e))
        for completion, score in zip(e.completions, e.scores, strict=True)
    ]


def _scored_answers(e: Judgement | Ranking) -> list[ScoredAnswer]:
    if isinstance(e, Ranking):
        return [(c, score, e) for c, score in zip(e.completions, e.scores, strict=True)]
    assert e.score is not None
    return [(e.completion, e.score, e)]


def _pair(
    up: Judgement | Ranking, better: Content, down: Judgement | Ranking, worse: Content
) -> Preference:
    return Preference(
        prompt=up.prompt,
        chosen=better,
        rejected=worse,
        weight=min(up.weight, down.weight),
        origin=up.origin,
    )


def _by_prompt(examples: Iterable[E]) -> Iterable[list[E]]:
    groups: dict[str, list[E]] = {}
    for e in examples:
        groups.setdefault(content_id(e.prompt), []).append(e)
    return groups.values()


def _scored_groups(examples: Sequence[Example]) -> list[list[Judgement] | list[Ranking]]:
    """Scored answers of the same prompt, then each ranking by itself."""
    judgements = _by_prompt(e for e in examples if isinstance(e, Judgement))
    return [*judgements, *([e] for e in examples if isinstance(e, Ranking))]


# Ratings

RATINGS = {"label": "a label", "score": "a score", "attributes": "attributes"}
"""Ratings of a judgement, by field -> what messages call them."""


def ratings_of(judgement: Judgement) -> list[str]:
    """The ratings that a judgement has."""
    is_set = {
        "label": judgement.label is not None,
        "score": judgement.score is not None,
        "attributes": bool(judgement.attributes),
    }
    return [name for name in RATINGS if is_set[name]]


def shared_ratings(
    judgements: Iterable[Judgement], names: Sequence[str] = tuple(RATINGS)
) -> list[str]:
    """The ratings among ``names`` that all judgements have, which they can be trained on together.

    Raises UserError at the first judgement that leaves none.
    """
    shared = list(names)
    for judgement in judgements:
        ratings = ratings_of(judgement)
        previous, shared = shared, [name for name in shared if name in ratings]
        if not shared:
            raise UserError(
                f"the row has {_described(ratings)}, but all rows before it have "
                f"{_described(previous)}",
                code="rows-rated-differently",
                where=str(judgement.origin),
                fix="use only rows that all have a label, or all a score, or all attributes, and "
                "remove the others",
            )
    return shared


def _described(names: Sequence[str]) -> str:
    return " and ".join(RATINGS[name] for name in names) or "no rating"


def threshold_setting(scores: Iterable[float]) -> str:
    """The setting of a threshold for these scores: the smallest one in the upper half."""
    scores = sorted(scores)
    middle = (scores[0] + scores[-1]) / 2
    threshold = next((score for score in scores if score > middle), middle)
    return f"data.threshold: {threshold:g} (the scores are {scores[0]:g} to {scores[-1]:g})"


# The table


@dataclass(frozen=True, slots=True)
class Conversion:
    """One value of ``data.convert``.

    run: called with the examples and the threshold. reads: kinds of rows that it converts (of
    ``scored`` those with a score). gives: the kind of its examples. settings: settings of the
    section ``data`` that it reads; required: those that must be set.
    """

    run: Callable[..., Converted]
    reads: tuple[Kind, ...]
    gives: Kind
    description: str
    settings: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    def takes(self, e: Example) -> bool:
        """Whether it converts such an example."""
        return any(_is_row_of(e, kind) for kind in self.reads)

    def serves(self, kind: Kind) -> bool:
        """Whether a method that reads ``kind`` can read the result."""
        return self.gives == kind or (self.gives == "judgement" and kind == "scored")


def _is_row_of(e: Example, kind: Kind) -> bool:
    if isinstance(e, Judgement):
        return (kind == "judgement" and e.label is not None) or (
            kind == "scored" and e.score is not None
        )
    return (
        isinstance(e, Preference)
        if kind == "preference"
        else (kind == "ranking" and isinstance(e, Ranking))
    )


CONVERSIONS: dict[str, Conversion] = {
    "pairs_to_judgements": Conversion(
        pairs_to_judgements,
        ("preference",),
        "judgement",
        "chosen thumbs up, rejected thumbs down",
    ),
    "pairs_to_rankings": Conversion(
        pairs_to_rankings,
        ("preference",),
        "ranking",
        "chosen 1, rejected -1",
    ),
    "judgements_to_pairs": Conversion(
        judgements_to_pairs,
        ("judgement",),
        "preference",
        "thumbs up against thumbs down of the same prompt",
    ),
    "scores_to_judgements": Conversion(
        scores_to_judgements,
        ("ranking", "scored"),
        "judgement",
        "thumbs up at a score of `threshold` or above, else thumbs down",
        settings=("threshold",),
        required=("threshold",),
    ),
    "scores_to_pairs": Conversion(
        scores_to_pairs,
        ("ranking", "scored"),
        "preference",
        "the best against the worst completion of each prompt",
        settings=("threshold",),
    ),
    "scores_to_all_pairs": Conversion(
        scores_to_all_pairs,
        ("ranking", "scored"),
        "preference",
        "every pair of completions of a prompt that differ in score",
        settings=("threshold",),
    ),
    "scores_to_rankings": Conversion(
        scores_to_rankings,
        ("judgement", "scored"),
        "ranking",
        "all rated completions of a prompt, by score or by label (up 1, down -1)",
    ),
    "rankings_to_scored": Conversion(
        rankings_to_scored,
        ("ranking",),
        "scored",
        "every completion with its score",
    ),
    "chosen_to_demonstrations": Conversion(
        chosen_to_demonstrations,
        ("preference", "ranking", "judgement"),
        "demonstration",
        "the chosen completions of pairs, completions with thumbs up, and the best completion "
        "of each ranking",
    ),
    "best_to_demonstrations": Conversion(
        best_to_demonstrations,
        ("ranking", "scored"),
        "demonstration",
        "the `top_n` best completions of each prompt",
        settings=("threshold", "top_n", "mask_truncated"),
    ),
}
