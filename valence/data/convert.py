"""Convert rows of one kind into another, only when asked to.

Rows that cannot be used come back with the reason.

``info`` is kept where an example is made of one row, and left out where it is made of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import Literal, TypeVar

from valence.data.verdicts import shared_verdicts
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
    """Why a conversion makes nothing of a row."""

    UNDECIDED = "its soft label does not say that the chosen answer is the better one"
    NO_OTHER_JUDGED = "its prompt has no other judged answer"
    NO_OTHER_UP = "its prompt has no other answer judged up"
    NO_OTHER_DOWN = "its prompt has no other answer judged down"
    NO_OTHER_SCORED = "its prompt has no other scored answer"
    JUDGED_DOWN = "judged down"
    JUDGED_BOTH_WAYS = "the same answer is judged both ways"
    SAME_SCORES = "all answers of its prompt have the same score"
    BETWEEN_BEST_AND_WORST = "its score is between the best and the worst of its prompt"
    WITHIN_THRESHOLD_OF_ALL = "its score is within the threshold of all others of its prompt"
    DIFFERENCE_BELOW_THRESHOLD = "the scores of its prompt differ by less than the threshold"
    SAME_ANSWER = "the best and the worst answer are the same"
    TRUNCATED = "it was truncated"
    BELOW_THRESHOLD = "its score is below data.threshold"
    LOWEST_SCORE = "no other answer to its prompt has a smaller score"
    NOT_IN_TOP_N = "other answers to its prompt have larger scores"
    TIED_WITH_EARLIER = "an answer to its prompt with the same score comes before it"
    REWARD_FAILED = "its reward failed"
    ALL_REWARDS_FAILED = "its reward failed, and no other answer to its prompt has a score"


Converted = tuple[list[Example], list[tuple[Example, Unused]]]
"""What was made, and the rows that nothing was made of, each with the reason."""

T = TypeVar("T", bound=Example)


def pairs_to_judgements(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Each chosen answer judged up and, next to it, its rejected one judged down.

    Margin and soft label are not kept.
    """
    made, unused = _nothing()
    for e in examples:
        if _is_undecided(e):
            unused.append((e, Unused.UNDECIDED))
        elif isinstance(e, Preference):
            made += [
                Judgement(
                    prompt=e.prompt,
                    completion=side,
                    label=label,
                    weight=e.weight,
                    info=e.info,
                    origin=e.origin,
                )
                for side, label in ((e.chosen, True), (e.rejected, False))
            ]
    return made, unused


def pairs_to_rankings(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The chosen answer with the score 1 and the rejected one with -1.

    Margin and soft label are not kept.
    """
    made, unused = _nothing()
    for e in examples:
        if _is_undecided(e):
            unused.append((e, Unused.UNDECIDED))
        elif isinstance(e, Preference):
            sides = (e.chosen, e.rejected)
            ranking = Ranking(
                prompt=e.prompt,
                completions=sides,
                scores=(1.0, -1.0),
                weight=e.weight,
                info=e.info,
                origin=e.origin,
            )
            made.append(ranking)
    return made, unused


def scores_to_judgements(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Thumbs up at the threshold or above. A ranking gives one judgement per answer."""
    assert threshold is not None
    scored = (j for e in examples for j in ([e] if isinstance(e, Judgement) else _answers_of(e)))
    return [replace(j, label=j.score >= threshold) for j in scored if j.score is not None], []


def rankings_to_scored(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Each answer of a ranking with its score (of k ranks: -1 down to -k), and no label."""
    return [judgement for e in examples for judgement in _answers_of(e)], []


def scores_to_rankings(examples: Sequence[Example], threshold: float | None) -> Converted:
    """All judged answers of a prompt as one ranking, by their scores, or else by their labels: 1
    for up and -1 for down.

    A ranking's weight is the smallest of its rows'. Raises UserError when some rows have only a
    score and others only a label.
    """
    made, unused = _nothing()
    judged = [e for e in examples if isinstance(e, Judgement)]
    by_score = "score" in shared_verdicts(judged, ("score", "label"))
    for group in _by_prompt(judged):
        if len(group) == 1:
            unused.append((group[0], Unused.NO_OTHER_JUDGED))
            continue
        given = (e.score if by_score else (1.0 if e.label else -1.0) for e in group)
        made.append(
            Ranking(
                prompt=group[0].prompt,
                completions=tuple(e.completion for e in group),
                scores=tuple(score for score in given if score is not None),
                weight=min(e.weight for e in group),
                origin=group[0].origin,
            )
        )
    return made, unused


def chosen_to_demonstrations(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The chosen answer of a pair, answers judged up, and the best of a ranking, to imitate."""
    made, unused = _nothing()
    for e in examples:
        if _is_undecided(e) or (isinstance(e, Judgement) and not e.label):
            unused.append((e, Unused.JUDGED_DOWN if isinstance(e, Judgement) else Unused.UNDECIDED))
            continue
        if isinstance(e, Preference):
            completion = e.chosen
        elif isinstance(e, Ranking):
            completion = e.completions[e.scores.index(max(e.scores))]
        else:
            assert isinstance(e, Judgement)
            completion = e.completion
        made.append(_demonstration(e, completion))
    return made, unused


def best_to_demonstrations(
    examples: Sequence[Example],
    threshold: float | None,
    top_n: int = 1,
    mask_truncated: bool = True,
) -> Converted:
    """Of each ranking, and of each prompt with scored completions, those with the ``top_n`` largest
    scores, to be imitated. Of equal scores the first in the file is taken.

    A prompt whose completions all have the same score is dropped. ``threshold``: the smallest score
    that is imitated, also of a prompt with a single completion; without it the completions that
    share the lowest score of a prompt are not imitated. ``mask_truncated``: leave out completions
    that are known to be truncated.
    """
    demonstrations, unused = _nothing()
    groups = _by_prompt(e for e in examples if isinstance(e, Judgement))
    for group in (*groups, *([e] for e in examples if isinstance(e, Ranking))):
        scored = sorted((answer for e in group for answer in _scored(e)), key=lambda a: -a[1])
        reasons = [_not_imitated(answer, scored, threshold, mask_truncated) for answer in scored]
        allowed = [answer for answer, reason in zip(scored, reasons, strict=True) if not reason]
        demonstrations += [_demonstration(e, completion) for completion, _, e in allowed[:top_n]]
        excluded = [(e, why) for (_, _, e), why in zip(scored, reasons, strict=True) if why]
        excluded += [
            (e, Unused.TIED_WITH_EARLIER if score == allowed[top_n - 1][1] else Unused.NOT_IN_TOP_N)
            for _, score, e in allowed[top_n:]
        ]
        unused += [(e, why) for e, why in excluded if isinstance(e, Judgement)]
        if len(excluded) == len(scored) and isinstance(group[0], Ranking):
            unused.append((group[0], excluded[0][1]))
    return demonstrations, unused


def _not_imitated(
    answer: Scored, group: Sequence[Scored], threshold: float | None, mask_truncated: bool
) -> Unused | None:
    """Why a completion must not be imitated, whatever ``top_n`` is; None if it may be."""
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
    """Answers judged up against answers judged down, for each prompt that has both.

    The shorter side is used again in turn, so every answer is in a pair. An answer judged both ways
    is in none.
    """
    made, unused = _nothing()
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
        made += [_pair(u, u.completion, d, d.completion) for u, d in rounds]
    return made, unused


def scores_to_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """The best against the worst answer of each ranking, and of each prompt with scored answers.

    ``threshold``: the smallest difference of their scores that makes a pair. Equal scores never do,
    and no margin is set.
    """
    return _paired(examples, threshold or 0.0, _best_worst, Unused.BETWEEN_BEST_AND_WORST)


def scores_to_all_pairs(examples: Sequence[Example], threshold: float | None) -> Converted:
    """Every two answers to a prompt whose scores differ, of rankings and of scored answers.

    ``threshold``: the smallest difference of their scores that makes a pair. Equal scores never do,
    and no margin is set.
    """
    return _paired(examples, threshold or 0.0, _all_pairs, Unused.WITHIN_THRESHOLD_OF_ALL)


Scored = tuple[Content, float, Judgement | Ranking]
"""An answer, its score, and the row that it is from."""


def _paired(
    examples: Sequence[Example],
    threshold: float,
    choose: Callable[[Sequence[Scored]], Iterable[tuple[Scored, Scored]]],
    left: Unused,
) -> Converted:
    """The pairs that ``choose`` finds, as far as they tell two answers apart.

    ``left``: why a row is in no pair of its group.
    """
    made, unused = _nothing()
    groups = _by_prompt(e for e in examples if isinstance(e, Judgement))
    for group in (*groups, *([e] for e in examples if isinstance(e, Ranking))):
        answers = [answer for e in group for answer in _scored(e)]
        pairs = [
            (a, b)
            for a, b in choose(answers)
            if a[0] != b[0] and a[1] > b[1] and a[1] - b[1] >= threshold
        ]
        used = {id(e) for pair in pairs for _, _, e in pair}
        reason = left if pairs else _no_pair(answers, threshold)
        unused += [(e, reason) for e in group if id(e) not in used]
        made += [_pair(up, better, down, worse) for (better, _, up), (worse, _, down) in pairs]
    return made, unused


def _best_worst(answers: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    return [(max(answers, key=lambda a: a[1]), min(answers, key=lambda a: a[1]))]


def _all_pairs(answers: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    """Every two answers, the better one first."""
    return list(combinations(sorted(answers, key=lambda a: -a[1]), 2))


def _nothing() -> Converted:
    return [], []


def _is_undecided(e: Example) -> bool:
    return isinstance(e, Preference) and e.soft is not None and e.soft <= 0.5


def _demonstration(e: Judgement | Preference | Ranking, completion: Content) -> Demonstration:
    """One of the row's answers, to be imitated."""
    return Demonstration(
        prompt=e.prompt, completion=completion, weight=e.weight, info=e.info, origin=e.origin
    )


def _answers_of(e: Example) -> list[Judgement]:
    assert isinstance(e, Ranking)
    return [
        Judgement(
            prompt=e.prompt,
            completion=completion,
            score=score,
            weight=e.weight,
            info=e.info,
            origin=e.origin,
        )
        for completion, score in zip(e.completions, e.scores, strict=True)
    ]


def _scored(e: Example) -> list[Scored]:
    if isinstance(e, Ranking):
        return [
            (completion, score, e)
            for completion, score in zip(e.completions, e.scores, strict=True)
        ]
    assert isinstance(e, Judgement)
    assert e.score is not None
    return [(e.completion, e.score, e)]


def _no_pair(answers: Sequence[Scored], threshold: float) -> Unused:
    scores = [score for _, score, _ in answers]
    if len(answers) < 2:
        return Unused.NO_OTHER_SCORED
    if max(scores) == min(scores):
        return Unused.SAME_SCORES
    if max(scores) - min(scores) < threshold:
        return Unused.DIFFERENCE_BELOW_THRESHOLD
    return Unused.SAME_ANSWER


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

    def serves(self, kind: Kind) -> bool:
        """Whether a method that reads ``kind`` can read the result."""
        return self.gives == kind or (self.gives == "judgement" and kind == "scored")


def _is_labelled(e: Example) -> bool:
    return isinstance(e, Judgement) and e.label is not None


def _is_pair(e: Example) -> bool:
    return isinstance(e, Preference)


def _is_ranking(e: Example) -> bool:
    return isinstance(e, Ranking)


def _is_scored_judgement(e: Example) -> bool:
    return isinstance(e, Judgement) and e.score is not None


def _is_scored(e: Example) -> bool:
    return _is_ranking(e) or _is_scored_judgement(e)


CONVERSIONS: dict[str, Conversion] = {
    "pairs_to_judgements": Conversion(pairs_to_judgements, _is_pair, "judgement"),
    "pairs_to_rankings": Conversion(pairs_to_rankings, _is_pair, "ranking"),
    "judgements_to_pairs": Conversion(judgements_to_pairs, _is_labelled, "preference"),
    "scores_to_judgements": Conversion(scores_to_judgements, _is_scored, "judgement", "needed"),
    "scores_to_pairs": Conversion(scores_to_pairs, _is_scored, "preference", "optional"),
    "scores_to_all_pairs": Conversion(scores_to_all_pairs, _is_scored, "preference", "optional"),
    "scores_to_rankings": Conversion(
        scores_to_rankings, lambda e: _is_labelled(e) or _is_scored_judgement(e), "ranking"
    ),
    "rankings_to_scored": Conversion(rankings_to_scored, _is_ranking, "scored"),
    "chosen_to_demonstrations": Conversion(
        chosen_to_demonstrations,
        lambda e: _is_pair(e) or _is_ranking(e) or _is_labelled(e),
        "demonstration",
    ),
    "best_to_demonstrations": Conversion(
        best_to_demonstrations, _is_scored, "demonstration", "optional"
    ),
}
