"""Label quality of rated rows: contradictions, agreement of raters, labels that the form of a
completion gives away, and labels that a model's hidden states contradict. Of all rows: personal
data, and feedback as text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from valence.batching.micro_batches import StepPacker
from valence.config.load import LISTS, LoadedRecipe
from valence.config.schema import SourceSettings
from valence.data import values
from valence.data.audit import contradictions
from valence.data.audit_words import (
    FeedbackTexts,
    PersonalData,
    RowTexts,
    audit_feedback,
    personal_data,
    texts_of,
)
from valence.data.encode import Encoder
from valence.data.formats import lookup
from valence.data.importers.records import ReadOptions, Vote
from valence.data.importers.rows import ROW_KINDS, latest_votes
from valence.data.importers.sources import is_source, read_votes
from valence.data.label_audit import (
    OppositeLabels,
    RaterAgreement,
    content_text,
    near_duplicates,
    rater_agreement,
    ratings_of_rows,
    ratings_of_votes,
)
from valence.data.load import DataFile, columns_of, read_together, recognize, stream
from valence.data.sources import BadRow, Row
from valence.errors import UserError
from valence.jobs.row_job import as_line, check_line, check_output, refuse_inputs
from valence.models.features import completion_states
from valence.models.policy_model import PolicyModel
from valence.options import AuditOptions
from valence.reports.console import Progress
from valence.reports.form import form_of
from valence.reports.regression import cross_fit
from valence.reports.run_record import is_run
from valence.statistics import MIN_CLASS_ROWS, auc, mean, right_share
from valence.targets import with_files
from valence.terminal import Terminal, print_message
from valence.training.prepare import prepare
from valence.training.scorers import LogProbScorer, RewardModelScorer, load_scorer
from valence.types import Judgement, Preference, TokenizedExample, content_id

SHOWN = 5
"""Maximum number of bad rows to list."""
C_FORM, C_STATES = 1.0, 3.0
"""Inverse strengths of the L2 penalty for form features and for hidden states."""
TOKENS = 8192
"""Default number of tokens per forward pass."""
NO_MODEL: dict[str, Any] = {"method": "kto", "model": {"name": "none", "dtype": "float32"}}
"""The recipe for reading rows without a model."""

RatedKind = Literal["thumbs", "scores", "pairs"]
SIDES: dict[RatedKind, tuple[str, str]] = {
    "thumbs": ("up", "down"),
    "scores": ("high", "low"),
    "pairs": ("chosen", "rejected"),
}
"""The two classes of each kind. A score is high above the mean of all scores, and low below it."""


@dataclass(frozen=True, slots=True)
class FormFeature:
    """A property of the form. up, down: its mean in completions rated up and down (chosen and
    rejected). auc: how well it alone predicts the label; above 0.5, more of it is rated better.
    """

    name: str
    up: float
    down: float
    auc: float


@dataclass(frozen=True, slots=True)
class FormAudit:
    """How well the form of completions predicts their labels, cross-fitted."""

    auc: float
    interval: tuple[float, float]
    features: tuple[FormFeature, ...]

    @property
    def is_predictive(self) -> bool:
        return self.interval[0] > 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectRow:
    """A row with a label that the model contradicts.

    score: 1 minus the cross-fitted probability of the label. label, predicted: for thumbs the
    label, otherwise the name of the class.
    """

    origin: str
    score: float
    label: bool | str
    predicted: bool | str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateAudit:
    """Labels that a classifier on the model's hidden states contradicts.

    auc: of cross-fitted probabilities against the given labels. rows: number of rows with hidden
    states. num_suspects: rows with a contradicted label; suspects: the first of them, most
    suspicious first. Both are empty unless ``is_informative``.
    """

    auc: float
    interval: tuple[float, float]
    rows: int
    num_suspects: int
    suspects: tuple[SuspectRow, ...]

    @property
    def is_informative(self) -> bool:
        """Whether the classifier is better than chance."""
        return self.interval[0] > 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KindAudit:
    """The audit of the rows of one kind.

    up, down: rows of each class; for pairs, rows that prefer ``chosen`` and ``rejected``. form,
    states: None where a class has too few rows; states also without a model. unusable: rows that
    the model cannot read, by reason.
    """

    kind: RatedKind
    rows: int
    up: int
    down: int
    form: FormAudit | None
    states: HiddenStateAudit | None
    unusable: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelAudit:
    """The audit of all rows.

    contradictions: origins of rows with the opposite label of an earlier row with the same content,
    and of that row. contradicted_pairs: origins of pairs with a larger score for the rejected
    completion. near_duplicates: origins of a row rated up and one rated down, and their
    similarity. unrated: rows of no class. num_bad: rows that cannot be read; bad: the first of
    them, with reasons. personal: personal data in all rows. feedback: None where no row has any.
    out: the file that was written.
    """

    kinds: tuple[KindAudit, ...]
    unrated: int
    num_bad: int
    bad: tuple[str, ...]
    contradictions: tuple[tuple[str, str], ...]
    contradicted_pairs: tuple[str, ...]
    near_duplicates: tuple[tuple[str, str, float], ...]
    agreement: RaterAgreement | None
    personal: tuple[PersonalData, ...] = ()
    feedback: FeedbackTexts | None = None
    model: str | None = None
    out: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RatedRow:
    """A row with a label or a preference.

    index: its place among all rows. example: of a score, with the label that the score stands for.
    columns: the file's column of each part of the row.
    """

    kind: RatedKind
    index: int
    row: Row
    example: Judgement | Preference
    columns: Mapping[str, str]

    @property
    def label(self) -> bool:
        """Whether it is rated up, or its chosen side is preferred."""
        if isinstance(self.example, Judgement):
            return bool(self.example.label)
        return self.example.soft is None or self.example.soft > 0.5

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of its completion, or of both sides."""
        if isinstance(self.example, Judgement):
            contents = {"completion": self.example.completion}
        else:
            contents = {"chosen": self.example.chosen, "rejected": self.example.rejected}
        # rows with token ids have their text as well
        return tuple(
            content_text(content) or str(self.row.value.get(name) or "")
            for name, content in contents.items()
        )

    @property
    def group(self) -> str:
        """Equal for rows with the same content, whatever their labels."""
        example = self.example
        if isinstance(example, Judgement):
            return content_id(example.prompt, example.completion)
        sides = sorted((content_id(example.chosen), content_id(example.rejected)))
        return content_id(example.prompt, *sides)

    @property
    def direction(self) -> bool:
        """Differs for two rows of a group exactly when they contradict each other."""
        example = self.example
        if isinstance(example, Judgement):
            return self.label
        return (content_id(example.chosen) < content_id(example.rejected)) is self.label

    def label_name(self, label: bool) -> bool | str:
        """A label as it is written: of thumbs itself, otherwise the name of the class."""
        return label if self.kind == "thumbs" else SIDES[self.kind][0 if label else 1]


@dataclass
class AuditRows:
    """All rows of some files, in their order.

    rows: those that are JSON objects or table records. texts: their texts. rated: those with a
    label or preference, by kind. num_unrated: the others that can be read. bad: those that
    cannot. unusable: indices of the
    rows among ``bad`` that are in ``rows``.
    """

    rows: list[Row] = field(default_factory=list[Row])
    texts: list[RowTexts] = field(default_factory=list[RowTexts])
    rated: dict[RatedKind, list[RatedRow]] = field(
        default_factory=lambda: {kind: list[RatedRow]() for kind in SIDES}
    )
    bad: list[BadRow] = field(default_factory=list[BadRow])
    unusable: set[int] = field(default_factory=set[int])

    @property
    def all_rated(self) -> list[RatedRow]:
        return [row for group in self.rated.values() for row in group]

    @property
    def num_unrated(self) -> int:
        return len(self.rows) - len(self.unusable) - len(self.all_rated)


@dataclass(frozen=True)
class RowAudit:
    """The audit of all rows, and what it says about each of them.

    probabilities: of the given label, by the row's index; empty for a kind where the model cannot
    separate the labels. votes: of the raters of these rows, if they are known.
    """

    audit: LabelAudit
    rows: AuditRows
    probabilities: Mapping[int, float]
    near_duplicates: Sequence[OppositeLabels]
    votes: Sequence[Vote]


def audit_labels(
    files: Sequence[str],
    options: AuditOptions = AuditOptions(),
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> LabelAudit:
    """Audit the labels of the rated rows in these files, and write ``options.out``.

    files: paths, or sections as in a recipe. overrides: settings of the model.

    Raises UserError for invalid arguments, and if no row has a label or preference.
    """
    out = options.out
    if out is not None and options.model is None:
        raise UserError(
            "--out sorts the rows by how likely their labels are wrong, which needs a model",
            code="out-needs-model",
            where="--out",
            fix="add --model MODEL, or add --review to review the rows",
        )
    result = audit_rows(files, options, overrides=overrides, console=console)
    if out is None or not result.probabilities:
        return result.audit
    _write(out, result)
    return replace(result.audit, out=str(out))


def audit_rows(
    files: Sequence[str],
    options: AuditOptions = AuditOptions(),
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> RowAudit:
    """Audit the labels of the rated rows in these files, as ``audit_labels`` does.

    Only checks ``options.out``, which may exist for a review.
    """
    model, out = options.model, options.out
    console = console or Terminal()
    if out is not None:
        check_output(out)
    source = with_files(model or NO_MODEL, files, overrides, format=options.format)
    sources = [_recognized(item, console) for item in source.recipe.data.files("eval")]
    for number, item in enumerate(sources):
        if item.path in [other.path for other in sources[:number]]:
            raise UserError(
                "the file is listed twice",
                code="file-listed-twice",
                where=item.path,
                fix="list it once",
            )
    if out is not None:
        refuse_inputs([out], [source.path for source in sources])
        check_output(out, is_new=not options.review)
    rows = read_rated(sources)
    rated = rows.all_rated
    feedback = audit_feedback(rows.texts)
    if not rated and (feedback is None or out is not None):
        raise _nothing_rated(files, rows)
    if out is not None:
        _check_writable(out, rows)
    votes = _votes(sources)
    thumbs_and_pairs = [row.example for row in rated if row.kind != "scores"]
    ratings = ratings_of_votes(latest_votes(votes)) if votes else ratings_of_rows(thumbs_and_pairs)
    duplicates = near_duplicates(
        (row.example, row.texts[0]) for row in rated if isinstance(row.example, Judgement)
    )
    states: dict[RatedKind, _States] = {}
    if model is not None:
        states = _all_states(model, source, rows.rated, overrides, console)
    kinds = [
        _audit_kind(kind, group, states.get(kind), options.top)
        for kind, group in rows.rated.items()
        if group
    ]
    audit = LabelAudit(
        kinds=tuple(kinds),
        unrated=rows.num_unrated,
        num_bad=len(rows.bad),
        bad=tuple(f"{row.origin}: {row.reason}" for row in rows.bad[:SHOWN]),
        contradictions=tuple(
            (str(a.origin), str(b.origin)) for a, b in contradictions(row.example for row in rated)
        ),
        contradicted_pairs=tuple(
            str(row.example.origin)
            for row in rated
            if isinstance(row.example, Preference) and row.example.is_contradicted
        ),
        near_duplicates=tuple(map(_located, duplicates)),
        agreement=rater_agreement(ratings),
        personal=personal_data(rows.texts),
        feedback=feedback,
        model=model,
    )
    probabilities = {
        rows.rated[kind_audit.kind][index].index: probability
        for kind_audit in kinds
        if kind_audit.states is not None and kind_audit.states.is_informative
        for index, probability in (states[kind_audit.kind].probabilities or {}).items()
    }
    return RowAudit(audit, rows, probabilities, duplicates, votes)


# Reading


def _recognized(file: SourceSettings, console: Console) -> SourceSettings:
    """The file with keys for columns whose names say what they are, as ``valence init`` writes."""
    keys = recognize(DataFile.of(file)).keys
    if keys == file.keys:
        return file
    read = ", ".join(f"{part} from {column}" for part, column in keys.items())
    print_message(console, f"{file.path}: read {read}")
    return file.model_copy(update={"keys": dict(keys)})


def _check_writable(out: Path, rows: AuditRows) -> None:
    """Raise UserError for rows that cannot be written to one file."""
    if sum(bool(group) for group in rows.rated.values()) > 1:
        raise UserError(
            "the rows have different kinds (thumbs, scores, pairs), and one file can contain "
            "only one kind",
            code="rows-of-two-kinds",
            where=str(out),
            fix="audit the files of each kind separately, each with another --out file",
        )
    for row in rows.rows:
        check_line(row.value, row.origin)


def read_rated(sources: Sequence[SourceSettings]) -> AuditRows:
    """All rows of some files, with those that have a label, a score or a preference by kind."""
    rows = AuditRows()
    scored: list[tuple[int, Judgement, Mapping[str, str]]] = []
    for group in read_together(sources):
        columns = columns_of(group[0])
        for row, example in stream(*group):
            if isinstance(row, BadRow):
                rows.bad.append(row)
                continue
            index = len(rows.rows)
            rows.rows.append(row)
            rows.texts.append(texts_of(row.value, columns, row.origin))
            if isinstance(example, BadRow):
                rows.bad.append(example)
                rows.unusable.add(index)
            elif isinstance(example, Judgement) and example.label is not None:
                rows.rated["thumbs"].append(RatedRow("thumbs", index, row, example, columns))
            elif isinstance(example, Judgement) and example.score is not None:
                scored.append((index, example, columns))
            elif (
                isinstance(example, Preference)
                and example.soft != 0.5
                and example.chosen != example.rejected
            ):
                rows.rated["pairs"].append(RatedRow("pairs", index, row, example, columns))
    middle = mean(example.score or 0.0 for _, example, _ in scored)
    for index, example, columns in scored:
        if example.score != middle:
            labelled = replace(example, label=(example.score or 0.0) > (middle or 0.0))
            row = RatedRow("scores", index, rows.rows[index], labelled, columns)
            rows.rated["scores"].append(row)
    return rows


def _nothing_rated(files: Sequence[str], rows: AuditRows) -> UserError:
    first = rows.bad[0] if rows.bad else None
    return UserError(
        f"none of the {rows.num_unrated + len(rows.bad):,} rows has a label, a score that differs "
        f"from the others, or a preference" + (f" (first: {first.reason})" if first else ""),
        code="no-rated-rows",
        where=str(first.origin) if first else ", ".join(files),
        fix=(first.fix if first else "") or "use files with thumbs, pairs, or scores that differ",
    )


def _votes(sources: Sequence[SourceSettings]) -> list[Vote]:
    """The votes in exports, and in files of votes that an import wrote next to the rows."""
    votes: list[Vote] = []
    for group in read_together([item for item in sources if is_source(item.format)]):
        options = ReadOptions(paths=dict(group[0].keys))
        read = read_votes(group[0].format or "", [item.path for item in group], options)
        votes += [vote for vote in read if isinstance(vote, Vote)]
    for path in dict.fromkeys(_votes_path(Path(item.path)) for item in sources):
        if path is not None:
            votes += _stored_votes(path)
    return votes


def _votes_path(rows: Path) -> Path | None:
    """The file of votes that an import wrote next to a file of rows."""
    name, _, kind = rows.stem.rpartition(".")
    stems = [rows.stem, *([name] if kind in ROW_KINDS else [])]
    paths = [rows.with_name(f"{stem}.votes{rows.suffix}") for stem in stems]
    return next((path for path in paths if path.is_file()), None)


def _stored_votes(path: Path) -> Iterator[Vote]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Vote.from_dict(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                "this line is not a vote that `valence import` wrote",
                code="votes-file-invalid",
                where=f"{path}:{number}",
                fix="move this file to another folder, then repeat the import",
            ) from error


def _located(pair: OppositeLabels) -> tuple[str, str, float]:
    return str(pair.up.origin), str(pair.down.origin), round(pair.similarity, 3)


# Labels and features


@dataclass(frozen=True, slots=True)
class _States:
    """probabilities: of the row's label, by the index of the row; None if a class has too few
    rows with states. auc, interval: of the classes between which the classifier decides.
    """

    probabilities: Mapping[int, float] | None
    auc: float
    interval: tuple[float, float]
    unusable: Mapping[str, int]


def _audit_kind(
    kind: RatedKind, items: Sequence[RatedRow], states: _States | None, top: int
) -> KindAudit:
    num_up = sum(item.label for item in items)
    return KindAudit(
        kind=kind,
        rows=len(items),
        up=num_up,
        down=len(items) - num_up,
        form=_audit_form(kind, items),
        states=None if states is None else _suspects(items, states, top),
        unusable={} if states is None else states.unusable,
    )


def _oriented(
    items: Sequence[RatedRow], completions: Callable[[RatedRow], Sequence[Tensor]]
) -> tuple[Tensor, list[bool]]:
    """Features [n, d] and labels with two classes.

    For a pair, the difference between its sides in a random order; the label is True if the first
    side is better.
    """
    features: list[Tensor] = []
    labels: list[bool] = []
    generator = random.Random(0)
    for item in items:
        first, *second = completions(item)
        is_swapped = bool(second) and generator.random() < 0.5
        difference = first - second[0] if second else first
        features.append(-difference if is_swapped else difference)
        labels.append(item.label is not is_swapped)
    return torch.stack(features), labels


def is_enough(labels: Sequence[bool]) -> bool:
    """Whether each class has rows for each fold."""
    return min(sum(labels), len(labels) - sum(labels)) >= MIN_CLASS_ROWS


def _audit_form(kind: RatedKind, items: Sequence[RatedRow]) -> FormAudit | None:
    forms = [[form_of(text) for text in item.texts] for item in items]
    names = list(forms[0][0])
    vectors = {
        id(item): [torch.tensor(list(form.values())).log1p() for form in item_forms]
        for item, item_forms in zip(items, forms, strict=True)
    }
    features, labels = _oriented(items, lambda item: vectors[id(item)])
    if not is_enough(labels):
        return None
    predicted = cross_fit(features, labels, [item.group for item in items], C_FORM)
    form_features: list[FormFeature] = []
    for name in names:
        if kind != "pairs":
            ups, downs = (
                [form[0][name] for item, form in zip(items, forms, strict=True) if item.label is up]
                for up in (True, False)
            )
            alone = auc(ups, downs)
        else:
            better = [
                [form[0 if item.label is up else 1][name] for up in (True, False)]
                for item, form in zip(items, forms, strict=True)
            ]
            ups, downs = [b for b, _ in better], [w for _, w in better]
            alone, _ = right_share([b - w for b, w in better])
        form_features.append(FormFeature(name, mean(ups) or 0.0, mean(downs) or 0.0, alone))
    return FormAudit(predicted.auc, predicted.interval, tuple(form_features))


# Hidden states


def _all_states(
    target: str,
    source: LoadedRecipe,
    items: Mapping[RatedKind, Sequence[RatedRow]],
    overrides: Sequence[str],
    console: Console,
) -> dict[RatedKind, _States]:
    """Run the model on the rows of each kind."""
    print_message(console, f"loading and checking {target}")
    policy, encoder = load_policy(target, source, overrides)
    micro_batch_tokens = source.recipe.train.micro_batch_tokens
    tokens = micro_batch_tokens if isinstance(micro_batch_tokens, int) else TOKENS
    all_states: dict[RatedKind, _States] = {}
    for kind, group in items.items():
        if group:
            units, unusable = _encode(group, encoder)
            states = hidden_states(policy, list(units.values()), tokens, console)
            all_states[kind] = _cross_fit(
                {i: list(tensors) for i, tensors in zip(units, states, strict=True)},
                group,
                unusable,
            )
    return all_states


def load_policy(
    target: str, source: LoadedRecipe, overrides: Sequence[str] = ()
) -> tuple[PolicyModel, Encoder]:
    """The model of a target and its encoder. source: the recipe of the target."""
    none = source.recipe.data.model_copy(update={name: [] for name in LISTS})
    source = replace(source, recipe=source.recipe.model_copy(update={"data": none}))
    encoder = prepare(source, rewards=False).encoder
    empty = [*overrides, *(f"data.{name}=[]" for name in LISTS), "reference.cache=off"]
    run = Path(target) if is_run(target) else None
    scorer = load_scorer(source, encoder.tokenizer, beta=None, run=run, overrides=empty)
    if isinstance(scorer, LogProbScorer):
        return scorer.policy, encoder
    assert isinstance(scorer, RewardModelScorer)
    return scorer.engine, encoder


def _encode(
    items: Sequence[RatedRow], encoder: Encoder
) -> tuple[dict[int, TokenizedExample], dict[str, int]]:
    """The tokens of each row by its index, and the number of rows without tokens by reason."""
    units: dict[int, TokenizedExample] = {}
    unusable: dict[str, int] = {}
    for i, item in enumerate(items):
        encoded = encoder.encode_all([item.example])
        if encoded.units:
            units[i] = encoded.units[0]
        else:
            reason = encoded.unusable[0].reason
            unusable[reason] = unusable.get(reason, 0) + 1
    return units, unusable


def hidden_states(
    policy: PolicyModel,
    units: Sequence[TokenizedExample],
    tokens: int = TOKENS,
    console: Console | None = None,
) -> list[Tensor]:
    """The states [sides, 2 h] of the completions of each unit. tokens: per forward pass."""
    if not units:
        return []
    packer = StepPacker(units, device=policy.device)
    by_unit: dict[int, Tensor] = {}
    with Progress(console or Terminal(), "hidden states", len(units)) as bar:
        for indices in packer.pack(packer.example_indices, tokens):
            batch = packer.micro_batch(indices)
            sides = [(i, side) for i in indices for side in range(len(units[i].answers))]
            lengths = [len(units[i].answers[side].ids) for i, side in sides]
            try:
                states = completion_states(policy, batch, lengths)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"out of memory with {len(batch.tokens)} tokens per forward pass",
                    code="out-of-memory",
                    where=str(units[indices[0]].origin),
                    fix="use a recipe with a smaller train.micro_batch_tokens as --model",
                ) from error
            for i in indices:
                rows = [row for row, (unit, _) in enumerate(sides) if unit == i]
                by_unit[i] = states[rows]
            bar.update(len(by_unit))
    return [by_unit[i] for i in range(len(units))]


def _cross_fit(
    states: Mapping[int, Sequence[Tensor]], items: Sequence[RatedRow], unusable: Mapping[str, int]
) -> _States:
    usable = [items[i] for i in states]
    by_item = {id(items[i]): tensors for i, tensors in states.items()}
    if not usable:
        return _States(None, 0.5, (0.0, 1.0), unusable)
    features, labels = _oriented(usable, lambda item: by_item[id(item)])
    if not is_enough(labels):
        return _States(None, 0.5, (0.0, 1.0), unusable)
    predicted = cross_fit(features, labels, [item.group for item in usable], C_STATES)
    label_probabilities = [
        p if label else 1 - p
        for p, label in zip(predicted.probabilities.tolist(), labels, strict=True)
    ]
    by_index = dict(zip(states, label_probabilities, strict=True))
    return _States(by_index, predicted.auc, predicted.interval, unusable)


def _suspects(items: Sequence[RatedRow], states: _States, top: int) -> HiddenStateAudit | None:
    if states.probabilities is None:
        return None
    order = sorted(states.probabilities.items(), key=lambda pair: (pair[1], pair[0]))
    suspects = [
        SuspectRow(
            origin=str(items[i].row.origin),
            **_verdict(items[i], probability),
            completion=items[i].texts[0],
        )
        for i, probability in order
        if probability < 0.5
    ]
    is_informative = states.interval[0] > 0.5
    return HiddenStateAudit(
        auc=states.auc,
        interval=states.interval,
        rows=len(order),
        num_suspects=len(suspects) if is_informative else 0,
        suspects=tuple(suspects[:top]) if is_informative else (),
    )


def _verdict(item: RatedRow, probability: float) -> dict[str, Any]:
    """The entries of a report on a row with this probability of its label."""
    predicted = item.label if probability >= 0.5 else not item.label
    return {
        "score": round(1 - probability, 4),
        "label": item.label_name(item.label),
        "predicted": item.label_name(predicted),
    }


def _write(out: Path, result: RowAudit) -> None:
    """Write all rows that can be read: first those with a score, most suspicious first."""
    rated = {row.index: row for row in result.rows.all_rated}
    indices = [i for i in range(len(result.rows.rows)) if i not in result.rows.unusable]
    # a probability is below 2
    order = sorted(indices, key=lambda i: (result.probabilities.get(i, 2 + (i not in rated)), i))
    with out.open("x", encoding="utf-8", errors="backslashreplace") as file:
        for i in order:
            value = result.rows.rows[i].value
            if i in result.probabilities:
                verdict = _verdict(rated[i], result.probabilities[i])
                value = with_info(value, rated[i].columns, "audit", verdict)
            file.write(as_line(value) + "\n")


def with_info(
    value: Mapping[str, Any], columns: Mapping[str, str], name: str, entry: Any
) -> dict[str, Any]:
    """A row with an entry added to its info. columns: the file's column of each part."""
    column = columns["info"]
    info = {**values.info(lookup(value, column) or {}, column), name: entry}
    return with_column(value, column, info)


def with_column(value: Mapping[str, Any], path: str, content: Any) -> dict[str, Any]:
    """A row with another value of a column, or of a dotted path into one (see ``lookup``)."""
    if path in value or "." not in path:
        return {**value, path: content}
    first, _, remainder = path.partition(".")
    part = value.get(first)
    if isinstance(part, list):
        items = list(part)
        index, _, remainder = remainder.partition(".")
        items[int(index)] = (
            with_column(items[int(index)], remainder, content) if remainder else content
        )
        return {**value, first: items}
    return {**value, first: with_column(part if isinstance(part, dict) else {}, remainder, content)}
