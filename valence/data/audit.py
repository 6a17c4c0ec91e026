"""What is in this data: balance, lengths, what truncation costs, duplicates, contradictions,
trouble with the template.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from valence.data.encode import EncodedSet, Encoder, Unusable
from valence.data.load import File, Loaded
from valence.data.sources import BadRow
from valence.types import (
    Chat,
    Example,
    Judgement,
    Preference,
    Ranking,
    TokenizedExample,
    content_id,
)

ROWS_SHOWN = 5
"""Rows that are named for each finding."""

RATIO = (1.0, 4 / 3)
"""Range that the KTO paper (arXiv 2402.01306) advises for the weighted ratio of the classes."""

LENGTH_BIAS = 1.2
"""The classes' mean lengths differ by this factor or more: length alone tells them apart to some
degree.
"""

BLOCK_ROWS = 8
"""Fewer rows than this in one class after the other are no sign of anything."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Smallest, median, 95th percentile and largest of some numbers of tokens."""

    min: int
    median: float
    p95: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCount:
    """One file: rows read, units made of them by class, and rows that were not used.

    A converted row may make several. ``notes``: how the file was read, where that had to be
    decided.
    """

    path: str
    format: str | None
    rows: int
    classes: Mapping[str, int]
    bad: int
    too_long: int
    not_converted: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSummary:
    """Rows that became no unit for one kind of reason; ``reason`` and ``fix`` are those of the
    first of them.
    """

    kind: str
    reason: str
    fix: str | None
    count: int
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """How often, and where first. ``rows`` is empty for what the data as a whole shows."""

    count: int
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What ``max_length`` costs: rows longer than it, tokens of all rows, tokens that are not
    trained on because of it. ``keeps_99``: the max_length that would leave 99 % of the rows whole.
    """

    max_length: int
    long_rows: str
    rows: int
    too_long: int
    tokens: int
    tokens_lost: int
    keeps_99: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAdvice:
    """``ratio``: (desirable_weight * n_up) / (undesirable_weight * n_down), or None when a side is
    0.

    ``change``, ``low``, ``high``: the smaller class's weight, and between what it would bring the
    ratio into the range that the KTO paper advises; None when the ratio is in it, or there is none.
    """

    n_up: int
    n_down: int
    desirable_weight: float
    undesirable_weight: float
    ratio: float | None
    change: Literal["desirable_weight", "undesirable_weight"] | None = None
    low: float | None = None
    high: float | None = None

    @property
    def remedy(self) -> str | None:
        """Which weight to set to what, or None when nothing needs to change or nothing would
        help.
        """
        if self.change is None or self.low is None or self.high is None:
            return None
        return f"set loss.{self.change} between {_inside(self.low, self.high)}"

    @property
    def warning(self) -> str | None:
        """What to tell someone who set these weights, or None when they are in the range."""
        counts = f"{self.n_up} rows up and {self.n_down} down"
        if self.ratio is None:
            return (
                f"{counts}, with weights {self.desirable_weight:g} and "
                f"{self.undesirable_weight:g}: one side is 0"
            )
        if self.remedy is None:
            return None
        return (
            f"{counts}: (desirable_weight {self.desirable_weight:g} x {self.n_up}) / "
            f"(undesirable_weight "
            f"{self.undesirable_weight:g} x {self.n_down}) is {self.ratio:.3g}, and 1 to 1.33 is "
            f"advised: {self.remedy}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Counts are of units of training (a pair is one), ``files`` and ``unused`` of rows as well.

    Lengths are in tokens.

    Absent is None or left out, never 0: an audit without judgements has no ``weights``.
    """

    kind: str | None
    units: int
    classes: Mapping[str, int]
    files: tuple[SourceCount, ...]
    unused: tuple[UnusedSummary, ...]
    prompt_length: Spread | None
    answer_length: Spread | None
    mean_answer: Mapping[str, float]
    truncation: Truncation | None
    distinct_prompts: int
    distinct_answers: int
    findings: Mapping[str, Finding]
    ignored_columns: Mapping[str, int]
    weights: WeightAdvice | None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings in a fixed order, for audit.json."""
        return asdict(self)


def audit(loaded: Loaded, encoded: EncodedSet, encoder: Encoder) -> Audit:
    """Looks at rows that were loaded and encoded; changes nothing and refuses nothing."""
    units = encoded.units
    classes = Counter(_class(u) for u in units)
    prompts = [length.prompt for length in encoded.lengths]
    answers = [n for length in encoded.lengths for n in length.answers]
    up, down = classes["up"], classes["down"]
    return Audit(
        kind=units[0].kind if units else None,
        units=len(units),
        classes=_ordered(classes),
        files=_files(loaded.files, encoded),
        unused=(*_unused(loaded.bad, encoded.unusable), *_not_converted(loaded)),
        prompt_length=_spread(prompts),
        answer_length=_spread(answers),
        mean_answer=_mean_answer(units),
        truncation=_truncation(encoded, encoder),
        distinct_prompts=len({u.prompt_ids for u in units}),
        distinct_answers=len({a.ids for u in units for a in u.answers}),
        findings=_findings(loaded.examples, encoded, encoder),
        ignored_columns=dict(sorted(loaded.ignored_columns.items())),
        weights=advised_weights(up, down) if up + down else None,
    )


def overlap(train: Sequence[Example], other: Sequence[Example]) -> dict[str, Finding]:
    """Rows of another list that are training rows too, and those that share only their prompt with
    one. Findings of that list.
    """
    ids = {e.id for e in train}
    prompts = {content_id(e.prompt) for e in train}
    rows = {
        "rows_in_train": [str(e.origin) for e in other if e.id in ids],
        "prompts_in_train": [
            str(e.origin) for e in other if e.id not in ids and content_id(e.prompt) in prompts
        ],
    }
    return _found(rows)


def advised_weights(
    n_up: int, n_down: int, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> WeightAdvice:
    """What the KTO paper says about the classes' weights.

    Never raises, also when a class is empty.
    """
    up, down = desirable_weight * n_up, undesirable_weight * n_down
    given = {
        "n_up": n_up,
        "n_down": n_down,
        "desirable_weight": desirable_weight,
        "undesirable_weight": undesirable_weight,
    }
    if up <= 0 or down <= 0:
        return WeightAdvice(**given, ratio=None)
    ratio, (low, high) = up / down, RATIO
    if low - 1e-9 <= ratio <= high + 1e-9:
        return WeightAdvice(**given, ratio=ratio)
    if n_up <= n_down:
        return WeightAdvice(
            **given,
            ratio=ratio,
            change="desirable_weight",
            low=low * down / n_up,
            high=high * down / n_up,
        )
    return WeightAdvice(
        **given,
        ratio=ratio,
        change="undesirable_weight",
        low=up / (high * n_down),
        high=up / (low * n_down),
    )


def _class(unit: TokenizedExample) -> str:
    if unit.kind == "judgement":
        return {True: "up", False: "down", None: "scored"}[unit.label]
    return f"{unit.kind}s"


def _ordered(classes: Mapping[str, int]) -> dict[str, int]:
    first = [name for name in ("up", "down", "scored") if classes.get(name)]
    return {
        name: classes[name]
        for name in (*first, *sorted(n for n in classes if classes[n] and n not in first))
    }


# Rows


def _files(files: Sequence[File], encoded: EncodedSet) -> tuple[SourceCount, ...]:
    classes: dict[str, Counter[str]] = defaultdict(Counter)
    for unit in encoded.units:
        classes[unit.source][_class(unit)] += 1
    bad = Counter(u.source for u in encoded.unusable if not u.dropped)
    too_long = Counter(u.source for u in encoded.unusable if u.dropped)
    return tuple(
        SourceCount(
            path=file.path,
            format=file.format,
            rows=file.rows,
            classes=_ordered(classes[file.path]),
            bad=file.bad + bad[file.path],
            too_long=too_long[file.path],
            not_converted=sum(file.unused.values()),
            notes=file.notes,
        )
        for file in files
    )


def _unused(bad: Sequence[BadRow], unusable: Sequence[Unusable]) -> tuple[UnusedSummary, ...]:
    """Most frequent first.

    Rows refused while loading go by their reason, the others by their kind.
    """
    groups: dict[str, list[BadRow | Unusable]] = defaultdict(list)
    for row in (*bad, *unusable):
        groups[row.kind if isinstance(row, Unusable) else row.reason].append(row)
    found = [
        UnusedSummary(
            kind=kind if isinstance(rows[0], Unusable) else "bad_row",
            reason=rows[0].reason,
            fix=rows[0].fix,
            count=len(rows),
            rows=_first(str(r.origin) for r in rows),
        )
        for kind, rows in groups.items()
    ]
    return tuple(sorted(found, key=lambda u: -u.count))


def _not_converted(loaded: Loaded) -> tuple[UnusedSummary, ...]:
    """Rows that a conversion made nothing of, by their reason."""
    groups: dict[str, list[str]] = defaultdict(list)
    for origin, why in loaded.unused:
        groups[why].append(str(origin))
    found = (
        UnusedSummary(
            kind="not_converted", reason=why, fix=None, count=len(rows), rows=_first(rows)
        )
        for why, rows in groups.items()
    )
    return tuple(sorted(found, key=lambda u: -u.count))


def _first(rows: Iterable[str]) -> tuple[str, ...]:
    return tuple(row for row, _ in zip(rows, range(ROWS_SHOWN), strict=False))


# Lengths


def _rank(ordered: Sequence[int], share: float) -> int:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def _spread(values: Sequence[int]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    return Spread(ordered[0], statistics.median(ordered), _rank(ordered, 0.95), ordered[-1])


def _truncation(encoded: EncodedSet, encoder: Encoder) -> Truncation | None:
    if not encoded.lengths:
        return None
    longest = sorted(length.longest for length in encoded.lengths)
    tokens = sum(
        length.prompt * max(1, len(length.answers)) + sum(length.answers)
        for length in encoded.lengths
    )
    kept = sum(
        len(u.prompt_ids) * max(1, len(u.answers)) + sum(len(a.ids) for a in u.answers)
        for u in encoded.units
    )
    return Truncation(
        max_length=encoder.max_length + encoder.answers,
        long_rows=encoder.long_rows,
        rows=len(longest),
        too_long=sum(n > encoder.max_length for n in longest),
        tokens=tokens,
        tokens_lost=tokens - kept,
        keeps_99=_rank(longest, 0.99) + encoder.answers,
    )


def _mean_answer(units: Sequence[TokenizedExample]) -> dict[str, float]:
    """Mean tokens of an answer as it is trained on, for classes that are set against each other."""
    lengths: dict[str, list[int]] = {"up": [], "down": [], "chosen": [], "rejected": []}
    for unit in units:
        if unit.kind == "judgement" and unit.label is not None:
            lengths["up" if unit.label else "down"].append(sum(unit.answers[0].mask))
        elif unit.kind == "preference":
            for side, answer in zip(("chosen", "rejected"), unit.answers, strict=True):
                lengths[side].append(sum(answer.mask))
    return {name: statistics.fmean(values) for name, values in lengths.items() if values}


# Findings


def _findings(
    examples: Sequence[Example], encoded: EncodedSet, encoder: Encoder
) -> dict[str, Finding]:
    """Only what was found, by name (``audit_text.py`` says what each means)."""
    units = encoded.units
    rows: dict[str, Sequence[str]] = {
        "contradictions": [f"{a.origin} against {b.origin}" for a, b in contradictions(examples)],
        "duplicates": _duplicates(examples),
        "equal_sides": [
            str(e.origin) for e in examples if isinstance(e, Preference) and e.chosen == e.rejected
        ],
        "tied_scores": [
            str(e.origin) for e in examples if isinstance(e, Ranking) and len(set(e.scores)) == 1
        ],
        "missing_attributes": _missing_attributes(units),
        **{name: [str(o) for o in origins] for name, origins in encoded.notes.items()},
        **_ends(encoded),
    }
    if encoder.template.exists and not encoder.as_chat:
        rows["text_on_chat_model"] = [str(e.origin) for e in examples if isinstance(e.prompt, str)]
    return _found(rows) | {name: Finding(1) for name in _of_the_whole(examples, units, encoder)}


def _found(rows: Mapping[str, Sequence[str]]) -> dict[str, Finding]:
    return {name: Finding(len(where), _first(where)) for name, where in rows.items() if where}


def _of_the_whole(
    examples: Sequence[Example], units: Sequence[TokenizedExample], encoder: Encoder
) -> list[str]:
    """Names of what no single row shows."""
    found: list[str] = []
    labels = [u.label for u in units if u.label is not None]
    changes = sum(a != b for a, b in pairwise(labels))
    if labels and len(set(labels)) == 1:
        found.append("one_class")
    if changes == 1 and min(labels.count(True), labels.count(False)) >= BLOCK_ROWS:
        found.append("blocks")
    means = list(_mean_answer(units).values())
    if len(means) == 2 and max(means) >= LENGTH_BIAS * min(means):
        found.append("length_bias")
    judged = [u for u in units if u.label is not None]
    if judged and (
        len({u.prompt_ids for u in judged}) < 2 or len({u.answers[0].ids for u in judged}) < 2
    ):
        found.append("no_mismatch")
    chats = any(
        isinstance(e.prompt, Chat) or (encoder.as_chat and isinstance(e.prompt, str))
        for e in examples
    )
    if chats and encoder.template.exists and "strftime_now" in encoder.template.source():
        found.append("dated_template")
    return found


def _missing_attributes(units: Sequence[TokenizedExample]) -> list[str]:
    """Rows with some attributes that lack one which others have."""
    names = {name for u in units for name, _ in u.attributes}
    return [str(u.origin) for u in units if u.attributes and len(u.attributes) < len(names)]


def _duplicates(examples: Sequence[Example]) -> list[str]:
    """Each further row with the content of an earlier one."""
    first: dict[str, Example] = {}
    found: list[str] = []
    for example in examples:
        earlier = first.setdefault(example.id, example)
        if earlier is not example:
            found.append(f"{example.origin} = {earlier.origin}")
    return found


def contradictions(examples: Iterable[Example]) -> list[tuple[Example, Example]]:
    """Each example with the first one that says the opposite: an answer judged up here and down
    there, or a pair preferred both ways.
    """
    first: dict[tuple[str, bool], Example] = {}
    found: list[tuple[Example, Example]] = []
    for example in examples:
        verdict = _verdict(example)
        if verdict is None:
            continue
        first.setdefault(verdict, example)
        other = first.get((verdict[0], not verdict[1]))
        if other is not None:
            found.append((example, other))
    return found


def _verdict(example: Example) -> tuple[str, bool] | None:
    """What was judged, and which way."""
    if isinstance(example, Judgement) and example.label is not None:
        return content_id(example.prompt, example.completion), example.label
    if (
        isinstance(example, Preference)
        and example.chosen != example.rejected
        and example.soft != 0.5
    ):
        chosen, rejected = content_id(example.chosen), content_id(example.rejected)
        better = (chosen < rejected) is (example.soft is None or example.soft > 0.5)
        return content_id(example.prompt, *sorted((chosen, rejected))), better
    return None


def _ends(encoded: EncodedSet) -> dict[str, list[str]]:
    """Whole answers without an end-of-turn token, and end-of-turn tokens outside the mask: neither
    teaches to stop.
    """
    cut = set(encoded.notes.get("cut_completion", ()))
    whole = [u for u in encoded.units if u.origin not in cut]
    return {
        "end_of_turn_missing": [
            str(u.origin) for u in whole if not all(a.complete for a in u.answers)
        ],
        "end_of_turn_unmasked": [
            str(u.origin) for u in whole if not all(a.mask[-1] for a in u.answers)
        ],
    }


def _inside(low: float, high: float) -> str:
    """A range with three digits, rounded inwards."""
    scale = 10.0 ** (2 - math.floor(math.log10(high)))
    return (
        f"{math.ceil(low * scale - 1e-9) / scale:g} and {math.floor(high * scale + 1e-9) / scale:g}"
    )
