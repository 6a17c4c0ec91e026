"""Select the prompts to label next: those with the least certain answers, or those that are least
similar to the labelled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from valence.apps.feedback.audit_labels import (
    C_STATES,
    TOKENS,
    AuditRows,
    hidden_states,
    is_enough,
    load_policy,
    read_rated,
)
from valence.data.encode import Encoder
from valence.data.load import read_together, stream
from valence.data.sources import BadRow
from valence.errors import UserError
from valence.jobs.row_job import as_line, check_output, refuse_inputs
from valence.jobs.sample_rows import prompt_columns
from valence.models.policy_model import PolicyModel
from valence.options import SelectOptions
from valence.reports.regression import cross_fit, fit_logistic, standardize
from valence.statistics import MIN_CLASS_ROWS
from valence.targets import with_files
from valence.terminal import Terminal, print_message
from valence.types import (
    Content,
    Demonstration,
    Ids,
    Judgement,
    Origin,
    Prompt,
    TokenizedCompletion,
    TokenizedExample,
    content_id,
)

Order = Literal["margin", "diversity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """prompts: number of different candidates; selected: of those that were written. order: how
    they are ordered. auc: of the classifier on labelled rows that it was not trained on; None
    without one. left_out: candidates that were not used, by reason.
    """

    prompts: int
    selected: int
    order: Order
    auc: float | None
    interval: tuple[float, float] | None
    left_out: Mapping[str, int]
    out: str

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        return asdict(self)


@dataclass
class _Candidates:
    """prompts: by content id. answers: completions of these prompts, with their content ids."""

    prompts: dict[str, Content] = field(default_factory=dict[str, Content])
    answers: list[tuple[str, Demonstration]] = field(
        default_factory=list[tuple[str, Demonstration]]
    )
    left_out: dict[str, int] = field(default_factory=dict[str, int])

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def select_prompts(
    files: Sequence[str],
    options: SelectOptions,
    *,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Selection:
    """Write the prompts to label next, in the order in which to label them, for ``valence collect
    --prompts``.

    files: prompts, or unlabelled answers.

    Raises UserError for invalid arguments, and if there is no prompt to select.
    """
    rated, model, out, num = options.rated, options.model, options.out, options.num
    console = console or Terminal()
    check_output(out)
    source = with_files(model, [*rated, *files], overrides)
    sources = source.recipe.data.files("eval")
    refuse_inputs([out], [source.path for source in sources])
    check_output(out, is_new=True)
    labelled = read_rated(sources[: len(rated)])
    completions, labels = _labelled_completions(labelled)
    if not completions:
        raise UserError(
            "none of the rows has a label, a score that differs from the others, or a preference",
            code="no-rated-rows",
            where=", ".join(rated),
            fix="pass files with thumbs, scores or pairs as --rated",
        )
    candidates = _Candidates()
    known = {content_id(example.prompt) for example in completions}
    for group in read_together(sources[len(rated) :]):
        for _, example in stream(*group):
            _add_candidate(candidates, example, known)
    if not candidates.prompts:
        reasons = "; ".join(
            f"{count} {'row' if count == 1 else 'rows'}: {reason}"
            for reason, count in candidates.left_out.items()
        )
        raise UserError(
            f"there are no prompts to select ({reasons})",
            code="no-candidates",
            where=", ".join(files),
            fix="add a file with prompts that --rated does not contain; its rows may have an "
            "unlabelled answer",
        )
    print_message(console, f"loading and checking {model}")
    policy, encoder = load_policy(model, source, overrides)
    setting = source.recipe.train.micro_batch_tokens
    tokens = setting if isinstance(setting, int) else TOKENS
    states = _States(policy, encoder, tokens, console)
    scores: dict[str, float] = {}
    auc: float | None = None
    interval: tuple[float, float] | None = None
    if candidates.answers:
        scores, auc, interval = _uncertainties(candidates, completions, labels, states)
    order: Order = "margin" if scores else "diversity"
    if order == "margin":
        ids = sorted(scores, key=lambda id: (-scores[id], id))
    else:
        ids = _select_diverse(candidates, completions, states, num)
    rows = [_row(candidates.prompts[id], place, scores.get(id)) for place, id in enumerate(ids, 1)]
    rows = rows[:num]
    with out.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{as_line(row)}\n" for row in rows)
    return Selection(
        prompts=len(candidates.prompts),
        selected=len(rows),
        order=order,
        auc=auc,
        interval=interval,
        left_out=candidates.left_out,
        out=str(out),
    )


def _labelled_completions(rows: AuditRows) -> tuple[list[Demonstration], list[bool]]:
    """The completions of rated rows and whether they are good; both sides of a pair."""
    completions: list[Demonstration] = []
    labels: list[bool] = []
    for row in rows.all_rated:
        example = row.example
        sides = (
            [(example.completion, row.label)]
            if isinstance(example, Judgement)
            else [(example.chosen, row.label), (example.rejected, not row.label)]
        )
        for content, label in sides:
            completions.append(_demonstration(example.prompt, content, example.origin))
            labels.append(label)
    return completions, labels


def _demonstration(prompt: Content, completion: Content, origin: Origin) -> Demonstration:
    return Demonstration(prompt=prompt, completion=completion, origin=origin)


def _add_candidate(candidates: _Candidates, example: object, known: set[str]) -> None:
    if isinstance(example, BadRow):
        candidates.leave_out(example.reason)
        return
    if isinstance(example, Judgement) and (example.label is not None or example.score is not None):
        candidates.leave_out("the answer already has a rating")
        return
    if not isinstance(example, Prompt | Demonstration | Judgement):
        candidates.leave_out("the row is neither a prompt nor a prompt with one answer")
        return
    if isinstance(example.prompt, Ids):
        candidates.leave_out("the prompt has token ids but no text")
        return
    id = content_id(example.prompt)
    if id in known:
        candidates.leave_out("an answer to the prompt already has a rating")
        return
    candidates.prompts.setdefault(id, example.prompt)
    if not isinstance(example, Prompt):
        answer = _demonstration(example.prompt, example.completion, example.origin)
        candidates.answers.append((id, answer))


@dataclass(frozen=True)
class _States:
    """Computes hidden states with the model."""

    policy: PolicyModel
    encoder: Encoder
    tokens: int
    console: Console

    def of_answers(self, examples: Sequence[Demonstration]) -> tuple[Tensor, list[int]]:
        """The states [n, d] of completions, and the indices of those that the model can read."""
        units: list[TokenizedExample] = []
        indices: list[int] = []
        for index, example in enumerate(examples):
            for unit in self.encoder.encode_all([example]).units:
                units.append(unit)
                indices.append(index)
        return self._run(units), indices

    def of_prompts(self, prompts: Sequence[Content]) -> Tensor:
        """The states [n, d] of prompts."""
        units: list[TokenizedExample] = []
        for prompt in prompts:
            ids = prompt.ids if isinstance(prompt, Ids) else self.encoder.encode_prompt(prompt)
            # a long prompt is represented by its beginning
            units.append(prompt_unit(tuple(ids)[: self.tokens]))
        return self._run(units)

    def _run(self, units: Sequence[TokenizedExample]) -> Tensor:
        states = hidden_states(self.policy, units, self.tokens, self.console)
        return torch.cat(states) if states else torch.zeros(0, 1)


def prompt_unit(ids: tuple[int, ...]) -> TokenizedExample:
    """A prompt in the form of a completion, of which the hidden states are computed."""
    first, rest = (ids[:1], ids[1:]) if len(ids) > 1 else ((), ids)
    return TokenizedExample(
        id="",
        origin=Origin("prompts", 1),
        kind="demonstration",
        prompt_ids=first,
        prompt_mask=(False,) * len(first),
        answers=(TokenizedCompletion(rest, (True,) * len(rest)),),
    )


def _uncertainties(
    candidates: _Candidates,
    completions: Sequence[Demonstration],
    labels: Sequence[bool],
    states: _States,
) -> tuple[dict[str, float], float | None, tuple[float, float] | None]:
    """The uncertainty of each prompt, from 0 to 1: that of its least certain answer.

    Also returns the AUC of the classifier and its interval. There are no uncertainties if the
    classifier cannot separate the labels.
    """
    known, indices = states.of_answers(completions)
    known_labels = [labels[i] for i in indices]
    if not is_enough(known_labels):
        up, down = known_labels.count(True), known_labels.count(False)
        raise UserError(
            f"--rated has too few labels to train a classifier: {up} up and {down} down",
            code="too-few-labels",
            where="--rated",
            fix=f"rate at least {MIN_CLASS_ROWS} answers of each class first, or select from "
            "prompts without answers",
        )
    groups = [content_id(completions[i].prompt, completions[i].completion) for i in indices]
    predicted = cross_fit(known, known_labels, groups, C_STATES)
    if predicted.interval[0] <= 0.5:
        return {}, predicted.auc, predicted.interval
    answers, places = states.of_answers([answer for _, answer in candidates.answers])
    if len(places) < len(candidates.answers):
        reason = "the model cannot read the answer"
        num_unreadable = len(candidates.answers) - len(places)
        candidates.left_out[reason] = candidates.left_out.get(reason, 0) + num_unreadable
    x = standardize(torch.cat([known, answers]))
    y = torch.tensor(known_labels, dtype=torch.float64)
    included = torch.ones(len(known), 1, dtype=torch.float64)
    weights, biases = fit_logistic(x[: len(known)], y, included, C_STATES)
    probabilities = torch.sigmoid(x[len(known) :] @ weights + biases)[:, 0].tolist()
    scores: dict[str, float] = {}
    for place, probability in zip(places, probabilities, strict=True):
        id = candidates.answers[place][0]
        scores[id] = max(scores.get(id, 0.0), 1 - abs(2 * probability - 1))
    return scores, predicted.auc, predicted.interval


def _select_diverse(
    candidates: _Candidates, completions: Sequence[Demonstration], states: _States, num: int
) -> list[str]:
    """The prompts that differ most from the labelled ones and from each other, in this order."""
    labelled = list(
        {content_id(example.prompt): example.prompt for example in completions}.values()
    )
    ids = list(candidates.prompts)
    vectors = states.of_prompts([*labelled, *candidates.prompts.values()])
    order = farthest_first(standardize(vectors), len(labelled), num)
    return [ids[index] for index in order]


def farthest_first(vectors: Tensor, num_known: int, num: int) -> list[int]:
    """Order the vectors [n, d] after the first ``num_known``: each is the farthest from the known
    vectors and from those before it (Gonzalez 1985). Returns up to ``num`` of their indices.
    """
    known, candidates = vectors[:num_known], vectors[num_known:]
    distances = torch.full((len(candidates),), torch.inf, dtype=vectors.dtype)
    for vector in known:
        distances = torch.minimum(distances, (candidates - vector).norm(dim=1))
    order: list[int] = []
    while len(order) < min(num, len(candidates)):
        index = int(distances.argmax())
        order.append(index)
        distances = torch.minimum(distances, (candidates - candidates[index]).norm(dim=1))
        distances[order] = -1.0
    return order


def _row(prompt: Content, rank: int, uncertainty: float | None) -> dict[str, Any]:
    info: dict[str, Any] = {"rank": rank}
    if uncertainty is not None:
        info["uncertainty"] = round(uncertainty, 4)
    return {**prompt_columns(prompt), "info": {"select": info}}
