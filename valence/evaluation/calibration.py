"""Measure how well a judge agrees with labels of people."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard, TypeVar

from valence.data.load import DataFile, stream
from valence.data.sources import BadRow, Row
from valence.errors import UserError
from valence.evaluation.judges import AnswerPair, PairJudge, RewardJudge
from valence.evaluation.summary import Position, position_bias
from valence.evaluation.win_rate import Estimate, win_rate
from valence.rewards.run import score_all
from valence.statistics import auc, auc_interval, mean, mean_interval
from valence.types import (
    Chat,
    Completion,
    Content,
    Example,
    Judgement,
    Message,
    Preference,
    content_id,
)

T = TypeVar("T")
MIN_AGREEMENT = 0.6
MAX_COMPARED = 20_000
"""Pairs of a good and a bad answer that the length bias is computed from."""


@dataclass
class Labels:
    """Labels of people. pairs: the candidate's answer is the one that they prefer. thumbs: answers
    and whether they are good.
    """

    pairs: list[AnswerPair] = field(default_factory=list[AnswerPair])
    thumbs: list[tuple[Completion, bool]] = field(default_factory=list[tuple[Completion, bool]])

    def paired(self) -> list[AnswerPair]:
        """The pairs; without any, pairs of a good and a bad answer to the same prompt, in which
        each answer occurs once.
        """
        if self.pairs:
            return self.pairs
        by_prompt: dict[str, tuple[list[Completion], list[Completion]]] = defaultdict(
            lambda: ([], [])
        )
        for completion, is_good in self.thumbs:
            by_prompt[completion.prompt_id][not is_good].append(completion)
        return [
            _pair(bad, good, "thumbs")
            for goods, bads in by_prompt.values()
            for good, bad in zip(goods, bads, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far a judge agrees with people.

    agreement: the probability that it ranks a good answer above a bad one, ties counted half.
    num_labels: pairs or thumbs with a verdict; failed: those without one. longer: share of pairs in
    which people, and the judge, prefer the longer answer. length_bias: the judge's share minus that
    of people. interval: of the length bias; None for thumbs.
    """

    judge: str
    agreement: Estimate
    num_labels: int
    failed: int
    longer: Mapping[str, float] | None
    length_bias: float | None
    interval: tuple[float, float] | None
    position: Position | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agreement": self.agreement.to_dict()}


def read_labels(paths: Sequence[str]) -> Labels:
    """Thumbs and pairs of files. Raises UserError for a row that is neither."""
    labels = Labels()
    for path in paths:
        for row, example in stream(DataFile(path)):
            if isinstance(example, BadRow):
                raise UserError(
                    example.reason, code=example.code, where=str(example.origin), fix=example.fix
                )
            assert isinstance(row, Row)
            _add_label(labels, example, row.value)
    if not labels.pairs and not labels.thumbs:
        raise UserError(
            "there are no thumbs or pairs to measure the judge on",
            code="no-rated-rows",
            where=", ".join(paths),
            fix="pass a file of thumbs or pairs",
        )
    return labels


def _add_label(labels: Labels, example: Example, columns: Mapping[str, Any]) -> None:
    if isinstance(example, Judgement) and example.label is not None:
        completion = _completion(example.prompt, example.completion, columns, "completion")
        labels.thumbs.append((completion, example.label))
    elif isinstance(example, Preference) and example.soft in (None, 0.0, 1.0):
        good = _completion(example.prompt, example.chosen, columns, "chosen")
        bad = _completion(example.prompt, example.rejected, columns, "rejected")
        swapped = example.soft == 0.0
        labels.pairs.append(_pair(*((good, bad) if swapped else (bad, good)), str(example.origin)))
    elif not isinstance(example, Preference):  # a pair that people did not decide is left out
        raise UserError(
            "the row is neither a thumb nor a pair",
            code="row-not-a-label",
            where=str(example.origin),
            fix="remove it",
        )


def _pair(bad: Completion, good: Completion, origin: str) -> AnswerPair:
    id = content_id(good.prompt_id, bad.text, good.text)
    return AnswerPair(id, "", bad, good, (), origin)


def _completion(
    prompt: Content, answer: Content, columns: Mapping[str, Any], name: str
) -> Completion:
    """An answer of a row. Rows that are known by their tokens have the texts in columns as well."""
    content: Any = columns.get("prompt") if not isinstance(prompt, str | Chat) else prompt
    turns: str | tuple[Message, ...] = (
        content.messages
        if isinstance(content, Chat)
        else content
        if isinstance(content, str)
        else tuple(content or ())
    )
    info = {key: value for key, value in columns.items() if key not in ("prompt", name)}
    return Completion(
        prompt_id=content_id(list(turns) if isinstance(turns, tuple) else turns),
        tokens=(),
        logps=(),
        text=_text(answer if isinstance(answer, str | Chat) else columns.get(name)),
        stop="eos",
        prompt=turns,
        info=info,
    )


def _text(answer: Any) -> str:
    """The text of an answer: of turns, that of the assistant."""
    if isinstance(answer, Chat):
        answer = answer.messages
    if isinstance(answer, str):
        return answer
    turns = [turn for turn in answer or () if turn.get("role") == "assistant"]
    return "\n".join(str(turn.get("content") or "") for turn in turns)


# Agreement


def count_items(judge: PairJudge, labels: Labels) -> int:
    """The number of pairs or thumbs that the judge is measured on."""
    return len(labels.thumbs if _needs_no_pairs(judge, labels) else labels.paired())


def _needs_no_pairs(judge: PairJudge, labels: Labels) -> TypeGuard[RewardJudge]:
    return isinstance(judge, RewardJudge) and not labels.pairs


def calibrate(
    judge: PairJudge, labels: Labels, progress: Callable[[int], None] | None = None
) -> Calibration:
    """Measure a judge. Raises UserError if it fails on all labels, or needs pairs.

    progress: called with the number of pairs or thumbs judged since its last call.
    """
    if _needs_no_pairs(judge, labels):
        return _calibrate_on_thumbs(judge, labels.thumbs, progress)
    pairs = labels.paired()
    if not pairs:
        raise UserError(
            f"{judge.name} compares two answers to one prompt, and the labels have no such pair",
            code="labels-without-pairs",
            where="--labels",
            fix="pass a file of pairs, or of good and bad answers to the same prompts",
        )
    verdicts = judge.judge(pairs, progress or (lambda _: None))
    judged = [
        (verdict.preference, pair.length_difference)
        for pair, verdict in zip(pairs, verdicts, strict=True)
        if verdict.preference is not None
    ]
    if not judged:
        raise _failed_on_all(judge.name, verdicts[0].error)
    agreement = win_rate([preference for preference, _ in judged])
    longer, biases = _length_bias(judged)
    return Calibration(
        judge=judge.name,
        agreement=agreement,
        num_labels=len(judged),
        failed=len(pairs) - len(judged),
        longer=longer,
        length_bias=mean(biases),
        interval=mean_interval(biases) if len(biases) > 1 else None,
        position=position_bias(pairs, verdicts),
    )


def _calibrate_on_thumbs(
    judge: RewardJudge,
    thumbs: Sequence[tuple[Completion, bool]],
    progress: Callable[[int], None] | None,
) -> Calibration:
    scores = score_all(judge.reward, [c for c, _ in thumbs], progress=progress)
    rated: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for (completion, is_good), score in zip(thumbs, scores, strict=True):
        if score.value is not None:
            rated[is_good].append((score.value, len(completion.text)))
    if not any(rated.values()):
        raise _failed_on_all(judge.name, next(s.error for s in scores if s.value is None))
    if not all(rated.values()):
        raise UserError(
            f"{judge.name} gave scores to {'good' if rated[True] else 'bad'} answers only, so its "
            "agreement cannot be measured",
            code="labels-one-sided",
            where="--labels",
            fix="pass a file with both good and bad answers",
        )
    ups, downs = ([value for value, _ in rated[is_good]] for is_good in (True, False))
    value = auc(ups, downs)
    judged = [
        (0.5 if up == down else float(up > down), long_up - long_down)
        for (up, long_up), (down, long_down) in _cross(rated[True], rated[False])
    ]
    longer, biases = _length_bias(judged)
    return Calibration(
        judge=judge.name,
        agreement=Estimate(value, *auc_interval(value, len(ups), len(downs))),
        num_labels=len(ups) + len(downs),
        failed=len(thumbs) - len(ups) - len(downs),
        longer=longer,
        length_bias=mean(biases),
        interval=None,
        position=None,
    )


def _cross(ups: Sequence[T], downs: Sequence[T]) -> list[tuple[T, T]]:
    """All pairs, or a random sample of ``MAX_COMPARED`` pairs if there are more."""
    if len(ups) * len(downs) <= MAX_COMPARED:
        return [(up, down) for up in ups for down in downs]
    draw = random.Random(0)
    return [(draw.choice(ups), draw.choice(downs)) for _ in range(MAX_COMPARED)]


def _length_bias(
    judged: Sequence[tuple[float, int]],
) -> tuple[dict[str, float] | None, list[float]]:
    """judged: of each pair the judge's preference for the answer that people prefer, and by how
    much that one is longer. Returns the shares that prefer the longer answer, and the differences.
    """
    shares = [
        (float(difference > 0), preference if difference > 0 else 1 - preference)
        for preference, difference in judged
        if difference
    ]
    if not shares:
        return None, []
    people, judge = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    return {"labels": people, "judge": judge}, [j - p for p, j in shares]


def _failed_on_all(name: str, error: str) -> UserError:
    return UserError(
        f"{name} failed on all labels; the first error: {error}",
        code="judge-failures",
        where="--labels",
        fix="fix the judge, then rerun the same command",
    )


def describe_calibration(calibration: Calibration) -> str:
    """Describe a calibration in a sentence or two."""
    agreement = calibration.agreement
    text = (
        f"{calibration.judge} has {100 * agreement.value:.0f} % agreement with "
        f"{calibration.num_labels} labels (95 % interval {100 * agreement.low:.0f} to "
        f"{100 * agreement.high:.0f} %; 50 % is chance)"
    )
    if calibration.position is not None:
        first = calibration.position.first
        text += f"; {100 * first:.0f} % of its verdicts are for the answer that is shown first"
    if calibration.longer is not None:
        text += (
            f"; it prefers the longer answer in {100 * calibration.longer['judge']:.0f} % of the "
            f"pairs, people in {100 * calibration.longer['labels']:.0f} %"
        )
    if calibration.failed:
        text += f"; {calibration.failed} labels have no verdict"
    return f"{text}."


def require_agreement(
    calibration: Calibration, minimum: float, *, allow_below: bool, setting: str
) -> None:
    """Raise UserError for a judge that agrees less than the minimum, unless that is allowed.

    setting: what allows it, for the message.
    """
    if calibration.agreement.value < minimum and not allow_below:
        raise UserError(
            f"{describe_calibration(calibration).rstrip('.')}; at least {100 * minimum:g} % is "
            "required",
            code="judge-agreement-low",
            where=calibration.judge,
            fix=f"improve its rubric or use another judge; or accept it with {setting}",
        )
