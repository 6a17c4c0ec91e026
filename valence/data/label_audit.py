"""Label quality that needs no model: opposite labels for nearly the same completion, agreement
between raters, and the form of completions.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from valence.data.importers.records import Vote
from valence.data.importers.rows import votes_by_target
from valence.types import Chat, Content, Example, Judgement, content_id

SHINGLE = 3
"""Words of a shingle."""
SIMILAR = 0.8
"""Jaccard similarity of the shingles from which on two completions are near-duplicates."""


def content_text(content: Content) -> str:
    """The text of a prompt or completion, "" where only its token ids are known."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Chat):
        return ""
    texts = (message.get("content") or message.get("tool_calls") for message in content.messages)
    return "\n".join(str(text) for text in texts if text)


# Near-duplicates


@dataclass(frozen=True, slots=True)
class OppositeLabels:
    """Two rows with nearly the same completion of one prompt, the first rated up, the second down.

    similarity: Jaccard similarity of their shingles.
    """

    up: Judgement
    down: Judgement
    similarity: float


def near_duplicates(
    rows: Iterable[tuple[Judgement, str]], threshold: float = SIMILAR
) -> list[OppositeLabels]:
    """Near-duplicate completions of one prompt with opposite labels, most similar first.

    rows: with a label, each with the text of its completion. Equal completions are left out: these
    are contradictions.
    """
    by_prompt: dict[str, list[tuple[Judgement, str]]] = defaultdict(list)
    for row, text in rows:
        by_prompt[content_id(row.prompt)].append((row, text))
    pairs = [pair for rows in by_prompt.values() for pair in _similar_pairs(rows, threshold)]
    return sorted(pairs, key=lambda pair: -pair.similarity)


def _similar_pairs(
    texts: Sequence[tuple[Judgement, str]], threshold: float
) -> list[OppositeLabels]:
    """Pairs of similar completions of one prompt. Of equal completions, each is in a pair with the
    first of the others, so that many copies do not make many more pairs.

    Compares only completions that share one of their rarest shingles. Of sets with a Jaccard
    similarity of at least t, each shares one of its ``n - ceil(t * n) + 1`` rarest with the other's
    (Chaudhuri et al. 2006).
    """
    if len({row.label for row, _ in texts}) < 2:
        return []
    copies: dict[str, tuple[str, dict[bool, list[Judgement]]]] = {}
    for row, text in texts:
        _, by_label = copies.setdefault(content_id(row.completion), (text, {True: [], False: []}))
        by_label[bool(row.label)].append(row)
    rows = [by_label for _, by_label in copies.values()]
    shingles = [_shingles(text) for text, _ in copies.values()]
    counts = Counter(shingle for group in shingles for shingle in group)
    downs: dict[str, list[int]] = defaultdict(list)
    rarest: list[list[str]] = []
    for i, group in enumerate(shingles):
        # 1e-9: 0.8 * 5 is not more than 4
        size = len(group) - int(-(-(threshold * len(group) - 1e-9) // 1)) + 1
        rarest.append(
            sorted(group, key=lambda shingle: (counts[shingle], shingle))[:size] if group else []
        )
        for shingle in rarest[i] if rows[i][False] else ():
            downs[shingle].append(i)
    pairs: list[OppositeLabels] = []
    for i, by_label in enumerate(rows):
        ups = by_label[True]
        for j in sorted({j for shingle in rarest[i] for j in downs[shingle]} - {i} if ups else ()):
            shared = len(shingles[i] & shingles[j])
            similarity = shared / (len(shingles[i]) + len(shingles[j]) - shared)
            if similarity >= threshold:
                first, *others = rows[j][False]
                pairs += [OppositeLabels(up, first, similarity) for up in ups]
                pairs += [OppositeLabels(ups[0], down, similarity) for down in others]
    return pairs


def _shingles(text: str) -> set[str]:
    words = re.findall(r"\w+|[^\w\s]", text.casefold())
    size = min(SHINGLE, len(words))
    return {" ".join(words[i : i + size]) for i in range(len(words) - size + 1)} if words else set()


# Agreement between raters


@dataclass(frozen=True, slots=True)
class RaterVerdict:
    """The verdict of one rater on one completion or comparison, the target."""

    target: str
    rater: str
    verdict: str


@dataclass(frozen=True, slots=True)
class RaterDisagreement:
    """pairs: of a rating of this rater and one of another rater on the same target.
    disagreement: the share of these that differ.
    """

    rater: str
    ratings: int
    pairs: int
    disagreement: float


@dataclass(frozen=True, slots=True)
class RaterAgreement:
    """targets: that several raters rated. alpha: Krippendorff's alpha for nominal data, None where
    all verdicts are the same. raters: those who disagree most with the others come first.
    """

    targets: int
    ratings: int
    alpha: float | None
    disagreement: float
    raters: tuple[RaterDisagreement, ...]


def ratings_of_votes(votes: Iterable[Vote]) -> list[RaterVerdict]:
    """The ratings of known raters, one for each rater and target."""
    return [
        RaterVerdict(target, f"{vote.source}/{vote.rater_hash}", verdict)
        for target, group in votes_by_target(votes).items()
        for vote, verdict in group
        if vote.rater
    ]


def ratings_of_rows(examples: Iterable[Example]) -> list[RaterVerdict]:
    """The ratings of rows that name their only rater, in ``info.rater`` or ``info.raters``."""
    ratings: dict[tuple[str, str], RaterVerdict] = {}
    for example in examples:
        raters = example.info.get("raters") or example.info.get("rater")
        names = list(raters) if isinstance(raters, list | tuple) else [raters]
        if isinstance(example, Judgement) and example.label is not None and len(names) == 1:
            target = content_id(example.prompt, example.completion)
            verdict = "up" if example.label else "down"
            if names[0] is not None:
                ratings[target, str(names[0])] = RaterVerdict(target, str(names[0]), verdict)
    return list(ratings.values())


def rater_agreement(ratings: Iterable[RaterVerdict]) -> RaterAgreement | None:
    """How far raters of the same targets agree; None where no target has several ratings.

    Alpha is ``1 - observed / expected`` disagreement (Krippendorff 2018, Content Analysis, ch. 12).
    Each of the m ratings of a target is compared with the m - 1 others, and each comparison counts
    ``1 / (m - 1)``; the expected disagreement is that of all ratings compared with each other.
    """
    groups: dict[str, list[RaterVerdict]] = defaultdict(list)
    for rating in ratings:
        groups[rating.target].append(rating)
    shared = [group for group in groups.values() if len(group) > 1]
    if not shared:
        return None
    counts = Counter(rating.verdict for group in shared for rating in group)
    total = sum(counts.values())
    observed = 0.0
    pairs, differing, num_ratings = Counter[str](), Counter[str](), Counter[str]()
    for group in shared:
        num_ratings.update(rating.rater for rating in group)
        for a, b in combinations(group, 2):
            pairs.update((a.rater, b.rater))
            if a.verdict != b.verdict:
                differing.update((a.rater, b.rater))
                observed += 2 / (len(group) - 1) / total
    expected = 1 - sum(n * (n - 1) for n in counts.values()) / (total * (total - 1))
    raters = [
        RaterDisagreement(name, num_ratings[name], pairs[name], differing[name] / pairs[name])
        for name in pairs
    ]
    return RaterAgreement(
        targets=len(shared),
        ratings=total,
        alpha=1 - observed / expected if expected > 0 else None,
        disagreement=differing.total() / pairs.total(),
        raters=tuple(sorted(raters, key=lambda rater: (-rater.disagreement, rater.rater))),
    )
