"""Diagnose a run: what goes wrong, the evidence, and what to do, from its log and evaluations.

The thresholds are rules of thumb, each with its reason. A diagnosis is a question to look at, not a
verdict. The training loop shows those of online runs when they occur, and the report finds the same
ones in the log.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valence.reports.formatting import number
from valence.reports.rows import (
    Json,
    groups,
    has_signals,
    is_pair,
    is_rollout,
    is_weak,
    per_token,
    rewards_by_class,
    value,
    verdict,
)
from valence.reports.run_record import RunRecord
from valence.statistics import finite, mean, spearman


@dataclass(frozen=True)
class Diagnosis:
    """name: for programs. message: the observation with its numbers. advice: what to try or to look
    at. is_urgent: the run has collapsed or learns nothing, so it is shown above everything else.
    """

    name: str
    message: str
    advice: str
    is_urgent: bool = False


OTHER_MODEL = "another model"
"""A teacher that is not the policy itself."""


class Advice:
    """Advice on a run that names only settings and methods that its rows and its method accept.

    method: name of the run's method. settings: of its loss section. length_setting: the setting
    that decides its number of steps. teacher: ``teacher.weights``, or OTHER_MODEL.
    """

    def __init__(
        self,
        method: str = "",
        settings: Iterable[str] = (),
        length_setting: str = "train.epochs",
        teacher: str = "",
    ) -> None:
        self.method, self.settings = method, frozenset(settings)
        if "target" in self.settings:  # the beta of a divergence does not bound the policy
            self.settings -= {"beta"}
        self.length_setting, self.teacher = length_setting, teacher

    @classmethod
    def of(cls, run: RunRecord) -> Advice:
        loss = _setting(run.config, "loss")
        settings = loss if isinstance(loss, Mapping) else {}
        has_steps = _setting(run.config, "train", "max_steps") is not None
        length_setting = "train.max_steps" if has_steps else "train.epochs"
        teacher = str(_setting(run.config, "teacher", "weights") or "")
        if _setting(run.config, "teacher", "model") not in (None, "self"):
            teacher = OTHER_MODEL
        return cls(str(run.config.get("method") or ""), settings, length_setting, teacher)

    def raising(self, *names: str) -> list[str]:
        """``["raise loss.A or loss.B"]`` with the settings that the method has; empty if none."""
        accepted = [f"loss.{name}" for name in names if name in self.settings]
        return [f"raise {' or '.join(accepted)}"] if accepted else []

    def using(self, *methods: str) -> list[str]:
        """``["use A, B or C"]`` with methods other than that of the run; empty if none."""
        others = [name for name in methods if name != self.method]
        listed = " or ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
        return [f"use {listed}"] if others else []

    @property
    def against_divergence(self) -> list[str]:
        """What keeps the policy near the reference."""
        return self.raising("kl_weight", "kl_beta") or self.raising("beta")

    @property
    def compares_rewards(self) -> bool:
        """Whether the method learns from differences of rewards."""
        return self.method != "online_distill"

    @property
    def against_moving_teacher(self) -> list[str]:
        """What keeps the teacher from following the policy."""
        return ["set teacher.weights: initial"] if self.teacher in ("live", "ema") else []

    @property
    def trains_policy_on_pairs(self) -> bool:
        """Whether other losses of pairs suit the rows and the model, which is no reward model."""
        return bool({"nll_weight", "beta"} & self.settings) and not self.method.startswith("online")


def _sentence(*choices: str) -> str:
    """``A, b, or c.``: choices in one sentence."""
    listed = ", ".join(choices[:-1])
    text = f"{listed}, or {choices[-1]}" if listed else choices[-1]
    return f"{text[0].upper()}{text[1:]}."


# Runs that may collapse: online, or with the policy as its own teacher

THRESHOLDS: dict[str, float] = {
    # Nats per completion, and per token: both must be reached. At 10 nats the reference samples
    # such a completion once in 22,000 times. That alone is normal for long completions (500 tokens
    # at 0.02), and a high value per token alone is normal for short ones (a single token that
    # became certain). 1 nat per token is about the entropy of text under a language model at
    # temperature 1: the reference then has hardly any influence on the next token.
    "kl": 10.0,
    "kl/token": 1.0,
    # A divergence is shown again when it has grown by this factor.
    "kl/again": 4.0,
    # Share of groups whose rewards are all equal: nearly all. With 8 prompts per round it is all.
    "tied": 0.9,
    # How close the mean reward is to the highest reward of the run, as a share of the range of
    # rewards so far. Below it some completions are still worse than others.
    "saturated": 0.02,
    # Distinct 4-grams of tokens among all of a completion (1 - seq-rep-4 of Welleck et al. 2019,
    # arXiv 1908.04319). Text written by people has nearly 1, lists and code less. At a half every
    # second 4-gram is a repetition, which happens only in loops.
    "distinct_4grams": 0.5,
    # Share of completions that equal another one of their round, where completions have on average
    # at least this many tokens. Short answers ("yes", "4 + 10 = 14.") repeat in healthy runs.
    "duplicates": 0.5,
    "duplicates/length": 16.0,
    # Rounds in a row: a single round may be an accident, and the estimate of the divergence (k3)
    # has rare, very large outliers.
    "rounds": 3,
    # Optimizer steps in a row without a gradient. With hard prompts a few tied rounds are normal.
    "zero_gradient_steps": 5,
    # Nats per token by which completions with feedback have become less likely, and how often that
    # is what the teacher asked for at the start. Complaints make completions less likely on
    # purpose, by the signal. At 0.25 a completion of 50 tokens is 270,000 times rarer.
    "less likely": 0.25,
    "less likely/signal": 2.0,
    # Growth of the mean absolute signal. It shrinks while the policy learns from a fixed teacher.
    "growing signal": 2.0,
    # Share of the entropy at the start. At a half, the policy has as many choices for two tokens
    # as it had for one.
    "low entropy": 0.5,
}

MEASURED_ROWS = (("eval/", "held-out completions", 1), ("", "training completions", 3))
"""Prefix of metrics, their completions, and the number of records that show a change: held-out rows
are the same in each.
"""


ENDING = ("held-out completions less likely", "low entropy", "repetitive")
"""Diagnoses of a policy that has collapsed while it was its own teacher. Training completions are
not among them: complaints make these less likely on purpose.
"""

_MORE_SIGNAL = ("sample more (rollout.num_rollouts)", "raise rollout.temperature")


class CollapseDetector:
    """Finds collapsed runs in their records, one after the other: online runs, and runs with a
    teacher. Its state is plain data, so that a resumed run has the same diagnoses as an undisturbed
    one.

    advice: for the method of the run.
    """

    def __init__(self, advice: Advice | None = None) -> None:
        self._advice = advice or Advice()
        self.reset()

    def reset(self) -> None:
        self.in_a_row: dict[str, int] = {}
        """By diagnosis: the latest rounds in a row that show it."""
        self.shown: dict[str, float] = {}
        """By diagnosis: the value at which it was shown last."""
        self.rewards: list[float] = []
        """The lowest and the highest reward so far, once there is one."""
        self.last_gradient = 0
        """The last step that had a gradient."""
        self.first: dict[str, list[float]] = {}
        """By metric: its first values."""
        self.collapsed = ""
        """What shows that a policy that is its own teacher has collapsed; empty if nothing does."""

    def observe(self, record: Mapping[str, Any]) -> list[Diagnosis]:
        """The diagnoses that this record shows for the first time."""
        checks = [self._zero_gradient]
        if has_teacher(record):
            checks = [self._less_likely, self._growing_signal, self._low_entropy]
            if self._advice.teacher == OTHER_MODEL:  # which may be surer of what it writes
                checks = [self._growing_signal]
        if "rollout/length" in record:
            checks = [self._high_kl, self._saturated, self._repetitive, *checks]
        diagnoses = [diagnosis for check in checks for diagnosis in check(record)]
        if has_teacher(record) and self._advice.teacher != OTHER_MODEL:
            ending = [diagnosis.message for diagnosis in diagnoses if diagnosis.name in ENDING]
            self.collapsed = next(iter(ending), self.collapsed)
        return diagnoses

    def _is_new(self, name: str, shows: bool, rounds: float = THRESHOLDS["rounds"]) -> bool:
        """Whether several rounds in a row show a diagnosis that has not been shown yet."""
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if shows else 0
        if not shows and name != "high kl":
            self.shown.pop(name, None)
        return self.in_a_row[name] >= rounds and name not in self.shown

    def _start(self, record: Mapping[str, Any], name: str, count: int) -> float | None:
        """The mean of the first ``count`` values of a metric; None if this record has no later
        one.
        """
        now, first = record.get(name), self.first.setdefault(name, [])
        if not finite(now):
            return None
        if len(first) < count:
            first.append(now)
            return None
        return mean(first)

    def _high_kl(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        kl, length = record.get(name_of_kl(record)), record["rollout/length"]
        if not finite(kl) or not finite(length) or length <= 0:
            return
        is_high = kl >= THRESHOLDS["kl"] and kl / length >= THRESHOLDS["kl/token"]
        is_new = self._is_new("high kl", is_high)
        before = self.shown.get("high kl")
        grows = is_high and before is not None and kl >= THRESHOLDS["kl/again"] * before
        if is_new or grows:
            self.shown["high kl"] = kl
            yield Diagnosis(
                "high kl",
                f"The policy is far from the reference: {number(kl)} nats per completion, "
                f"{number(kl / length)} per token.",
                "Read the completions: is the text still coherent? "
                + _sentence(
                    *self._advice.against_divergence,
                    "lower train.learning_rate",
                    "take an earlier checkpoint",
                ),
                is_urgent=True,
            )

    def _saturated(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        if not self._advice.compares_rewards:
            return
        average, tied = record.get("reward/mean"), record.get("rollout/tied")
        top, bottom = record.get("reward/max"), record.get("reward/min")
        if not (finite(average) and finite(tied) and finite(top) and finite(bottom)):
            return
        lowest, highest = self.rewards = [min([bottom, *self.rewards]), max([top, *self.rewards])]
        slack = THRESHOLDS["saturated"] * (highest - lowest)
        shows = tied >= THRESHOLDS["tied"] and average >= highest - slack
        if self._is_new("saturated reward", shows):
            self.shown["saturated reward"] = average
            yield Diagnosis(
                "saturated reward",
                f"Nearly every completion has the highest reward of the run: the mean is "
                f"{number(average)}, and {tied:.0%} of the groups are tied.",
                "Read the completions: a policy that exploits the reward looks the same as one "
                "that has learned the task. Stop, or use harder prompts or a reward with finer "
                "steps.",
                is_urgent=True,
            )

    def _repetitive(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        distinct, equal = record.get("rollout/distinct_4grams"), record.get("rollout/duplicates")
        evidence: list[str] = []
        if finite(distinct) and distinct <= THRESHOLDS["distinct_4grams"]:
            evidence.append(
                f"{1 - distinct:.0%} of the 4-grams of a completion repeat an earlier one"
            )
        long_enough = record["rollout/length"] >= THRESHOLDS["duplicates/length"]
        if finite(equal) and long_enough and equal >= THRESHOLDS["duplicates"]:
            evidence.append(f"{equal:.0%} of the completions of a round are equal to another one")
        if self._is_new("repetitive", bool(evidence)):
            self.shown["repetitive"] = 1.0
            yield Diagnosis(
                "repetitive",
                f"Completions are repetitive: {', and '.join(evidence)}.",
                "Read the completions. "
                + _sentence(
                    *self._advice.against_divergence,
                    "raise rollout.temperature",
                    "lower train.learning_rate",
                    "give repetition a lower reward (`valence docs rewards`)",
                ),
                is_urgent=True,
            )

    def _zero_gradient(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        norm, step = record.get("grad_norm"), record["step"]
        if not finite(norm):
            return
        if norm > 0:
            self.last_gradient = step
            self.shown.pop("no gradient", None)
        elif step - self.last_gradient >= THRESHOLDS["zero_gradient_steps"] and (
            "no gradient" not in self.shown
        ):
            self.shown["no gradient"] = step
            yield Diagnosis(
                "no gradient",
                f"The gradient has been zero in all steps after step {self.last_gradient}: within "
                f"each group, all completions have the same reward.",
                "Look at the reward and the prompts. "
                + _sentence(*_MORE_SIGNAL, *self._advice.using("dapo"))
                + " train.max_zero_gradient_steps ends such a run.",
                is_urgent=True,
            )

    def _less_likely(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        for prefix, completions, count in MEASURED_ROWS:
            start = self._start(record, f"{prefix}logps/token", count)
            signal = self._start(record, f"{prefix}signal/mean", count)
            if start is None or signal is None:
                continue
            now = record[f"{prefix}logps/token"]
            limit = max(THRESHOLDS["less likely"], THRESHOLDS["less likely/signal"] * -signal)
            name = f"{completions} less likely"
            if self._is_new(name, start - now >= limit, count):
                self.shown[name] = now
                yield Diagnosis(
                    name,
                    f"{completions[0].upper()}{completions[1:]} became much less likely: "
                    f"{number(start)} nats per token at the start, {number(now)} now. The signal "
                    f"asked for a change of {number(signal)}.",
                    "Read sampled answers: is the text still coherent? "
                    + _sentence(
                        "lower train.learning_rate",
                        *self._advice.against_moving_teacher,
                        "take an earlier checkpoint",
                    ),
                    is_urgent=True,
                )

    def _growing_signal(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        for prefix, completions, count in MEASURED_ROWS:
            start = self._start(record, f"{prefix}signal/size", count)
            if start is None:
                continue
            now, name = record[f"{prefix}signal/size"], f"growing signal of {completions}"
            if self._is_new(name, now >= THRESHOLDS["growing signal"] * start > 0, count):
                self.shown[name] = now
                yield Diagnosis(
                    name,
                    f"The signal of {completions} grows instead of shrinking: its mean size was "
                    f"{number(start)} nats per token at the start, and is {number(now)} now.",
                    "The policy moves away from its teacher. "
                    + _sentence("lower train.learning_rate", *self._advice.against_moving_teacher),
                )

    def _low_entropy(self, record: Mapping[str, Any]) -> Iterator[Diagnosis]:
        start = self._start(record, "entropy", int(THRESHOLDS["rounds"]))
        if start is None:
            return
        now = record["entropy"]
        if self._is_new("low entropy", now <= THRESHOLDS["low entropy"] * start):
            self.shown["low entropy"] = now
            yield Diagnosis(
                "low entropy",
                f"The entropy of the policy fell from {number(start)} to {number(now)} nats per "
                "token.",
                "Read sampled answers: are they short, or all alike? "
                + _sentence(
                    "lower train.learning_rate",
                    *self._advice.against_moving_teacher,
                    "take an earlier checkpoint",
                ),
                is_urgent=True,
            )

    def state_dict(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        for name, content in state.items():
            setattr(self, name, copy.deepcopy(content))


def name_of_kl(record: Mapping[str, Any]) -> str:
    """The name of the divergence from the reference in a record. kto and similar methods log their
    reference point as `kl`.
    """
    return "rollout/kl" if {"rollout/kl", "kl/raw"} & record.keys() else "kl"


def _is_online(record: Mapping[str, Any]) -> bool:
    return "rollout/length" in record or "reward/mean" in record


def has_teacher(record: Mapping[str, Any]) -> bool:
    """Whether a record has the signal of a teacher, of training or of held-out rows."""
    return "signal/mean" in record or "eval/signal/mean" in record


def diagnose_collapse(
    records: Sequence[Mapping[str, Any]], advice: Advice | None = None
) -> list[Diagnosis]:
    """The diagnoses of ``CollapseDetector`` for a log, each as it was shown last."""
    detector, diagnoses = CollapseDetector(advice), dict[str, Diagnosis]()
    is_watched = any(_is_online(record) or has_teacher(record) for record in records)
    for record in records if is_watched else ():
        diagnoses |= {diagnosis.name: diagnosis for diagnosis in detector.observe(record)}
    return list(diagnoses.values())


# All runs

MIN_ROWS = 20
"""Rows below which a rank correlation is noise: its standard error is about 1 / sqrt(rows - 1),
here 0.23.
"""

FOLLOWS_LENGTH = 0.45
"""Rank correlation of reward and length from which length is a main reason of it: twice the
standard error at ``MIN_ROWS``.
"""

LENGTH_GAP = 1.2
"""Ratio of the classes' mean lengths from which length tells the classes apart to some degree. The
audit warns from here too.
"""

LENGTH_GROWTH = 1.25
"""Completions to the same prompts that are a quarter longer have grown by more than sampling
noise.
"""

LENGTH_DRIFT, MIN_SAMPLES = 1.5, 4
"""Ratio of the mean lengths of sampled answers before and after training, and the number of answers
below which it is noise.
"""

LARGE_SHARE = 0.5
"""Share of rows with a weak signal at which most of the feedback teaches nothing."""

RARER = 0.1
"""Nats per token by which preferred answers may become less likely: an answer of 50 tokens is then
150 times rarer than before.
"""

FAR = 10.0
"""Nats from the reference: at 10 the reference would hardly ever sample the completion."""

STILL_DIVERGING = 1.25
"""A divergence that gained a quarter over the last half of the run has not settled."""

SATURATES = 1.0
"""beta times nats beyond which kto's reference point has left the sigmoid's steep part.

(Below 0 is usual: it is clamped at 0.)
"""

MOVED, LEFT_BEHIND = 0.1, 0.1
"""A class's mean reward has moved from 0.1 on. The other class is left behind if it moved by less
than a tenth of that.
"""

PERFECT, STILL_GROWING = 0.999, 1.2
"""An accuracy of 1 leaves nothing to learn. Margins that grow by a fifth after that are only
confidence.
"""

CUT_OFF = 0.25
"""With a quarter of the completions cut off, the reward scores fragments, and nothing teaches the
policy to end.
"""

FEW_CALLS = 0.01
"""Tool calls per completion below which no completion learns from a call."""

TOO_LONG = 0.05
"""Share of training rows longer than data.max_length, beyond which they are no exceptions."""

RISES = 0.03
"""A held-out loss this share above its best, twice in a row, has turned: its rows are the same each
time, so little of it is noise. (The share is of its total decrease where that is more: a loss near
0 moves by large shares of almost nothing.)
"""

FAILED, TIED = 0.1, 0.5
"""Shares of completions without a score, and of prompts with tied rewards, at which much of a round
is lost.
"""

MIN_RECORDS = 10
"""Records of the log below which it shows no course over time."""

INCLUDES = {
    "high kl": "divergence",
    "saturated reward": "tied",
    "no gradient": "tied",
    "held-out completions less likely": "rarer",
}
"""By diagnosis of a collapsed run: the milder diagnosis that it includes."""


def diagnose(run: RunRecord) -> list[Diagnosis]:
    """The diagnoses of a run, most serious first; empty for a healthy run."""
    checks: tuple[Callable[[RunRecord], Iterable[Diagnosis]], ...] = (
        _not_finite,
        _weak_signal,
        _answers_change_length,
        _completions_follow_length,
        _rewards_follow_length,
        _preferred_become_rarer,
        _divergence,
        _kto_drift,
        _one_class,
        _stuck,
        _few_tool_calls,
        _cut_off,
        _too_long,
        _overfits,
        _little_signal,
    )
    collapsed = diagnose_collapse(run.metrics, Advice.of(run))
    included = {INCLUDES[d.name] for d in collapsed if d.name in INCLUDES}
    return [*collapsed, *(d for check in checks for d in check(run) if d.name not in included)]


def other_warnings(run: RunRecord, diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Warnings of the run that repeat none of these diagnoses."""
    warnings = map(str, run.facts.get("warnings", ()))
    return [line for line in warnings if not any(d.message in line for d in diagnoses)]


IMPORTANT_FINDINGS = (
    ("eval", "rows_in_train"),
    ("eval", "prompts_in_train"),
    ("train", "one_class"),
    ("train", "contradictions"),
    ("train", "length_bias"),
)
"""Findings of the audit that may spoil a result, by the list of rows; the most serious first."""


def main_warning(run: RunRecord) -> str | None:
    """The most important warning of a run, for the end of training, and how many others its report
    has; None if there is none.

    First what makes the held-out rows invalid, then urgent diagnoses and that of length, findings
    in the training rows, other diagnoses, and warnings of the run.
    """
    held_out, training = (
        [
            str(sentence)
            for name, finding in IMPORTANT_FINDINGS
            if name == rows and (sentence := _setting(run.audit, name, "said", finding))
        ]
        for rows in ("eval", "train")
    )
    diagnoses = diagnose(run)
    first, others = (
        [
            f"{d.message} {d.advice}"
            for d in diagnoses
            if is_first is (d.is_urgent or d.name == "length")
        ]
        for is_first in (True, False)
    )
    warnings = [*held_out, *first, *training, *others, *other_warnings(run, diagnoses)]
    more = f" ({len(warnings) - 1} more in the report)" if len(warnings) > 1 else ""
    return f"{warnings[0]}{more}" if warnings else None


# Diagnoses from the log


def _course(run: RunRecord, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in run.metrics if finite(record.get(name))]


def _tenths(course: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Means of the first tenth, of the tenth in the middle, and of the last tenth of a course."""
    values = [v for _, v in course]
    tenth = max(1, len(values) // 10)
    middle = (len(values) - tenth) // 2
    parts = values[:tenth], values[middle : middle + tenth], values[-tenth:]
    return tuple(math.fsum(part) / len(part) for part in parts)  # type: ignore[return-value]


def _setting(config: Json, *path: str) -> Any:
    content: Any = config
    for name in path:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _not_finite(run: RunRecord) -> Iterable[Diagnosis]:
    steps_of: dict[str, list[int]] = {}
    for record in run.metrics:
        for name, logged in record.items():
            if logged in ("nan", "inf", "-inf") or (
                isinstance(logged, float) and not math.isfinite(logged)
            ):
                steps_of.setdefault(str(name), []).append(record["step"])
    advice = (
        "Look at the rows that the warnings name, use model.dtype: float32, or lower "
        "train.learning_rate."
    )
    if steps_of:
        names = ", ".join(
            f"{name} (at {number(len(steps))} of the steps, first at {steps[0]})"
            for name, steps in steps_of.items()
        )
        yield Diagnosis("not finite", f"Non-finite metrics: {names}.", advice)
    elif skipped := [step for step, share in _course(run, "skipped") if share > 0]:
        message = f"Steps were skipped at {number(len(skipped))} records, first at {skipped[0]}."
        yield Diagnosis("skipped", message, advice)


def _divergence(run: RunRecord) -> Iterable[Diagnosis]:
    name = next((name_of_kl(r) for r in run.metrics if "rollout/length" in r), "kl")
    course = _course(run, name)
    if len(course) < MIN_RECORDS or not any(map(_is_online, run.metrics)):
        return
    _, middle, last = _tenths(course)
    if last >= FAR and last >= STILL_DIVERGING * middle:
        yield Diagnosis(
            "divergence",
            f"The policy moves away from the reference and has not settled: {name} is "
            f"{number(last)} nats per completion, after {number(middle)} in the middle of the run.",
            "Read the completions: is the text still coherent? "
            + _sentence(
                *Advice.of(run).against_divergence, "lower train.learning_rate", "stop earlier"
            ),
        )


def _kto_drift(run: RunRecord) -> Iterable[Diagnosis]:
    course, beta = _course(run, "kl/raw"), _setting(run.config, "loss", "beta")
    if len(course) < MIN_RECORDS or not finite(beta):
        return
    last, advice = _tenths(course)[2], Advice.of(run)
    if beta * last >= SATURATES:
        yield Diagnosis(
            "drift",
            f"Answers that do not fit their prompt have become likelier by {number(last)} nats "
            f"(kl/raw): the policy moves as a whole, not only where the labels say so.",
            _sentence(
                f"lower train.learning_rate or {advice.length_setting}", *advice.raising("beta")
            ),
        )


def _stuck(run: RunRecord) -> Iterable[Diagnosis]:
    accuracy = _course(run, "rewards/accuracies")
    late = accuracy[-len(accuracy) // 3 :]
    if len(late) < MIN_RECORDS or min(v for _, v in late) < PERFECT:
        return
    start, advice = late[0][0], Advice.of(run)
    margins = [v for step, v in _course(run, "rewards/margins") if step >= start]
    third = len(margins) // 3
    if third and math.fsum(margins[-third:]) >= STILL_GROWING * math.fsum(margins[:third]) > 0:
        yield Diagnosis(
            "training accuracy stuck at 1",
            f"Since step {start}, every training pair has been ranked correctly, and margins still "
            "grow: "
            "the model only becomes more confident.",
            _sentence(
                f"lower {advice.length_setting}",
                "keep the best checkpoint (run.keep_best)",
                *advice.raising("beta", "label_smoothing"),
                *(advice.using("ipo") if advice.trains_policy_on_pairs else ()),
            ),
        )


def _cut_off(run: RunRecord) -> Iterable[Diagnosis]:
    course = _course(run, "rollout/truncated")
    stops = [row.get("stop") for row in run.last["rows"] if is_rollout(row)] if run.last else []
    shares = [_tenths(course)[2]] if course else []
    shares += [stops.count("length") / len(stops)] if stops else []
    if max(shares, default=0.0) >= CUT_OFF:
        limit = _setting(run.config, "rollout", "max_new_tokens")
        where = f" at {limit} tokens" if limit else ""
        yield Diagnosis(
            "cut off",
            f"{max(shares):.0%} of the completions are cut off{where} before they end.",
            "Raise rollout.max_new_tokens, or give truncated completions a lower reward "
            "(`valence docs rewards`), so that the policy learns to end."
            if Advice.of(run).compares_rewards
            else "Raise rollout.max_new_tokens.",
        )


def _few_tool_calls(run: RunRecord) -> Iterable[Diagnosis]:
    course = _course(run, "rollout/tool_calls")
    if course and _tenths(course)[2] < FEW_CALLS:
        yield Diagnosis(
            "few tool calls",
            "The policy has tools and calls none.",
            "Read the completions. If it cannot write a call, train it on demonstrations of calls "
            "first (`valence docs tools`); if calls are cut off, raise rollout.max_new_tokens.",
        )


def _too_long(run: RunRecord) -> Iterable[Diagnosis]:
    truncation = _setting(run.audit, "train", "truncation")
    rows, too_long = (_setting({"": truncation}, "", name) for name in ("rows", "too_long"))
    if finite(rows) and finite(too_long) and rows > 0 and too_long / rows >= TOO_LONG:
        keeps = truncation.get("keeps_99")
        value = f" to {keeps}, which keeps 99 % of the rows complete" if keeps else ""
        yield Diagnosis(
            "too long",
            f"{number(too_long)} of {number(rows)} training rows are longer than data.max_length "
            f"({truncation.get('max_length')}).",
            f"Raise data.max_length{value}.",
        )


def _overfits(run: RunRecord) -> Iterable[Diagnosis]:
    held_out, train = _course(run, "eval/loss"), _course(run, "loss")
    if len(held_out) < 3 or len(train) < MIN_RECORDS or has_signals(run.last):
        return  # the loss of a method with a teacher is no measure of progress
    (step, best), last = min(held_out, key=lambda point: point[1]), held_out[-1][1]
    nearest = sorted(train, key=lambda point: abs(point[0] - step))[: max(3, len(train) // 10)]
    train_loss = math.fsum(v for _, v in nearest) / len(nearest)
    later = [v for s, v in held_out if s > step]
    rise = RISES * max(abs(best), held_out[0][1] - best)
    if len(later) >= 2 and min(later[-2:]) - best >= rise > 0 and _tenths(train)[2] < train_loss:
        yield Diagnosis(
            "overfits",
            f"The held-out loss was best at step {step} ({number(best)}) and has risen to "
            f"{number(last)}, while the training loss falls: the model overfits.",
            "Take the best checkpoint (run.keep_best, `--step best`), lower "
            f"{Advice.of(run).length_setting} or the learning rate, or use more rows.",
        )


def _little_signal(run: RunRecord) -> Iterable[Diagnosis]:
    failed = _course(run, "rollout/failed")
    if failed and (share := _tenths(failed)[2]) >= FAILED:
        advice = "Look at the errors in eval/*.json and at the reward."
        yield Diagnosis("failed", f"{share:.0%} of the completions got no score.", advice)
    tied = _course(run, "rollout/tied")
    if not Advice.of(run).compares_rewards:
        return
    if tied and (share := _tenths(tied)[2]) >= TIED:
        yield Diagnosis(
            "tied",
            f"{share:.0%} of the prompts have completions with equal rewards, which give no "
            f"gradient.",
            _sentence(*_MORE_SIGNAL, *Advice.of(run).using("dapo"), "use a finer-grained reward"),
        )


# Diagnoses from the evaluations


def _first_and_last(run: RunRecord) -> tuple[list[Json], list[Json]] | None:
    """The rows of the first and of the last evaluation; None if there are not two."""
    if run.first is None or run.last is None or run.first["step"] == run.last["step"]:
        return None
    return run.first["rows"], run.last["rows"]


def _weak_signal(run: RunRecord) -> Iterable[Diagnosis]:
    """The feedback of most rows said nothing before training. (A fixed teacher's signal is also
    small after the policy has learned it.)
    """
    if run.first is None or run.first["step"] > 0 or not has_signals(run.first):
        return
    if not run.reads_feedback:
        return
    signals = [signal for row in run.first["rows"] if (signal := value(row)) is not None]
    share = mean(map(is_weak, signals))
    if share is not None and len(signals) >= MIN_ROWS and share >= LARGE_SHARE:
        yield Diagnosis(
            "weak signal",
            f"The feedback of {share:.0%} of the held-out rows says almost nothing about the "
            "completions to this model: their signal is near zero.",
            "Read the rows under 'Feedback that says nothing'. Use a larger model or another "
            "teacher.template, or remove follow-ups that change the topic.",
        )


def _answers_change_length(run: RunRecord) -> Iterable[Diagnosis]:
    """Sampled answers of a run with a teacher become much longer or shorter."""
    if not any(map(has_teacher, run.metrics)):
        return
    pairs = [
        (sample["before"], sample["after"])
        for sample in run.samples
        if isinstance(sample.get("before"), str) and isinstance(sample.get("after"), str)
    ]
    if len(pairs) < MIN_SAMPLES:
        return
    before, after = (sum(map(len, answers)) / len(pairs) for answers in zip(*pairs, strict=True))
    advice = Advice.of(run)
    asks = "feedback" if run.reads_feedback else "teacher"
    if before > 0 and not 1 / LENGTH_DRIFT < after / before < LENGTH_DRIFT:
        yield Diagnosis(
            "length drift",
            f"Sampled answers had {number(before)} characters on average before training, and have "
            f"{number(after)} after it.",
            f"Read the answers in the report: does the {asks} ask for another length? "
            + _sentence(
                f"lower train.learning_rate or {advice.length_setting}",
                *advice.against_moving_teacher,
            ),
        )


def _completions_follow_length(run: RunRecord) -> Iterable[Diagnosis]:
    """The reward of the policy's completions follows their length, and they have become longer."""
    rows = _first_and_last(run)
    if rows and all(any(map(is_rollout, evaluation)) for evaluation in rows):
        pairs = [(value(row), row.get("tokens")) for row in rows[1]]
        known = [(r, tokens) for r, tokens in pairs if r is not None and finite(tokens)]
        before, after = (
            mean(row["tokens"] for row in evaluation if finite(row.get("tokens"))) or 0.0
            for evaluation in rows
        )
        follows = spearman(*zip(*known, strict=True)) if len(known) >= MIN_ROWS else None
        evidence = "The reward follows length (rank correlation {:.2f} on held-out prompts)"
    else:
        rewards, lengths = (dict(_course(run, name)) for name in ("reward/mean", "rollout/length"))
        steps = [step for step in rewards if step in lengths]
        if len(steps) < MIN_ROWS:
            return
        before, _, after = _tenths([(step, lengths[step]) for step in steps])
        follows = spearman([rewards[s] for s in steps], [lengths[s] for s in steps])
        evidence = "Reward and length of the rounds rise together (rank correlation {:.2f})"
    if follows is not None and follows >= FOLLOWS_LENGTH and after >= LENGTH_GROWTH * before > 0:
        yield Diagnosis(
            "length",
            f"{evidence.format(follows)}, and completions grew from {number(before)} to "
            f"{number(after)} tokens: the policy may be rewarded for length.",
            "Read the longest completions in the report. "
            + _sentence(
                "make the reward independent of length",
                "penalize length (`valence docs rewards`)",
                *Advice.of(run).using("dr_grpo"),
            ),
        )


def _rewards_follow_length(run: RunRecord) -> Iterable[Diagnosis]:
    """Offline runs: the classes differ in length, and within each class the reward has moved with
    length in that direction. (A reward is a sum over tokens: if only the label counted, long thumbs
    up would gain and long thumbs down lose, and the two would cancel.)
    """
    rows = _first_and_last(run)
    if not rows or any(map(is_rollout, rows[1])) or has_signals(run.last):
        return
    before = {row.get("id"): row for row in rows[0] if isinstance(row.get("id"), str)}
    correlations: list[float] = []
    lengths: list[float] = []
    for name, answers in groups(rows[1]).items():
        changes = [
            (now - (value(before.get(row.get("id"), {}), side) or 0.0), row[f"tokens{side}"])
            for row, side in answers
            if finite(row.get(f"tokens{side}"))
            and isinstance(row.get("id"), str)
            and (now := value(row, side)) is not None
        ]
        correlation = spearman(*zip(*changes, strict=True)) if len(changes) >= MIN_ROWS else None
        if name != "answers" and correlation is not None:
            correlations.append(correlation)
            lengths.append(math.fsum(tokens for _, tokens in changes) / len(changes))
    if len(correlations) != 2 or max(lengths) < LENGTH_GAP * min(lengths):
        return
    sign = 1 if lengths[0] > lengths[1] else -1
    # if all answers become rarer, long ones do so most: that is one diagnosis, not two
    if sign < 0 and any(_preferred_become_rarer(run)):
        return
    advice = Advice.of(run)
    is_of_pairs = advice.trains_policy_on_pairs and any(map(is_pair, rows[1]))
    if min(sign * correlation for correlation in correlations) >= FOLLOWS_LENGTH:
        yield Diagnosis(
            "length",
            f"The reward follows length more than the label: preferred answers have "
            f"{number(lengths[0])} tokens and the others {number(lengths[1])}, and within both "
            f"classes the {'longer' if sign > 0 else 'shorter'} ones gain (rank correlations "
            f"{correlations[0]:.2f} and {correlations[1]:.2f}).",
            "Look at the rewards by length in the report. "
            + _sentence(
                "balance the lengths of the rows",
                *(advice.using("dpo_norm", "simpo") if is_of_pairs else ()),
                *(["lower loss.ld_alpha"] if "ld_alpha" in advice.settings else []),
            ),
        )


def _preferred_become_rarer(run: RunRecord) -> Iterable[Diagnosis]:
    rows = _first_and_last(run)
    if not rows:
        return
    has_pairs = any(map(is_pair, rows[1]))
    means: list[float] = []
    for evaluation in rows:
        preferred = [row for row in evaluation if is_pair(row) or verdict(row) is True]
        logps = [per_token(row, "_chosen" if has_pairs else "") for row in preferred]
        average = mean(logp for logp in logps if logp is not None)
        if average is None:
            return
        means.append(average)
    if means[0] - means[1] >= RARER:
        advice = Advice.of(run)
        choices = ["lower train.learning_rate", *advice.raising("beta")]
        if not has_pairs:
            choices += advice.raising("desirable_weight")
        elif advice.trains_policy_on_pairs:
            choices += advice.raising("nll_weight") + advice.using("nca", "apo_zero", "dpop")
        yield Diagnosis(
            "rarer",
            f"Preferred answers became less likely: {number(means[0])} nats per token before, "
            f"{number(means[1])} after. The policy moves towards answers outside the data, which "
            f"nobody has rated.",
            f"Read the answers before and after: is the text still coherent? {_sentence(*choices)}",
        )


def _one_class(run: RunRecord) -> Iterable[Diagnosis]:
    rows = _first_and_last(run)
    if not rows or any(map(is_rollout, rows[1])) or any(map(is_pair, rows[1])):
        return
    if has_signals(run.last):  # which are not relative to the start
        return
    before, after = (rewards_by_class(evaluation) for evaluation in rows)
    shifts: dict[str, float] = {}
    for name in ("thumbs up", "thumbs down"):
        if (now := mean(after.get(name, ()))) is not None:
            shifts[name] = now - (mean(before.get(name, ())) or 0.0)
    if len(shifts) != 2:
        return
    (still, small), (moves, large) = sorted(shifts.items(), key=lambda shift: abs(shift[1]))
    if abs(large) >= MOVED and abs(small) < LEFT_BEHIND * abs(large):
        weight = "desirable_weight" if still == "thumbs up" else "undesirable_weight"
        yield Diagnosis(
            "one class",
            f"The mean reward of {moves} moved by {number(large)}, that of {still} by "
            f"{number(small)}: the model learns only one class.",
            _sentence(
                *(
                    f"{text} (the audit states its range)"
                    for text in Advice.of(run).raising(weight)
                ),
                "check whether those labels are reliable",
            ),
        )
