"""The first sentence of a report: whether held-out behaviour improved, by how much, and with what
confidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from valence.reports.charts import equals_reference
from valence.reports.formatting import number
from valence.reports.rows import is_pair, is_rollout, margin, per_token, value, verdict
from valence.reports.rundata import FILES, RunData, read_run
from valence.reports.stats import (
    Z95,
    auc,
    auc_interval,
    finite,
    mean,
    mean_interval,
    spearman,
    wilson,
)

Json = Mapping[str, Any]
State = Literal["improved", "worse", "unclear", "unmeasured"]

MIN_ROWS = 2
"""Rows of a kind that an interval needs."""


@dataclass(frozen=True)
class Verdict:
    """The result of a run on held-out rows.

    state: improved or worse if the 95 % interval excludes no change; unclear if it includes it;
    unmeasured without rows.
    value, low, high: the measured number and its 95 % interval. baseline: the value of no change.
    count: held-out rows.
    sentence: all of this in words. advice: what to do or to consider.
    """

    state: State
    sentence: str
    advice: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    count: int = 0

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return {
            "improved": "Improved on held-out data",
            "worse": "Worse on held-out data",
            "unclear": "No clear change on held-out data",
            "unmeasured": "Not measured on held-out data",
        }[self.state]


def run_verdict(run: RunData) -> Verdict:
    """The verdict on a run, with advice for what its folder holds."""
    return held_out_verdict(run.first, run.last, has_answers=bool(run.samples))


def held_out_verdict(
    first: Json | None, last: Json | None, *, has_answers: bool = False
) -> Verdict:
    """Compare a run's last evaluation with its first one, or with chance where the run started
    there.

    first is last if there was only one evaluation; both are None if there was none.
    has_answers: the run has answers to held-out prompts, which the advice can mention.
    """
    if last is None:
        return Verdict(
            "unmeasured",
            "No rows were held out, so this report cannot say whether the model is better.",
            "Move a fifth of your rows, with other prompts, into a separate file, and set "
            "data.eval to it.",
        )
    after, before = last["rows"], first["rows"] if first is not None and first is not last else None
    if verdict := _of_completions(after, before):
        return verdict
    for of_kind in (_of_thumbs, _of_pairs, _of_scores, _of_demonstrations):
        if verdict := of_kind(after, before):
            return replace(verdict, advice=f"{verdict.advice} {_next_step(after, has_answers)}")
    return Verdict(
        "unmeasured",
        f"The {number(len(after))} held-out rows are too few, or of a kind without a metric.",
        "Hold out at least 50 rows.",
    )


def _next_step(rows: Sequence[Json], has_answers: bool) -> str:
    """What to read in addition to the number."""
    if _is_of_reward_model(rows):
        return "Read the most surprising rows in the report."
    if has_answers:
        return "Read the answers in the report."
    return (
        "To read answers as well, set run.samples.prompts in the recipe, or sample from both "
        "models: `valence sample RUN`, and `valence sample RECIPE` for the model before training."
    )


def _is_of_reward_model(rows: Sequence[Json]) -> bool:
    return any(name.startswith("scores") for row in rows for name in row)


def _state(low: float, high: float, baseline: float) -> State:
    return "improved" if low > baseline else "worse" if high < baseline else "unclear"


def _interval(low: float, high: float) -> str:
    return f"95 % interval {low:.2f} to {high:.2f}"


RANKING = "Ranking held-out rows well is not the same as answering well."


def _of_completions(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """The reward of the policy's own completions, before and after, paired by prompt."""
    if first is None or not any(map(is_rollout, last)):
        return None
    pairs = _paired({**_by_id(first, value)}, {**_by_id(last, value)})
    if len(pairs) < MIN_ROWS:
        return None
    changes = [after - before for before, after in pairs]
    low, high = mean_interval(changes)
    before, after = mean(b for b, _ in pairs), mean(a for _, a in pairs)
    assert before is not None
    assert after is not None
    return Verdict(
        _state(low, high, 0.0),
        f"The mean reward on {number(len(pairs))} held-out prompts went from {before:.3g} to "
        f"{after:.3g} "
        f"(change {_signed(after - before)}, 95 % interval {_signed(low)} to {_signed(high)}).",
        "Read the answers in the report: a policy that exploits the reward looks the same as one "
        "that has learned the task.",
        after - before, low, high, 0.0, len(pairs),
    )  # fmt: skip


def _of_thumbs(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """How well the reward ranks thumbs up above thumbs down."""
    after = _thumbs(last)
    if after is None:
        return None
    ups, downs = after
    now, (low, high) = auc(ups, downs), auc_interval(auc(ups, downs), len(ups), len(downs))
    earlier = _thumbs(first) if first is not None else None
    before = auc(*earlier) if earlier else 0.5
    return Verdict(
        _state(low, high, before),
        f"The model ranks a liked answer above a disliked one {_percent(now)} % of the time "
        f"(95 % interval {_percent(low)} to {_percent(high)} %; chance is 50 %; AUC {now:.2f} on "
        f"{number(len(ups) + len(downs))} held-out rows).{_before(first, last, before)}",
        RANKING, now, low, high, before, len(ups) + len(downs),
    )  # fmt: skip


def _thumbs(rows: Sequence[Json]) -> tuple[list[float], list[float]] | None:
    rated = [
        (label, reward)
        for row in rows
        if (label := verdict(row)) is not None and (reward := value(row)) is not None
    ]
    ups = [reward for label, reward in rated if label]
    downs = [reward for label, reward in rated if not label]
    return (ups, downs) if min(len(ups), len(downs)) >= MIN_ROWS else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _before(first: Sequence[Json] | None, last: Sequence[Json], baseline: float) -> str:
    """A sentence about the value before training; empty if it was not measured."""
    if first is None:
        if _equals_reference(last):
            return " Every reward is 0: the model equals its reference."
        return ""
    if _equals_reference(first):
        return (
            f" Before training, this share is {_percent(baseline)} % by definition, because the "
            "model equals its reference."
        )
    return f" Before training: {_percent(baseline)} %."


def _equals_reference(rows: Sequence[Json]) -> bool:
    return equals_reference({"rows": rows}) and not _is_of_reward_model(rows)


def _of_pairs(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """How many pairs the reward ranks correctly."""
    hits, count = _ordered(last)
    if count < MIN_ROWS:
        return None
    low, high = wilson(hits, count)
    earlier = _ordered(first) if first is not None else (0, 0)
    before = (
        earlier[0] / earlier[1] if earlier[1] and any(margin(row) for row in first or ()) else 0.5
    )
    return Verdict(
        _state(low, high, before),
        f"The model ranks the chosen answer above the rejected one in {_percent(hits / count)} % "
        f"of {number(count)} held-out pairs (95 % interval {_percent(low)} to {_percent(high)} %; "
        f"chance is 50 %).{_before(first, last, before)}",
        RANKING, hits / count, low, high, before, count,
    )  # fmt: skip


def _ordered(rows: Sequence[Json]) -> tuple[int, int]:
    margins = [m for row in rows if is_pair(row) and (m := margin(row)) is not None]
    return sum(m > 0 for m in margins), len(margins)


def _of_scores(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """How well the reward ranks rows as their scores do."""
    pairs = [
        (reward, row["target"])
        for row in last
        if finite(row.get("target")) and (reward := value(row)) is not None
    ]
    if len(pairs) < 4 or (rank := spearman([a for a, _ in pairs], [b for _, b in pairs])) is None:
        return None
    # Fisher's transformation of a correlation, with the variance of a rank correlation (Fieller et
    # al. 1957).
    centre, half = (
        math.atanh(max(-0.999999, min(0.999999, rank))),
        Z95 * math.sqrt(1.06 / (len(pairs) - 3)),
    )
    low, high = math.tanh(centre - half), math.tanh(centre + half)
    return Verdict(
        _state(low, high, 0.0),
        f"On {number(len(pairs))} held-out rows the model's reward and the scores of the data "
        f"have a rank correlation of "
        f"{rank:.2f} ({_interval(low, high)}). 0 is chance.",
        RANKING, rank, low, high, 0.0, len(pairs),
    )  # fmt: skip


def _of_demonstrations(last: Sequence[Json], first: Sequence[Json] | None) -> Verdict | None:
    """The change of the log-probability of held-out answers, paired by row."""
    if first is None or any(is_pair(row) or verdict(row) is not None for row in last):
        return None
    pairs = _paired(_by_id(first, per_token), _by_id(last, per_token))
    if len(pairs) < MIN_ROWS:
        return None
    low, high = mean_interval([after - before for before, after in pairs])
    change = mean(after - before for before, after in pairs)
    assert change is not None
    return Verdict(
        _state(low, high, 0.0),
        f"The log-probability per token of {number(len(pairs))} held-out answers changed by "
        f"{_signed(change)} nats "
        f"(95 % interval {_signed(low)} to {_signed(high)}).",
        "Likelier held-out answers do not show that new answers are better.",
        change, low, high, 0.0, len(pairs),
    )  # fmt: skip


def _by_id(rows: Sequence[Json], measure: Any) -> dict[str, float]:
    """The mean of a measure over the rows of each id."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(row.get("id"), str) and (number := measure(row)) is not None:
            values.setdefault(row["id"], []).append(number)
    return {key: math.fsum(group) / len(group) for key, group in values.items()}


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(before[key], after[key]) for key in after if key in before]


def _signed(change: float) -> str:
    return f"{change:+.3g}"


def outputs(run_dir: Path) -> list[str]:
    """The verdict on a finished run, then one line for each file or folder that it has for its
    user.
    """
    verdict = run_verdict(read_run(run_dir))
    paths = [f"{title:>7}  {run_dir / n}" for title, n in FILES.items() if (run_dir / n).exists()]
    if verdict.state == "unmeasured":
        return paths
    return [f"{verdict.headline}. {verdict.sentence}", verdict.advice, *paths]
