"""What is in this data: balance, lengths, what truncation costs, duplicates, contradictions,
trouble with the template.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from valence.data.encode import Encoder
from valence.data.encoded_set import (
    CHAT_PROMPT,
    CONTRADICTED,
    EQUAL_SIDES,
    TEXT_PROMPT,
    TIED_SCORES,
    AuditColumns,
    EncodedSet,
    Unusable,
    rated_content,
)
from valence.data.load import File, Loaded
from valence.data.sources import BadRow
from valence.data.tokenized_dataset import KINDS, Array, LazySequence, Origins, TokenizedDataset
from valence.statistics import quantile
from valence.types import Example, plural

T = TypeVar("T")

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
    def setting(self) -> str | None:
        """The weight that brings the ratio into the range, with its values; None when nothing needs
        to change or nothing would help.
        """
        if self.change is None or self.low is None or self.high is None:
            return None
        return f"loss.{self.change} between {_inside(self.low, self.high)}"

    @property
    def remedy(self) -> str | None:
        """The advice to change that weight; None where there is none."""
        return f"set {self.setting}" if self.setting else None

    @property
    def warning(self) -> str | None:
        """The message for someone who set these weights, or None when they are in the range."""
        products = (
            f"(loss.desirable_weight {self.desirable_weight:g} x {self.n_up} rows up) / "
            f"(loss.undesirable_weight {self.undesirable_weight:g} x {self.n_down} rows down)"
        )
        if self.ratio is None:
            return f"{products}: one side is 0, so only the other one is trained on"
        if self.remedy is None:
            return None
        return f"{products} is {self.ratio:.3g}, but should be 1 to 1.33: {self.remedy}"


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
    classes = _count_classes(units)
    up, down = classes["up"], classes["down"]
    return Audit(
        kind=units[0].kind if len(units) else None,
        units=len(units),
        classes=_ordered(classes),
        files=_files(loaded.files, encoded),
        unused=(*_unused(loaded.bad, encoded.unusable), *_not_converted(loaded)),
        prompt_length=_spread(encoded.lengths.prompts),
        answer_length=_spread(encoded.lengths.answers),
        mean_answer=_mean_answer(units),
        truncation=_truncation(encoded, encoder),
        distinct_prompts=len(np.unique(units.prompt_column("digest"))),
        distinct_answers=len(np.unique(units.answer_column("digest"))),
        findings=_findings(encoded, encoder),
        ignored_columns=dict(sorted(loaded.ignored_columns.items())),
        weights=advised_weights(up, down) if up + down else None,
    )


def overlap(train: AuditColumns, other: AuditColumns) -> dict[str, Finding]:
    """Findings for another list: its rows that are training rows too, and other rows with the
    prompt of a training row.
    """
    is_row = _is_row_of(train, other)
    has_prompt = np.isin(other.columns["prompt_id"], train.columns["prompt_id"])
    masks = {"rows_in_train": is_row, "prompts_in_train": has_prompt & ~is_row}
    return _make_findings(
        {name: other.origins.select(np.flatnonzero(mask)) for name, mask in masks.items()}
    )


def shared_rows(train: AuditColumns, other: AuditColumns) -> Origins:
    """The places of another list's rows that are training rows too."""
    return other.origins.select(np.flatnonzero(_is_row_of(train, other)))


def _is_row_of(train: AuditColumns, other: AuditColumns) -> Array:
    return np.isin(other.columns["row_id"], train.columns["row_id"])


def advised_weights(
    n_up: int, n_down: int, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> WeightAdvice:
    """What the KTO paper says about the classes' weights.

    Never raises, also when a class is empty.
    """
    up, down = desirable_weight * n_up, undesirable_weight * n_down
    counts = {
        "n_up": n_up,
        "n_down": n_down,
        "desirable_weight": desirable_weight,
        "undesirable_weight": undesirable_weight,
    }
    if up <= 0 or down <= 0:
        return WeightAdvice(**counts, ratio=None)
    ratio, (low, high) = up / down, RATIO
    if low - 1e-9 <= ratio <= high + 1e-9:
        return WeightAdvice(**counts, ratio=ratio)
    if n_up <= n_down:
        return WeightAdvice(
            **counts,
            ratio=ratio,
            change="desirable_weight",
            low=low * down / n_up,
            high=high * down / n_up,
        )
    return WeightAdvice(
        **counts,
        ratio=ratio,
        change="undesirable_weight",
        low=up / (high * n_down),
        high=up / (low * n_down),
    )


def _class(kind: int, label: int) -> str:
    """The class of a row, from its values in the columns of a TokenizedDataset."""
    if KINDS[kind] == "judgement":
        return {1: "up", 0: "down", -1: "scored"}[label]
    return plural(KINDS[kind])


def _count_classes(units: TokenizedDataset, rows: Array | slice = slice(None)) -> Counter[str]:
    """Count these rows by class, in the order in which the classes first appear."""
    pairs = np.stack([units.columns["kind"][rows], units.columns["label"][rows]], axis=1)
    values, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    classes = Counter[str]()
    for i in np.argsort(first):
        classes[_class(*values[i].tolist())] += int(counts[i])
    return classes


def _ordered(classes: Mapping[str, int]) -> dict[str, int]:
    first = [name for name in ("up", "down", "scored") if classes.get(name)]
    return {
        name: classes[name]
        for name in (*first, *sorted(n for n in classes if classes[n] and n not in first))
    }


# Rows


def _files(files: Sequence[File], encoded: EncodedSet) -> tuple[SourceCount, ...]:
    units = encoded.units
    classes = {
        units.names["files"][source]: _count_classes(units, units.columns["source"] == source)
        for source in np.unique(units.columns["source"]).tolist()
    }
    bad = Counter(u.source for u in encoded.unusable if not u.dropped)
    too_long = Counter(u.source for u in encoded.unusable if u.dropped)
    return tuple(
        SourceCount(
            path=file.path,
            format=file.format,
            rows=file.rows,
            classes=_ordered(classes.get(file.path, {})),
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
    findings = [
        UnusedSummary(
            kind=kind if isinstance(rows[0], Unusable) else "bad_row",
            reason=rows[0].reason,
            fix=rows[0].fix,
            count=len(rows),
            rows=_first(str(r.origin) for r in rows),
        )
        for kind, rows in groups.items()
    ]
    return tuple(sorted(findings, key=lambda u: -u.count))


def _not_converted(loaded: Loaded) -> tuple[UnusedSummary, ...]:
    """Rows that a conversion made nothing of, by their reason."""
    groups: dict[str, list[str]] = defaultdict(list)
    for origin, why in loaded.unused:
        groups[why].append(str(origin))
    repeated = (
        UnusedSummary(
            kind="not_converted", reason=why, fix=None, count=len(rows), rows=_first(rows)
        )
        for why, rows in groups.items()
    )
    return tuple(sorted(repeated, key=lambda u: -u.count))


def _first(rows: Iterable[str]) -> tuple[str, ...]:
    return tuple(row for row, _ in zip(rows, range(ROWS_SHOWN), strict=False))


# Lengths


def _spread(values: Array) -> Spread | None:
    if not len(values):
        return None
    ordered = np.sort(values).tolist()
    p95 = int(quantile(ordered, 0.95, is_observed=True))
    return Spread(ordered[0], statistics.median(ordered), p95, ordered[-1])


def _truncation(encoded: EncodedSet, encoder: Encoder) -> Truncation | None:
    if not len(encoded.lengths):
        return None
    longest = np.sort(encoded.lengths.longest).tolist()
    tokens, units = encoded.lengths.num_tokens, encoded.units
    without_answer = units.columns["num_answers"] == 0
    remaining = units.num_sequence_tokens.sum() + units.num_unique_tokens[without_answer].sum()
    return Truncation(
        max_length=encoder.max_length + encoder.answers,
        long_rows=encoder.long_rows,
        rows=len(longest),
        too_long=sum(n > encoder.max_length for n in longest),
        tokens=tokens,
        tokens_lost=tokens - int(remaining),
        keeps_99=int(quantile(longest, 0.99, is_observed=True)) + encoder.answers,
    )


def _mean_answer(units: TokenizedDataset) -> dict[str, float]:
    """Mean trained tokens of an answer, for classes that a loss compares."""
    trained, classes = units.answer_column("num_trained"), units.answer_classes
    lengths = {name: trained[classes == name] for name in ("up", "down", "chosen", "rejected")}
    return {
        name: int(values.sum(dtype=np.int64)) / len(values)
        for name, values in lengths.items()
        if len(values)
    }


# Findings


def _findings(encoded: EncodedSet, encoder: Encoder) -> dict[str, Finding]:
    """All findings by name. ``audit_text.py`` has their texts."""
    columns = encoded.audit_columns
    rows: dict[str, Sequence[object]] = {
        "contradictions": _Pairs(columns, _contradictions(columns), " against "),
        "duplicates": _Pairs(columns, _duplicates(columns), " = "),
        "equal_sides": columns.origins.select(columns.indices_with_flag(EQUAL_SIDES)),
        "contradicted_pairs": columns.origins.select(columns.indices_with_flag(CONTRADICTED)),
        "tied_scores": columns.origins.select(columns.indices_with_flag(TIED_SCORES)),
        "missing_attributes": _missing_attributes(encoded.units),
        **encoded.notes,
        **_ends(encoded),
    }
    if encoder.template.exists and not encoder.as_chat:
        rows["text_on_chat_model"] = columns.origins.select(columns.indices_with_flag(TEXT_PROMPT))
    return _make_findings(rows) | {name: Finding(1) for name in _dataset_findings(encoded, encoder)}


def _make_findings(rows: Mapping[str, Sequence[object]]) -> dict[str, Finding]:
    """A finding for each name that has rows. rows: their places, by name."""
    return {
        name: Finding(len(places), _first(map(str, places)))
        for name, places in rows.items()
        if places
    }


class _Pairs(LazySequence[str]):
    """The places of pairs of rows as text. separator: text between the two places."""

    def __init__(
        self, columns: AuditColumns, pairs: Sequence[tuple[int, int]], separator: str
    ) -> None:
        self._origins, self._pairs, self._separator = columns.origins, pairs, separator

    def __len__(self) -> int:
        return len(self._pairs)

    def item(self, index: int) -> str:
        a, b = self._pairs[index]
        return f"{self._origins[a]}{self._separator}{self._origins[b]}"


def _dataset_findings(encoded: EncodedSet, encoder: Encoder) -> list[str]:
    """Names of findings about the rows as a set, not about single rows."""
    names: list[str] = []
    units = encoded.units
    is_labelled = units.columns["label"] >= 0
    labels = units.columns["label"][is_labelled]
    ups = int(labels.sum(dtype=np.int64))
    if len(labels) and ups in (0, len(labels)):
        names.append("one_class")
    if (np.diff(labels) != 0).sum() == 1 and min(ups, len(labels) - ups) >= BLOCK_ROWS:
        names.append("blocks")
    means = list(_mean_answer(units).values())
    if len(means) == 2 and max(means) >= LENGTH_BIAS * min(means):
        names.append("length_bias")
    prompts = units.prompt_column("digest")[is_labelled]
    answers = units.answer_column("digest")[is_labelled[units.answer_examples]]
    if len(labels) and min(len(np.unique(prompts)), len(np.unique(answers))) < 2:
        names.append("no_mismatch")
    chat_flags = CHAT_PROMPT | (TEXT_PROMPT if encoder.as_chat else 0)
    is_dated = encoder.template.exists and "strftime_now" in encoder.template.source()
    if is_dated and len(encoded.audit_columns.indices_with_flag(chat_flags)):
        names.append("dated_template")
    return names


def _missing_attributes(units: TokenizedDataset) -> Origins:
    """Rows that have some of the attributes, but not all."""
    counts = units.columns["num_attributes"]
    num_names = len(np.unique(units.columns["attribute"]))
    return units.origins.select(np.flatnonzero((counts > 0) & (counts < num_names)))


def _duplicates(columns: AuditColumns) -> list[tuple[int, int]]:
    """Each row with the content of an earlier row, and the first row with this content."""
    _, first, inverse = np.unique(columns.columns["row_id"], return_index=True, return_inverse=True)
    first_rows = first[inverse]
    duplicates = np.flatnonzero(first_rows != np.arange(len(columns)))
    return list(zip(duplicates.tolist(), first_rows[duplicates].tolist(), strict=True))


def _contradictions(columns: AuditColumns) -> list[tuple[int, int]]:
    """The pairs that ``contradictions`` returns, as indices of examples."""
    ids, ratings = columns.columns["rated_id"], columns.columns["rating"]
    contradictory_ids = np.intersect1d(ids[ratings == 1], ids[ratings == 0])
    indices = np.flatnonzero((ratings >= 0) & np.isin(ids, contradictory_ids))
    rated = zip(ids[indices].tolist(), (ratings[indices] == 1).tolist(), strict=True)
    return _opposites(zip(indices.tolist(), rated, strict=True))


def contradictions(examples: Iterable[Example]) -> list[tuple[Example, Example]]:
    """Each example with the first one that has the opposite rating: an answer with both labels, or
    a pair with both sides preferred.
    """
    return _opposites((example, rated_content(example)) for example in examples)


def _opposites(rows: Iterable[tuple[T, tuple[Hashable, bool] | None]]) -> list[tuple[T, T]]:
    """Each row with the first one that has the opposite rating of the same content.

    rows: the rows, each with its result of ``rated_content``.
    """
    first: dict[tuple[Hashable, bool], T] = {}
    pairs: list[tuple[T, T]] = []
    for row, rated in rows:
        if rated is None:
            continue
        content, rating = rated
        first.setdefault(rated, row)
        opposite = first.get((content, not rating))
        if opposite is not None:
            pairs.append((row, opposite))
    return pairs


def _ends(encoded: EncodedSet) -> dict[str, Origins]:
    """Rows with an answer that is not truncated and that does not teach to stop, because its
    end-of-turn token is missing or outside the loss mask.
    """
    units = encoded.units
    is_truncated = np.zeros(len(units), np.bool_)
    for note in ("cut_completion", "sampling_truncated"):
        if note in encoded.notes:
            is_truncated |= units.origins.isin(encoded.notes[note])
    rows: dict[str, Origins] = {}
    for name, column in (
        ("end_of_turn_missing", "complete"),
        ("end_of_turn_unmasked", "ends_trained"),
    ):
        is_affected = np.zeros(len(units), np.bool_)
        is_affected[units.answer_examples[~units.answer_column(column)]] = True
        rows[name] = units.origins.select(np.flatnonzero(is_affected & ~is_truncated))
    return rows


def _inside(low: float, high: float) -> str:
    """A range with three digits, rounded inwards."""
    scale = 10.0 ** (2 - math.floor(math.log10(high)))
    return (
        f"{math.ceil(low * scale - 1e-9) / scale:g} and {math.floor(high * scale + 1e-9) / scale:g}"
    )
