"""Counters, metrics and detectors of a run between its steps; all are part of the saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from valence.config.schema import Best, EarlyStop
from valence.errors import UserError
from valence.training.metrics import Meter


@dataclass
class Counters:
    """The progress of a run.

    settled: the last step whose evaluation and log record are complete (-1: none, not even of the
    start). total: the planned number of steps.
    """

    step: int = 0
    settled: int = -1
    total: int = 0
    tokens_seen: int = 0
    examples_seen: int = 0
    skipped_in_a_row: int = 0
    zero_gradient_steps: int = 0
    """Consecutive steps of an online run without a gradient."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # States of older versions also have the keys "first" and "firsts", the steps at which rows
        # were replaced. Only runs in which they are 0 are resumed, so they are not needed.
        for name in self.state_dict().keys() & state.keys():
            setattr(self, name, state[name])


@dataclass
class MetricsWindow:
    """Metrics, tokens and seconds of the steps since the last log record."""

    meter: Meter = field(default_factory=Meter)
    tokens_of: list[int] = field(default_factory=list[int])
    """Tokens computed by each process."""
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of phases other than steps, by name."""
    last: dict[str, float] = field(default_factory=dict[str, float])
    """Values of the last step that are logged as they are."""

    def clear(self) -> None:
        self.meter, self.tokens_of, self.seconds, self.spent, self.last = Meter(), [], 0.0, {}, {}

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Time a phase that is not a step."""
        began = time.monotonic()
        yield
        self.spent[phase] = self.spent.get(phase, 0.0) + time.monotonic() - began

    def add_tokens(self, tokens_of: Sequence[int]) -> None:
        """Add the tokens that each process computed in a step."""
        self.tokens_of = [
            a + b for a, b in zip(self.tokens_of or [0] * len(tokens_of), tokens_of, strict=True)
        ]

    def add(self, other: MetricsWindow) -> None:
        """Add the metrics of another process for the same steps."""
        for name, mean in other.meter.means.items():
            self.meter.add({name: mean})
        for name, parts in other.meter.ranked.items():
            self.meter.pool({name: parts})

    def state_dict(self) -> dict[str, Any]:
        plain = {
            "tokens_of": list(self.tokens_of),
            "seconds": self.seconds,
            "spent": dict(self.spent),
            "last": dict(self.last),
        }
        return {"meter": self.meter.state_dict(), **plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.meter = Meter()
        self.meter.load_state_dict(state["meter"])
        self.tokens_of, self.seconds, self.last = (
            list(state["tokens_of"]),
            state["seconds"],
            dict(state["last"]),
        )
        self.spent = dict(state["spent"])


class BestMetricTracker:
    """The best evaluation so far by one metric, and how many have followed it.

    criterion: the metric and whether smaller is better; None tracks nothing.
    """

    best: float | None
    step: int | None
    since: int
    saved: tuple[float | None, int | None]
    """The best value and step that have a checkpoint."""

    def __init__(self, criterion: Best | None) -> None:
        self.criterion = criterion
        self.reset()

    def reset(self) -> None:
        self.best, self.step, self.since = None, None, 0
        self.confirm()

    def confirm(self) -> None:
        """Record that the best evaluation has a checkpoint."""
        self.saved = self.best, self.step

    def withdraw(self) -> None:
        """Return to the best evaluation that has a checkpoint."""
        self.best, self.step = self.saved

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add an evaluation, and return whether it is the best so far.

        The evaluation before the first step and non-finite values are never the best. Raises
        UserError if the metric is missing.
        """
        if self.criterion is None:
            return False
        if self.criterion.metric not in metrics:
            is_early_stop = isinstance(self.criterion, EarlyStop)
            raise UserError(
                f"the evaluation has no metric {self.criterion.metric}",
                code="metric-unknown",
                where="run.early_stop" if is_early_stop else "run.keep_best",
                fix=f"use one of {', '.join(sorted(metrics))}",
            )
        if step == 0:
            return False
        value = metrics[self.criterion.metric]
        sign = 1 if self.criterion.mode == "min" else -1
        min_delta = self.criterion.min_delta if isinstance(self.criterion, EarlyStop) else 0.0
        is_better = math.isfinite(value) and (
            self.best is None or sign * (self.best - value) > min_delta
        )
        self.since = 0 if is_better else self.since + 1
        if is_better:
            self.best, self.step = value, step
        return is_better

    @property
    def exhausted(self) -> str:
        """Why training should end now; empty if it should continue."""
        if not isinstance(self.criterion, EarlyStop) or self.since < self.criterion.patience:
            return ""
        best = (
            "has had no finite value"
            if self.best is None
            else f"was best at step {self.step} ({self.best:.4g})"
        )
        return (
            f"{self.criterion.metric} {best}, and {self.since} evaluations since then were no "
            f"better"
        )

    def state_dict(self) -> dict[str, Any]:
        criterion = None if self.criterion is None else self._criterion_names(self.criterion)
        return {"of": criterion, "best": self.best, "step": self.step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.criterion is not None and state["of"] == self._criterion_names(self.criterion):
            self.best, self.step, self.since = state["best"], state["step"], state["since"]
            self.confirm()  # a state is saved together with the best checkpoint, or after it

    @staticmethod
    def _criterion_names(criterion: Best) -> list[str]:
        return [criterion.metric, criterion.mode]


SPIKE_DEVIATIONS, MIN_RECORDS, SMOOTHING = 6.0, 20, 0.95
"""Warn of a loss this many standard deviations above its running mean, after this many records;
and the weight of the old mean in each update.
"""
COLLAPSE = 0.5
"""Warn if the log-probability of preferred completions falls by this share of its first value."""


class AnomalyDetector:
    """Detect jumps of the loss, and preferred completions that become much less likely."""

    num_records: int
    mean: float
    variance: float
    chosen: float | None
    collapsed: bool

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_records, self.mean, self.variance = 0, 0.0, 0.0
        self.chosen, self.collapsed = None, False

    def update(self, record: Mapping[str, Any]) -> list[str]:
        """Add a record of the log, and return warnings."""
        warnings = (self._spike(record), self._collapse(record))
        return [warning for warning in warnings if warning]

    def _spike(self, record: Mapping[str, Any]) -> str:
        loss = record.get("loss")
        if loss is None or not math.isfinite(loss):
            return ""
        difference, deviation = loss - self.mean, math.sqrt(self.variance)
        is_spike = (
            self.num_records >= MIN_RECORDS
            and difference > SPIKE_DEVIATIONS * deviation
            and difference > 0.1 * abs(self.mean)
        )
        warning = (
            f"the loss jumped to {loss:.4g}, from {self.mean:.4g} on average (standard deviation "
            f"{deviation:.2g}): look at the rows of these steps, or lower train.learning_rate"
            if is_spike
            else ""
        )
        self.num_records += 1
        decay = min(SMOOTHING, 1 - 1 / self.num_records)
        self.variance = decay * (self.variance + (1 - decay) * difference * difference)
        self.mean += (1 - decay) * difference
        return warning

    def _collapse(self, record: Mapping[str, Any]) -> str:
        """Reads held-out rows, which are the same each time."""
        now = record.get("eval/logps/chosen")
        if now is None or self.collapsed or not math.isfinite(now):
            return ""
        if self.chosen is None:
            self.chosen = now
            return ""
        self.collapsed = now < self.chosen * (1 + COLLAPSE) and now < self.chosen - 1
        if not self.collapsed:
            return ""
        return (
            f"preferred completions have become much less likely: eval/logps/chosen fell from "
            f"{self.chosen:.4g} to {now:.4g}; lower train.learning_rate, raise loss.beta, or add "
            f"an sft term (loss.nll, mix)"
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


Phase = Literal["evaluation", "training"]


class Budget:
    """Tokens per micro-batch, which a resumed run keeps because the last bits depend on them.

    changes: (step, phase, tokens), ascending; the evaluation of a step comes before its training.
    """

    def __init__(self, tokens: int) -> None:
        self.changes: list[tuple[int, Phase, int]] = [(0, "evaluation", tokens)]

    def at(self, step: int, phase: Phase) -> int:
        return next(tokens for s, p, tokens in reversed(self.changes) if (s, p) <= (step, phase))

    def halve(self, step: int, phase: Phase) -> None:
        """Halve the tokens from here on. Raises UserError if that was done before."""
        tokens = self.changes[-1][2]
        if len(self.changes) > 1 or tokens < 2:
            raise UserError(
                f"out of memory at step {step} ({phase}), even with micro-batches of {tokens} "
                f"tokens",
                code="out-of-memory",
                where="train.micro_batch_tokens",
                fix="set train.checkpointing: full, train an adapter (model.lora), or reduce "
                "data.max_length",
            )
        self.changes.append((step, phase, tokens // 2))

    def state_dict(self) -> list[list[Any]]:
        return [list(change) for change in self.changes]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        self.changes = [(step, phase, tokens) for step, phase, tokens in state]
