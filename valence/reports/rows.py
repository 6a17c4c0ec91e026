"""Rows of an evaluation: what each is worth, which contradict their verdict, and which are worth
reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from valence.reports.stats import finite, mean, ranks

Json = Mapping[str, Any]

CLASSES = {True: "thumbs up", False: "thumbs down", None: "answers"}
SIDES = ("chosen", "rejected")


def value(row: Json, side: str = "") -> float | None:
    """The reward of an answer, or the (mean) score that a reward model gave it. side: ``_chosen``,
    ``_rejected``, ``_0``, ...
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
    """By how much the chosen answer of a pair is ahead."""
    chosen, rejected = value(row, "_chosen"), value(row, "_rejected")
    return None if chosen is None or rejected is None else chosen - rejected


def verdict(row: Json) -> bool | None:
    """True for thumbs up, False for down, None for a row without a thumb."""
    label = row.get("label")
    return bool(label) if isinstance(label, (bool, int)) else None


def is_pair(row: Json) -> bool:
    return "tokens_chosen" in row or "chosen" in row or "reward_chosen" in row


def is_own(row: Json) -> bool:
    """An answer of the policy itself, which a reward has judged."""
    return "stop" in row


def several(row: Json) -> list[float]:
    """The rewards of a row with several answers; nothing where one is lacking."""
    sides = takewhile(
        lambda side: f"tokens{side}" in row or f"reward{side}" in row, (f"_{n}" for n in count())
    )
    found = [value(row, side) for side in sides]
    return [each for each in found if each is not None] if None not in found else []


def worth(row: Json) -> float | None:
    """One number by which rows are sorted from worst to best: the margin of a pair, the reward of
    an answer, and of a demonstration its log-probability per token. A row with several answers has
    none.
    """
    if is_pair(row):
        return margin(row)
    found = value(row)
    return found if found is not None or verdict(row) is not None or is_own(row) else per_token(row)


def groups(rows: Iterable[Json]) -> dict[str, list[tuple[Json, str]]]:
    """Answers by class: each as its row and its side.

    Classes are the two of thumbs, the two sides of pairs, else ``answers``.
    """
    found: dict[str, list[tuple[Json, str]]] = {}
    for row in rows:
        if is_pair(row):
            sides = {name: f"_{name}" for name in SIDES}
        else:
            sides = {CLASSES[verdict(row)]: ""}
        for name, side in sides.items():
            found.setdefault(name, []).append((row, side))
    return dict(sorted(found.items(), key=lambda kv: kv[0] in ("thumbs down", "rejected")))


def rewards_by_class(rows: Iterable[Json]) -> dict[str, list[float]]:
    """Rewards of the rows' answers by class; classes without any are left out."""
    found = {name: [value(row, side) for row, side in each] for name, each in groups(rows).items()}
    held = {name: [v for v in values if v is not None] for name, values in found.items()}
    return {name: values for name, values in held.items() if values}


def source(row: Json) -> str:
    """The file that the row is from, or what the data calls it."""
    return str(row.get("source") or str(row.get("origin", "")).rpartition(":")[0] or "unknown")


# Surprise


def surprise(rows: Sequence[Json]) -> list[tuple[Json, float]]:
    """The rows with how much the model contradicts their verdict, the most surprising first; those
    that say nothing are left out.

    Thumbs: how far the reward lies on the wrong side of the midpoint between the classes' mean
    rewards (below 0: on the right side). Pairs: by how much the rejected answer is ahead. Rows with
    a ``target``, the score that the data gives: by how much of the ranking the reward's rank is
    away from the target's; with several answers, by how much the reward of one with a lower target
    is ahead of one with a higher. Demonstrations: nats per token. The policy's own answers have no
    verdict to contradict.
    """
    thumbs = [row for row in rows if verdict(row) is not None]
    scored = [
        row
        for row in rows
        if finite(row.get("target")) and verdict(row) is None and value(row) is not None
    ]
    held = _of_thumbs(thumbs) + _of_scores(scored)
    for row in rows:
        if verdict(row) is not None or finite(row.get("target")) or is_own(row):
            continue
        ahead = margin(row) if is_pair(row) else None
        if ahead is not None:
            found: float | None = -ahead
        elif isinstance(row.get("target"), list):
            found = _worst_inversion(several(row), row["target"])
        else:
            likelihood = per_token(row) if value(row) is None else None
            found = None if likelihood is None else -likelihood
        if found is not None:
            held.append((row, found))
    return sorted(held, key=lambda each: -each[1])


def _of_thumbs(rows: Sequence[Json]) -> list[tuple[Json, float]]:
    means = [
        found for values in rewards_by_class(rows).values() if (found := mean(values)) is not None
    ]
    middle = math.fsum(means) / len(means) if means else 0.0
    signed = [
        (row, reward, 1 if verdict(row) else -1)
        for row in rows
        if (reward := value(row)) is not None
    ]
    return [(row, sign * (middle - reward)) for row, reward, sign in signed]


def _of_scores(rows: Sequence[Json]) -> list[tuple[Json, float]]:
    said, given = ranks([value(row) or 0.0 for row in rows]), ranks([row["target"] for row in rows])
    return [
        (row, abs(a - b) / max(1, len(rows) - 1))
        for row, a, b in zip(rows, said, given, strict=True)
    ]


def _worst_inversion(rewards: Sequence[float], targets: Sequence[object]) -> float | None:
    if len(rewards) != len(targets) or not all(map(finite, targets)):
        return None
    both: list[tuple[float, Any]] = list(zip(rewards, targets, strict=True))
    return max(
        (low[0] - high[0] for high in both for low in both if high[1] > low[1]), default=None
    )


# Which to read


@dataclass(frozen=True)
class Listed:
    """Some rows under a heading. rows: each with the number that it is listed for. note: what that
    number is.
    """

    title: str
    note: str
    rows: list[tuple[Json, float]]


NOTES = {
    "thumbs": "Thumbs whose reward lies on the other side of the midpoint between the classes' "
    "mean rewards; the number says how "
    "far. Wrong verdicts gather here.",
    "pairs": "Pairs whose rejected answer has the larger reward; the number says by how much. "
    "Pairs that are the wrong way "
    "round gather here.",
    "targets": "Rows whose reward ranks elsewhere than the score that the data gives; the number "
    "says how far.",
    "demonstrations": "Demonstrations that the model finds least likely (nats per token).",
}


NONE = "None: the model agrees with the verdict of every row."


def listed(after: Sequence[Json], before: Sequence[Json] | None, most: int) -> list[Listed]:
    """What is worth reading of an evaluation, at most so many rows of each kind. before: the same
    rows earlier.
    """
    surprising = surprise(after)
    kind = _kind(after)
    if kind in ("thumbs", "pairs"):  # what the model agrees with is no surprise
        surprising = [each for each in surprising if each[1] > 0]
    agreed = kind in ("thumbs", "pairs") and bool(surprise(after)) and not surprising
    lists = [Listed("Most surprising", NONE if agreed else NOTES.get(kind, ""), surprising[:most])]
    if before is not None and kind != "own answers":  # which are shown beside the earlier ones
        note = (
            "Rows whose number has changed most since the first evaluation; the number says "
            "by how much."
        )
        lists.append(Listed("Most moved", note, moved(after, before)[:most]))
    known = sorted(
        ((row, found) for row in after if (found := worth(row)) is not None),
        key=lambda each: -each[1],
    )
    what = {"pairs": "margin", "demonstrations": "log-probability per token (nats)"}.get(
        kind, "reward"
    )
    # The largest reward of a thumb down is none to be glad of.
    best, worst = ("Largest reward", "Smallest reward") if kind == "thumbs" else ("Best", "Worst")
    lists.append(Listed(best, f"The largest {what}.", known[:most]))
    if kind not in ("pairs", "demonstrations"):  # whose worst rows are the most surprising ones
        lists.append(Listed(worst, f"The smallest {what}.", known[::-1][:most]))
    if kind == "own answers":
        tokens = sorted(
            ((row, row["tokens"]) for row in after if finite(row.get("tokens"))),
            key=lambda each: -each[1],
        )
        lists.append(Listed("Longest", "The most tokens.", tokens[:most]))
    return [each for each in lists if each.rows or each.note == NONE]


def _kind(rows: Sequence[Json]) -> str:
    tests: dict[str, Callable[[Json], bool]] = {
        "own answers": is_own,
        "pairs": is_pair,
        "thumbs": lambda row: verdict(row) is not None,
        "targets": lambda row: row.get("target") is not None,
        "demonstrations": lambda row: value(row) is None and per_token(row) is not None,
    }
    return next((name for name, test in tests.items() if any(map(test, rows))), "")


def moved(after: Sequence[Json], before: Sequence[Json]) -> list[tuple[Json, float]]:
    """The rows that both have with the change of what they are worth, the largest first, whichever
    way. A row with several answers moves as far as the one of them that moves most.
    """
    earlier = {row["id"]: row for row in before if isinstance(row.get("id"), str)}
    found: list[tuple[Json, float]] = []
    for row in after:
        if not isinstance(row.get("id"), str) or (old := earlier.get(row["id"])) is None:
            continue
        now, then = worth(row), worth(old)
        if now is not None and then is not None:
            found.append((row, now - then))
        elif len(ours := several(row)) == len(theirs := several(old)) > 0:
            found.append((row, max((a - b for a, b in zip(ours, theirs, strict=True)), key=abs)))
    return sorted(found, key=lambda each: -abs(each[1]))
