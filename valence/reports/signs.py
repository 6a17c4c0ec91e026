"""Signs that a run goes wrong, read from its log and its evaluations: each with its evidence and
with what to do.

The thresholds are rules of thumb, and the reason stands at each. A sign is a question to look at,
not a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from valence.reports.formatting import number
from valence.reports.online_signs import Sign, is_online, name_of_kl, online_signs
from valence.reports.rows import (
    Json,
    groups,
    is_own,
    is_pair,
    per_token,
    rewards_by_class,
    value,
    verdict,
)
from valence.reports.rundata import RunData
from valence.reports.stats import finite, mean, spearman

ROWS = 20
"""Rows below which a rank correlation is noise: its standard error is about 1 / sqrt(rows - 1),
here 0.23.
"""

FOLLOWS_LENGTH = 0.45
"""Rank correlation of reward and length from which length is a main reason of it: twice the
standard error at ``ROWS``.
"""

LENGTH_GAP = 1.2
"""Classes whose mean lengths differ by this factor can be told apart by length to some degree; the
audit warns from here too.
"""

GREW = 1.25
"""Answers that are a quarter longer than at the start, to the same prompts, have grown beyond what
sampling noise does.
"""

RARER = 0.1
"""Nats a token by which preferred answers may become less likely: an answer of 50 tokens is then
150 times rarer than before.
"""

FAR = 10.0
"""Nats that an answer of the policy may be away from the reference: at 10 the reference would
hardly ever say it.
"""

GROWING = 1.25
"""A divergence that gained a quarter over the last half of the run has not settled."""

SATURATES = 1.0
"""beta times nats beyond which kto's reference point has left the sigmoid's steep part.

(Below 0 is usual: it is held at 0.)
"""

MOVED, LEFT_BEHIND = 0.1, 0.1
"""A class's mean reward has moved from 0.1 on; the other is left behind when it moved by less than
a tenth of that.
"""

STUCK, STILL_GROWING = 0.999, 1.2
"""An accuracy of 1 leaves nothing to get right; margins that grow by a fifth after that are only
confidence.
"""

CUT_OFF = 0.25
"""With a quarter of the answers cut off, the reward judges fragments, and nothing teaches the
policy to end.
"""

TOO_LONG = 0.05
"""Share of training rows longer than data.max_length: beyond it what is dropped or cut is no longer
the odd row.
"""

RISES = 0.03
"""A held-out loss twice this share above its best has turned: its rows are the same each time, so
little of it is noise. (Of what it has fallen by, where that is more: a loss that went to almost
nothing moves by large shares of nothing.)
"""

FAILED, TIED = 0.1, 0.5
"""Share of answers without a score, and of prompts whose answers are all worth the same, from which
much of a round is lost.
"""

RECORDS = 10
"""Records of the log below which a course over time is not told."""


def signs(run: RunData) -> list[Sign]:
    """What is to be seen of a run, gravest first; nothing for a healthy one."""
    tests: tuple[Callable[[RunData], Iterable[Sign]], ...] = (
        _not_finite,
        _length_of_own,
        _length_of_rows,
        _rarer,
        _divergence,
        _kto_drift,
        _one_class,
        _stuck,
        _cut_off,
        _too_long,
        _overfits,
        _without_signal,
    )
    collapsed = online_signs(run.metrics)
    known = {IMPLIED[sign.name] for sign in collapsed if sign.name in IMPLIED}
    return [*collapsed, *(s for test in tests for s in test(run) if s.name not in known)]


IMPLIED = {"high kl": "divergence", "saturated reward": "tied", "no gradient": "tied"}
"""By sign of a collapsed run: the milder sign that it includes."""


def other_warnings(run: RunData, found: Sequence[Sign]) -> list[str]:
    """Warnings of the run that none of these signs repeats."""
    warnings = map(str, run.run.get("warnings", ()))
    return [line for line in warnings if not any(sign.said in line for sign in found)]


# The log


def _course(run: RunData, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in run.metrics if finite(record.get(name))]


def _ends(course: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Means of the first tenth, of the tenth in the middle, and of the last tenth. course: at least
    one.
    """
    values = [v for _, v in course]
    tenth = max(1, len(values) // 10)
    middle = (len(values) - tenth) // 2
    parts = values[:tenth], values[middle : middle + tenth], values[-tenth:]
    return tuple(math.fsum(part) / len(part) for part in parts)  # type: ignore[return-value]


def _not_finite(run: RunData) -> Iterable[Sign]:
    bad: dict[str, list[int]] = {}
    for record in run.metrics:
        for name, held in record.items():
            if held in ("nan", "inf", "-inf") or (
                isinstance(held, float) and not math.isfinite(held)
            ):
                bad.setdefault(str(name), []).append(record["step"])
    do = (
        "Look at the rows that the warnings name; use model.dtype: float32; lower "
        "train.learning_rate."
    )
    if bad:
        names = ", ".join(
            f"{name} (at {number(len(steps))} of the steps, first at {steps[0]})"
            for name, steps in bad.items()
        )
        yield Sign("not finite", f"Numbers that are not finite: {names}.", do)
    elif skipped := [step for step, share in _course(run, "skipped") if share > 0]:
        yield Sign(
            "skipped",
            f"Steps were skipped at {number(len(skipped))} records, first at step {skipped[0]}.",
            do,
        )


def _divergence(run: RunData) -> Iterable[Sign]:
    name = next((name_of_kl(each) for each in run.metrics if "rollout/length" in each), "kl")
    course = _course(run, name)
    if len(course) < RECORDS or not any(map(is_online, run.metrics)):
        return
    _, middle, last = _ends(course)
    if last >= FAR and last >= GROWING * middle:
        yield Sign(
            "divergence",
            f"The policy moves away from the reference and has not settled: {name} is "
            f"{number(last)} nats an answer, after "
            f"{number(middle)} at half of the run.",
            "Read the samples: is the text still sound? Raise loss.kl_beta, lower "
            "train.learning_rate, or stop earlier.",
        )


def _kto_drift(run: RunData) -> Iterable[Sign]:
    course = _course(run, "kl/raw")
    beta = _setting(run.config, "loss", "beta")
    if len(course) < RECORDS or not finite(beta):
        return
    last = _ends(course)[2]
    if beta * last >= SATURATES:
        yield Sign(
            "drift",
            f"Answers that do not fit their prompt have become likelier by {number(last)} nats "
            f"(kl/raw): the policy moves as a "
            "whole, not only where the verdicts say so.",
            "Lower train.learning_rate or train.epochs, or raise loss.beta.",
        )


def _setting(config: Json, *path: str) -> Any:
    found: Any = config
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _stuck(run: RunData) -> Iterable[Sign]:
    accuracy = _course(run, "rewards/accuracies")
    late = accuracy[-len(accuracy) // 3 :]
    if len(late) < RECORDS or min(v for _, v in late) < STUCK:
        return
    margins = [v for step, v in _course(run, "rewards/margins") if step >= late[0][0]]
    third = len(margins) // 3
    if third and math.fsum(margins[-third:]) >= STILL_GROWING * math.fsum(margins[:third]) > 0:
        yield Sign(
            "stuck at 1",
            f"Every training pair is right since step {late[0][0]}, and margins still grow: what "
            f"is learnt now is confidence.",
            "Stop earlier (run.keep_best, fewer epochs), raise loss.beta, use "
            "loss.label_smoothing, or ipo.",
        )


def _cut_off(run: RunData) -> Iterable[Sign]:
    course = _course(run, "rollout/truncated")
    stops = [row.get("stop") for row in run.last["rows"] if is_own(row)] if run.last else []
    share = _ends(course)[2] if course else None
    held_out = stops.count("length") / len(stops) if stops else None
    worst = max((v for v in (share, held_out) if v is not None), default=0.0)
    if worst >= CUT_OFF:
        most = _setting(run.config, "rollout", "max_new_tokens")
        where = f" at {most} tokens" if most else ""
        yield Sign(
            "cut off",
            f"{worst:.0%} of the answers are cut off{where} before they end.",
            "Raise rollout.max_new_tokens, or give cut answers a lower reward (docs/rewards.md), "
            "so that ending is learnt.",
        )


def _too_long(run: RunData) -> Iterable[Sign]:
    found = _setting(run.audit, "train", "truncation")
    rows, cut = (
        _setting(run.audit, "train", "truncation", "rows"),
        _setting(run.audit, "train", "truncation", "too_long"),
    )
    if finite(rows) and finite(cut) and rows > 0 and cut / rows >= TOO_LONG:
        keeps = found.get("keeps_99")
        raised = f" to {keeps}, which leaves 99 % of the rows whole" if keeps else ""
        yield Sign(
            "too long",
            f"{number(cut)} of {number(rows)} training rows are longer than data.max_length "
            f"({found.get('max_length')}).",
            f"Raise data.max_length{raised}.",
        )


def _overfits(run: RunData) -> Iterable[Sign]:
    held_out, train = _course(run, "eval/loss"), _course(run, "loss")
    if len(held_out) < 3 or len(train) < RECORDS:
        return
    (step, best), last = min(held_out, key=lambda each: each[1]), held_out[-1][1]
    around = [
        v
        for s, v in sorted(train, key=lambda each: abs(each[0] - step))[: max(3, len(train) // 10)]
    ]
    later = [v for s, v in held_out if s > step]
    least = RISES * max(abs(best), held_out[0][1] - best)
    if (
        len(later) >= 2
        and min(later[-2:]) - best >= least > 0
        and _ends(train)[2] < math.fsum(around) / len(around)
    ):
        yield Sign(
            "overfits",
            f"The held-out loss was best at step {step} ({number(best)}) and has risen to "
            f"{number(last)}, while that of the "
            "training rows falls: the rows are learnt by heart.",
            "Take the best checkpoint (run.keep_best, `--step best`); fewer train.epochs, a "
            "lower learning rate, or more rows.",
        )


def _without_signal(run: RunData) -> Iterable[Sign]:
    for name, most, said, do in (
        ("rollout/failed", FAILED, "of the answers got no score", "Look at the errors in "
                                                                  "eval/*.json and at the reward."),
        ("rollout/tied", TIED, "of the prompts have answers that are all worth the same, which "
                               "teach nothing",
         "Sample more (rollout.num_rollouts) or warmer, use dapo, or a reward with finer steps."),
    ):  # fmt: skip
        course = _course(run, name)
        if course and (share := _ends(course)[2]) >= most:
            yield Sign(name.rpartition("/")[2], f"{share:.0%} {said}.", do)


# Evaluations


def _pairs_of_evaluations(run: RunData) -> tuple[list[Json], list[Json]] | None:
    """The rows of the first and of the last evaluation; None where there are no two."""
    if run.first is None or run.last is None or run.first["step"] == run.last["step"]:
        return None
    return run.first["rows"], run.last["rows"]


def _length_of_own(run: RunData) -> Iterable[Sign]:
    """Own answers: the reward follows the length, and the answers to the same prompts have become
    longer.
    """
    do = (
        "Read the longest answers below. Make the reward blind to length, or let it cost "
        "(docs/rewards.md), or use dr_grpo."
    )
    both = _pairs_of_evaluations(run)
    if both and all(any(map(is_own, rows)) for rows in both):
        held = [(value(row), row.get("tokens")) for row in both[1]]
        known = [
            (reward, tokens) for reward, tokens in held if reward is not None and finite(tokens)
        ]
        before, after = (
            mean(row["tokens"] for row in rows if finite(row.get("tokens"))) for rows in both
        )
        follows = spearman(*zip(*known, strict=True)) if len(known) >= ROWS else None
        if (
            follows is not None
            and follows >= FOLLOWS_LENGTH
            and before
            and after
            and after >= GREW * before
        ):
            yield Sign(
                "length",
                f"The reward follows length (rank correlation {follows:.2f} on held-out "
                f"prompts), and answers grew from "
                f"{number(before)} to {number(after)} tokens: the policy may be paid for length.",
                do,
            )
        return
    courses = [dict(_course(run, name)) for name in ("reward/mean", "rollout/length")]
    steps = [step for step in courses[0] if step in courses[1]]
    if len(steps) < ROWS:
        return
    lengths = [(step, courses[1][step]) for step in steps]
    begins, _, ends = _ends(lengths)
    follows = spearman([courses[0][step] for step in steps], [v for _, v in lengths])
    if follows is not None and follows >= FOLLOWS_LENGTH and ends >= GREW * begins:
        yield Sign(
            "length",
            f"Reward and length of the rounds rise together (rank correlation {follows:.2f}), "
            f"and answers grew from "
            f"{number(begins)} to {number(ends)} tokens: the policy may be paid for length.",
            do,
        )


def _length_of_rows(run: RunData) -> Iterable[Sign]:
    """Stored answers: the classes differ in length, and within each class, where the verdict is the
    same, the reward has moved with length in that direction. (A reward is a sum over tokens: if
    only the verdict counted, long thumbs up would gain and long thumbs down lose, and the two would
    cancel.)
    """
    both = _pairs_of_evaluations(run)
    if not both or any(map(is_own, both[1])):
        return
    before = {row.get("id"): row for row in both[0] if isinstance(row.get("id"), str)}
    follows: list[float] = []
    lengths: list[float] = []
    for name, answers in groups(both[1]).items():
        found = [
            (now - (value(before.get(row.get("id"), {}), side) or 0.0), row[f"tokens{side}"])
            for row, side in answers
            if finite(row.get(f"tokens{side}"))
            and isinstance(row.get("id"), str)
            and (now := value(row, side)) is not None
        ]
        correlation = spearman(*zip(*found, strict=True)) if len(found) >= ROWS else None
        if name != "answers" and correlation is not None:
            follows.append(correlation)
            lengths.append(math.fsum(tokens for _, tokens in found) / len(found))
    if len(follows) != 2 or max(lengths) < LENGTH_GAP * min(lengths):
        return
    sign = 1 if lengths[0] > lengths[1] else -1
    # where all answers become rarer, long ones do so most: that is one sign, not two
    if sign < 0 and any(_rarer(run)):
        return
    if min(sign * each for each in follows) >= FOLLOWS_LENGTH:
        yield Sign(
            "length",
            f"The reward follows length more than the verdict: preferred answers have "
            f"{number(lengths[0])} tokens and the others "
            f"{number(lengths[1])}, and within both classes the "
            f"{'longer' if sign > 0 else 'shorter'} ones gain (rank "
            f"correlations {follows[0]:.2f} and {follows[1]:.2f}).",
            "Look at the rewards by length below. Balance the lengths of the rows, or use "
            "dpo_norm, simpo or loss.ld_alpha.",
        )


def _rarer(run: RunData) -> Iterable[Sign]:
    both = _pairs_of_evaluations(run)
    if not both:
        return
    names = ("_chosen",) if any(map(is_pair, both[1])) else ("",)
    means: list[float] = []
    for rows in both:
        wanted = [row for row in rows if is_pair(row) or verdict(row) is True]
        held = [
            found for row in wanted for side in names if (found := per_token(row, side)) is not None
        ]
        if not held:
            return
        means.append(math.fsum(held) / len(held))
    if means[0] - means[1] >= RARER:
        pairs = any(map(is_pair, both[1]))
        others = (
            "add loss.nll_weight, or use nca, apo_zero or dpop"
            if pairs
            else "or raise loss.desirable_weight"
        )
        yield Sign(
            "rarer",
            f"Preferred answers became less likely: {number(means[0])} nats a token before, "
            f"{number(means[1])} after. The "
            "policy moves away from all answers of the data, and what it says instead was never "
            "judged.",
            f"Read the answers before and after: is the text still sound? Lower "
            f"train.learning_rate, raise loss.beta, {others}.",
        )


def _one_class(run: RunData) -> Iterable[Sign]:
    both = _pairs_of_evaluations(run)
    if not both or any(map(is_own, both[1])) or any(map(is_pair, both[1])):
        return
    before, after = (rewards_by_class(rows) for rows in both)
    shifts: dict[str, float] = {}
    for name in ("thumbs up", "thumbs down"):
        if (now := mean(after.get(name, ()))) is not None:
            shifts[name] = now - (mean(before.get(name, ())) or 0.0)
    if len(shifts) != 2:
        return
    (still, least), (moves, most) = sorted(shifts.items(), key=lambda each: abs(each[1]))
    if abs(most) >= MOVED and abs(least) < LEFT_BEHIND * abs(most):
        weight = "desirable_weight" if still == "thumbs up" else "undesirable_weight"
        yield Sign(
            "one class",
            f"The mean reward of {moves} moved by {number(most)}, that of {still} by "
            f"{number(least)}: only one class is learnt.",
            f"Raise loss.{weight} (the audit says in which range), or look at whether those "
            f"verdicts can be trusted.",
        )
