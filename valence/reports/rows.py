"""Rows of an evaluation: their rewards, those that contradict their labels, and those worth
reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from valence.statistics import finite, mean, quantile, ranks

Json = Mapping[str, Any]
Scored = tuple[Json, float]
"""A row with the number that it is sorted by."""

CLASSES = {True: "thumbs up", False: "thumbs down", None: "answers"}
SIDES = ("chosen", "rejected")

OUTER = (0.1, 0.9)
"""The quantiles of an evaluation's rows between which a band is drawn."""


WEAK_SIGNAL = 0.02
"""Nats per token: a completion of 50 tokens becomes at most 2.7 times as likely, or as unlikely."""


def value(row: Json, side: str = "") -> float | None:
    """The reward of an answer, or the (mean) score of a reward model.

    side: ``_chosen``, ``_rejected``, ``_0``, ...
    """
    if finite(reward := row.get(f"reward{side}")):
        return reward
    scores = row.get(f"scores{side}")
    return mean(filter(finite, scores)) if isinstance(scores, list) else None


def per_token(row: Json, side: str = "") -> float | None:
    """Mean log-probability of an answer's tokens (nats)."""
    logp, tokens = row.get(f"logp{side}"), row.get(f"tokens{side}")
    return logp / tokens if finite(logp) and finite(tokens) and tokens > 0 else None


def margin(row: Json) -> float | None:
    """The reward of the chosen answer of a pair minus that of the rejected one."""
    chosen, rejected = value(row, "_chosen"), value(row, "_rejected")
    return None if chosen is None or rejected is None else chosen - rejected


def verdict(row: Json) -> bool | None:
    """True for thumbs up, False for down, None for a row without a thumb."""
    label = row.get("label")
    return bool(label) if isinstance(label, (bool, int)) else None


def is_pair(row: Json) -> bool:
    return "tokens_chosen" in row or "chosen" in row or "reward_chosen" in row


def is_rollout(row: Json) -> bool:
    """Whether the row has a completion that the policy sampled and a reward scored."""
    return "stop" in row


def has_signals(evaluation: Json | None) -> bool:
    """Whether the rewards of an evaluation are signals of a teacher: log p_teacher - log p (nats),
    the mean over the tokens of a completion.
    """
    return evaluation is not None and "signal/mean" in evaluation.get("metrics", {})


def is_weak(signal: float) -> bool:
    """Whether a signal is so small that the feedback says nothing about the completion."""
    return abs(signal) < WEAK_SIGNAL


def several(row: Json) -> list[float]:
    """The rewards of a row with several answers; empty if one is missing."""
    sides = takewhile(
        lambda side: f"tokens{side}" in row or f"reward{side}" in row, (f"_{n}" for n in count())
    )
    rewards = [value(row, side) for side in sides]
    return [r for r in rewards if r is not None] if None not in rewards else []


def worth(row: Json) -> float | None:
    """The number that orders rows from worst to best: the margin of a pair, the reward of an
    answer, the log-probability per token of a demonstration. None for a row with several answers.
    """
    if is_pair(row):
        return margin(row)
    reward = value(row)
    is_scored = reward is not None or verdict(row) is not None or is_rollout(row)
    return reward if is_scored else per_token(row)


def groups(rows: Iterable[Json]) -> dict[str, list[tuple[Json, str]]]:
    """Answers by class, each as its row and its side.

    Classes are the two of thumbs, the two sides of pairs, or ``answers``.
    """
    answers: dict[str, list[tuple[Json, str]]] = {}
    for row in rows:
        sides = (
            {name: f"_{name}" for name in SIDES} if is_pair(row) else {CLASSES[verdict(row)]: ""}
        )
        for name, side in sides.items():
            answers.setdefault(name, []).append((row, side))
    return dict(sorted(answers.items(), key=lambda item: item[0] in ("thumbs down", "rejected")))


def rewards_by_class(rows: Iterable[Json]) -> dict[str, list[float]]:
    """Rewards of the rows' answers by class, without empty classes."""
    rewards = {
        name: [reward for row, side in answers if (reward := value(row, side)) is not None]
        for name, answers in groups(rows).items()
    }
    return {name: values for name, values in rewards.items() if values}


def source(row: Json) -> str:
    """The file of the row, or its name in the data."""
    return str(row.get("source") or str(row.get("origin", "")).rpartition(":")[0] or "unknown")


def bands_of(rows: Sequence[Json]) -> dict[str, tuple[float, float]]:
    """The outer quantiles of the rows' rewards, by the metric's word for their class."""
    words = {"thumbs up": "chosen", "thumbs down": "rejected"}
    rewards = {words.get(name, name): values for name, values in rewards_by_class(rows).items()}
    rewards["margins"] = [m for row in rows if (m := margin(row)) is not None]
    return {
        name: (quantile(values, OUTER[0]), quantile(values, OUTER[1]))
        for name, values in rewards.items()
        if values
    }


# Surprise


def surprise(rows: Sequence[Json]) -> list[Scored]:
    """The rows with how much the model contradicts their labels, the most surprising first; rows
    without information are left out.

    Thumbs: how far the reward lies on the wrong side of the midpoint between the classes' mean
    rewards (below 0: on the right side). Pairs: by how much the rejected answer is ahead. Rows with
    a ``target``, the score of the data: the distance between the ranks of reward and target, as a
    share of all ranks; with several answers, by how much an answer with a lower target is ahead of
    one with a higher target. Demonstrations: nats per token. Completions of the policy have no
    label to contradict.
    """
    thumbs = [row for row in rows if verdict(row) is not None]
    targets = [
        row
        for row in rows
        if finite(row.get("target")) and verdict(row) is None and value(row) is not None
    ]
    scored = _surprise_of_thumbs(thumbs) + _surprise_of_targets(targets)
    for row in rows:
        if verdict(row) is not None or finite(row.get("target")) or is_rollout(row):
            continue
        ahead = margin(row) if is_pair(row) else None
        if ahead is not None:
            score: float | None = -ahead
        elif isinstance(row.get("target"), list):
            score = _worst_inversion(several(row), row["target"])
        else:
            logp = per_token(row) if value(row) is None else None
            score = None if logp is None else -logp
        if score is not None:
            scored.append((row, score))
    return _largest_first(scored)


def _largest_first(rows: Iterable[Scored]) -> list[Scored]:
    return sorted(rows, key=lambda scored: -scored[1])


def _surprise_of_thumbs(rows: Sequence[Json]) -> list[Scored]:
    means = [math.fsum(values) / len(values) for values in rewards_by_class(rows).values()]
    middle = math.fsum(means) / len(means) if means else 0.0
    return [
        (row, (middle - reward) * (1 if verdict(row) else -1))
        for row in rows
        if (reward := value(row)) is not None
    ]


def _surprise_of_targets(rows: Sequence[Json]) -> list[Scored]:
    rewards = ranks([value(row) or 0.0 for row in rows])
    targets = ranks([row["target"] for row in rows])
    return [
        (row, abs(a - b) / max(1, len(rows) - 1))
        for row, a, b in zip(rows, rewards, targets, strict=True)
    ]


def _worst_inversion(rewards: Sequence[float], targets: Sequence[object]) -> float | None:
    if len(rewards) != len(targets) or not all(map(finite, targets)):
        return None
    pairs: list[tuple[float, Any]] = list(zip(rewards, targets, strict=True))
    return max(
        (low[0] - high[0] for high in pairs for low in pairs if high[1] > low[1]), default=None
    )


# Rows worth reading


@dataclass(frozen=True)
class RowList:
    """Some rows with the number that each is listed for, which ``note`` explains."""

    title: str
    note: str
    rows: list[Scored]


NOTES = {
    "thumbs": "Thumbs whose reward lies on the wrong side of the midpoint between the classes' "
    "mean rewards; the number is the distance. Wrong labels are often among these.",
    "pairs": "Pairs whose rejected answer has the larger reward; the number is the difference. "
    "Swapped pairs are often among these.",
    "targets": "Rows whose reward ranks differently from the score of the data; the number is the "
    "distance.",
    "demonstrations": "Demonstrations that the model finds least likely (nats per token).",
}
NONE = "None. The model agrees with all labels."


def row_lists(after: Sequence[Json], before: Sequence[Json] | None, limit: int) -> list[RowList]:
    """The rows of an evaluation that are worth reading, at most ``limit`` of each list.

    before: the rows of an earlier evaluation.
    """
    kind, surprising = _kind(after), surprise(after)
    has_labels = kind in ("thumbs", "pairs")
    contradicting = [s for s in surprising if s[1] > 0] if has_labels else surprising
    agrees = has_labels and bool(surprising) and not contradicting
    note = NONE if agrees else NOTES.get(kind, "")
    lists = [RowList("Most surprising", note, contradicting[:limit])]
    if before is not None and kind != "rollouts":  # which are shown next to the earlier ones
        note = "Rows with the largest change of their number since the first evaluation."
        lists.append(RowList("Most moved", note, moved(after, before)[:limit]))
    known = _largest_first((row, w) for row in after if (w := worth(row)) is not None)
    number = {"pairs": "margin", "demonstrations": "log-probability per token (nats)"}.get(
        kind, "reward"
    )
    # the largest reward of a thumb down is not its best
    best, worst = ("Largest reward", "Smallest reward") if kind == "thumbs" else ("Best", "Worst")
    lists.append(RowList(best, f"The largest {number}.", known[:limit]))
    if kind not in ("pairs", "demonstrations"):  # whose worst rows are the most surprising ones
        lists.append(RowList(worst, f"The smallest {number}.", known[::-1][:limit]))
    if kind == "rollouts":
        longest = _largest_first((r, r["tokens"]) for r in after if finite(r.get("tokens")))
        lists.append(RowList("Longest", "The most tokens.", longest[:limit]))
    return [group for group in lists if group.rows or group.note == NONE]


def signal_lists(
    after: Sequence[Json], before: Sequence[Json] | None, limit: int, *, has_feedback: bool = True
) -> list[RowList]:
    """The rows of a method with a teacher that are worth reading, at most ``limit`` of each list,
    by their signal in the earlier evaluation ``before``, if there is one.

    has_feedback: whether the teacher reads feedback.
    """
    earlier = {row.get("id"): value(row) for row in before or ()}
    signals = _largest_first(
        (row, signal)
        for row in after
        if (signal := earlier.get(row.get("id"), value(row))) is not None
    )
    when = " in the first evaluation" if before is not None else ""
    compared = "after their feedback" if has_feedback else "compared with the model"
    weakest = sorted(signals, key=lambda scored: abs(scored[1]))
    lists = [
        RowList(
            "Smallest signal",
            f"Answers that the teacher finds least likely {compared} (nats per token){when}.",
            [scored for scored in signals[::-1] if scored[1] < 0][:limit],
        ),
        RowList(
            "Largest signal",
            f"Answers that the teacher finds most likely {compared} (nats per token){when}.",
            [scored for scored in signals if scored[1] > 0][:limit],
        ),
    ]
    if has_feedback:
        note = (
            f"Rows whose signal is below {WEAK_SIGNAL:g} nats per token{when}: the feedback is "
            "about something else, or the model cannot use it."
        )
        weak = [scored for scored in weakest if is_weak(scored[1])][:limit]
        lists.append(RowList("Feedback that says nothing", note, weak))
    if before is not None:
        note = "Rows with the largest change of their signal since the first evaluation."
        lists.append(RowList("Most moved", note, moved(after, before)[:limit]))
    return [group for group in lists if group.rows]


def _kind(rows: Sequence[Json]) -> str:
    tests: dict[str, Callable[[Json], bool]] = {
        "rollouts": is_rollout,
        "pairs": is_pair,
        "thumbs": lambda row: verdict(row) is not None,
        "targets": lambda row: row.get("target") is not None,
        "demonstrations": lambda row: value(row) is None and per_token(row) is not None,
    }
    return next((name for name, test in tests.items() if any(map(test, rows))), "")


def moved(after: Sequence[Json], before: Sequence[Json]) -> list[Scored]:
    """The rows of both evaluations with the change of their worth, the largest change in either
    direction first. A row with several answers moves as far as its answer that moves most.
    """
    earlier = {row["id"]: row for row in before if isinstance(row.get("id"), str)}
    changes: list[Scored] = []
    for row in after:
        if not isinstance(row.get("id"), str) or (old := earlier.get(row["id"])) is None:
            continue
        now, then = worth(row), worth(old)
        if now is not None and then is not None:
            changes.append((row, now - then))
        elif len(new_rewards := several(row)) == len(old_rewards := several(old)) > 0:
            pairs = zip(new_rewards, old_rewards, strict=True)
            changes.append((row, max((a - b for a, b in pairs), key=abs)))
    return sorted(changes, key=lambda scored: -abs(scored[1]))
