"""Summarize the verdicts of a judge: win rates in all and by tag, and the clearest wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from valence.evaluation.judges import FIRST, LAST, AnswerPair, PairVerdict
from valence.evaluation.win_rate import Estimate, length_controlled_rate, win_rate
from valence.statistics import wilson

NUM_CLEAREST = 5
"""Clearest wins of each side that are reported."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Win rates of the candidate on some prompts; None if no prompt has a verdict.

    controlled: controlled for the length of the answers. failed: prompts without a verdict.
    """

    rate: Estimate | None
    controlled: Estimate | None
    wins: int
    ties: int
    losses: int
    failed: int

    def to_dict(self) -> dict[str, Any]:
        estimates = {"win_rate": self.rate, "length_controlled": self.controlled}
        return {
            **{name: value and value.to_dict() for name, value in estimates.items()},
            **{name: getattr(self, name) for name in ("wins", "ties", "losses", "failed")},
        }


@dataclass(frozen=True, slots=True)
class Position:
    """How far the verdicts of a judge depend on the order of the answers.

    first: share of verdicts for the answer that is shown first, ties counted half; 0.5 is no bias.
    consistent: share of pairs with the same verdict in both orders. num_decided: pairs with two
    different answers of which the judge preferred one in both orders. num_followed: of these, pairs
    for which it preferred the answer in the same position both times.
    """

    first: float
    consistent: float
    num_decided: int
    num_followed: int

    @property
    def followed_bound(self) -> float:
        """Upper end of the 95 % interval of the share of pairs whose verdict follows the
        position. A judge that guesses has a share of 0.5.
        """
        return wilson(self.num_followed, self.num_decided)[1] if self.num_decided else 0.0


@dataclass(frozen=True, slots=True)
class JudgeSummary:
    """tags: rates by tag. clearest: the largest margins by the side that wins. error: the first
    error of the judge. position: of a judge that is shown both answers. cost: in US dollars.
    """

    judge: str
    rates: Rates
    tags: Mapping[str, Rates] = field(default_factory=dict[str, Rates])
    clearest: Mapping[str, Sequence[tuple[AnswerPair, PairVerdict]]] = field(
        default_factory=dict[str, Sequence[tuple[AnswerPair, PairVerdict]]]
    )
    error: str = ""
    position: Position | None = None
    cost: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "judge": self.judge,
            **self.rates.to_dict(),
            **({"error": self.error} if self.error else {}),
            **({"position": asdict(self.position)} if self.position else {}),
            **({"cost": self.cost} if self.cost is not None else {}),
            "tags": {tag: rates.to_dict() for tag, rates in self.tags.items()},
            "clearest": {
                side: [_example(pair, verdict) for pair, verdict in examples]
                for side, examples in self.clearest.items()
            },
        }


def summarize(
    judge: str,
    pairs: Sequence[AnswerPair],
    verdicts: Sequence[PairVerdict],
    *,
    seed: int = 0,
    cost: float | None = None,
) -> JudgeSummary:
    """verdicts: one for each pair."""
    judged = list(zip(pairs, verdicts, strict=True))
    tags = dict.fromkeys(tag for pair in pairs for tag in pair.tags)
    return JudgeSummary(
        judge=judge,
        rates=_rates(judged, seed),
        tags={
            tag: _rates([(pair, v) for pair, v in judged if tag in pair.tags], seed) for tag in tags
        },
        clearest={
            "candidate": _clearest(judged, preferred=1.0, sign=1),
            "baseline": _clearest(judged, preferred=0.0, sign=-1),
        },
        error=next((verdict.error for verdict in verdicts if verdict.preference is None), ""),
        position=position_bias(pairs, verdicts),
        cost=cost,
    )


def position_bias(pairs: Sequence[AnswerPair], verdicts: Sequence[PairVerdict]) -> Position | None:
    """None without verdicts in both orders. verdicts: one for each pair."""
    judged = [
        (pair.baseline.text != pair.candidate.text, v.parts[FIRST], v.parts[LAST])
        for pair, v in zip(pairs, verdicts, strict=True)
        if FIRST in v.parts
    ]
    if not judged:
        return None
    orders = [(first, last) for _, first, last in judged]
    decided = [(a, b) for differ, a, b in judged if differ and 0.5 not in (a, b)]
    firsts = [preference for first, last in orders for preference in (first, 1 - last)]
    consistent = sum(first == last for first, last in orders) / len(orders)
    followed = sum(first != last for first, last in decided)
    return Position(sum(firsts) / len(firsts), consistent, len(decided), followed)


def _rates(judged: Sequence[tuple[AnswerPair, PairVerdict]], seed: int) -> Rates:
    decided = [
        (v.preference, pair.length_difference) for pair, v in judged if v.preference is not None
    ]
    preferences = [preference for preference, _ in decided]
    rate = controlled = None
    if preferences:
        rate = win_rate(preferences, seed=seed)
        controlled = length_controlled_rate(preferences, [d for _, d in decided], seed=seed)
    wins, losses = sum(p > 0.5 for p in preferences), sum(p < 0.5 for p in preferences)
    return Rates(
        rate,
        controlled,
        wins=wins,
        ties=len(preferences) - wins - losses,
        losses=losses,
        failed=len(judged) - len(preferences),
    )


def _clearest(
    judged: Sequence[tuple[AnswerPair, PairVerdict]], *, preferred: float, sign: int
) -> list[tuple[AnswerPair, PairVerdict]]:
    wins = [(pair, verdict) for pair, verdict in judged if verdict.preference == preferred]
    return sorted(wins, key=lambda entry: -sign * entry[1].margin)[:NUM_CLEAREST]


def _example(pair: AnswerPair, verdict: PairVerdict) -> dict[str, Any]:
    return {
        "prompt": pair.prompt,
        "baseline": pair.baseline.text,
        "candidate": pair.candidate.text,
        "margin": verdict.margin,
    }
