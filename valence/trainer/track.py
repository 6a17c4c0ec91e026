"""What a run keeps account of between its steps. Each of these is part of its saved state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from valence.config.schema import Best, EarlyStop
from valence.errors import UserError
from valence.reports.metrics import Meter


@dataclass
class Counters:
    """Where a run stands.

    ``settled``: the step up to which evaluations are made and the log is written (-1: not even for
    the start). ``first``: the step at which the present rows began; their order starts there.
    ``firsts``: likewise of rows that `mix` adds, by their name, where it is not 0. ``total``: steps
    in all, as far as the run was to go.
    """

    step: int = 0
    settled: int = -1
    first: int = 0
    firsts: dict[str, int] = field(default_factory=dict[str, int])
    total: int = 0
    tokens_seen: int = 0
    examples_seen: int = 0
    skipped_in_a_row: int = 0
    zero_gradient_steps: int = 0
    """Steps in a row without a gradient, of an online run."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class MetricsWindow:
    """The steps since the last record: their numbers, tokens that ran, seconds, and what the last
    of them said about itself.
    """

    meter: Meter = field(default_factory=Meter)
    tokens_of: list[int] = field(default_factory=list[int])
    """Of each process."""
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of what is not a step, by its name."""
    last: dict[str, float] = field(default_factory=dict[str, float])

    def clear(self) -> None:
        self.meter, self.tokens_of, self.seconds, self.spent, self.last = Meter(), [], 0.0, {}, {}

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Around something that is not a step."""
        began = time.monotonic()
        yield
        self.spent[phase] = self.spent.get(phase, 0.0) + time.monotonic() - began

    def ran(self, tokens_of: Sequence[int]) -> None:
        """Takes in what each process ran in a step."""
        self.tokens_of = [
            a + b for a, b in zip(self.tokens_of or [0] * len(tokens_of), tokens_of, strict=True)
        ]

    def add(self, other: MetricsWindow) -> None:
        """Takes in what another process measured in the same steps."""
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
    """The best evaluation so far by one number, and how many have passed since."""

    best: float | None
    step: int | None
    since: int
    kept: tuple[float | None, int | None]
    """What was best when that was last known to have a checkpoint."""

    def __init__(self, wanted: Best | None) -> None:
        self.wanted = wanted
        self.reset()

    def reset(self) -> None:
        self.best, self.step, self.since = None, None, 0
        self.keep()

    def keep(self) -> None:
        """The best so far has a checkpoint."""
        self.kept = self.best, self.step

    def withdraw(self) -> None:
        """It has none: the best is what it was before."""
        self.best, self.step = self.kept

    def see(self, step: int, found: Mapping[str, float]) -> bool:
        """Takes in an evaluation (numbers by their name in the log); whether it is the best so far.

        That before the first step is none to choose.

        Raises UserError when it has no such number. One that is not finite is never the best.
        """
        if self.wanted is None:
            return False
        if self.wanted.metric not in found:
            where = "run.early_stop" if isinstance(self.wanted, EarlyStop) else "run.keep_best"
            names = ", ".join(sorted(found))
            raise UserError(
                f"the evaluation has no {self.wanted.metric}",
                code="metric-unknown",
                where=where,
                fix=f"name one of {names}",
            )
        if step == 0:
            return False
        value = found[self.wanted.metric]
        sign = 1 if self.wanted.mode == "min" else -1
        least = self.wanted.min_delta if isinstance(self.wanted, EarlyStop) else 0.0
        better = math.isfinite(value) and (self.best is None or sign * (self.best - value) > least)
        self.since = 0 if better else self.since + 1
        if better:
            self.best, self.step = value, step
        return better

    @property
    def exhausted(self) -> str:
        """Why training should end now; empty if it should not."""
        if not isinstance(self.wanted, EarlyStop) or self.since < self.wanted.patience:
            return ""
        best = (
            "has had no finite value"
            if self.best is None
            else f"was best at step {self.step} ({self.best:.4g})"
        )
        return (
            f"{self.wanted.metric} {best}, and {self.since} evaluations since then were no better"
        )

    def state_dict(self) -> dict[str, Any]:
        wanted = None if self.wanted is None else [self.wanted.metric, self.wanted.mode]
        return {"of": wanted, "best": self.best, "step": self.step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.wanted is not None and state["of"] == [self.wanted.metric, self.wanted.mode]:
            self.best, self.step, self.since = state["best"], state["step"], state["since"]
            self.keep()  # a state is saved with it, or after it was known to be


SPIKE, SEEN, MEMORY = 6.0, 20, 0.95
"""A loss that is so many standard deviations above its running mean is told of, once that rests on
so many records; the share of the running mean that each record leaves as it is.
"""
COLLAPSE = 0.5
"""Share of their first log-probability by which preferred answers may become less likely (in nats:
half as many again).
"""


class AnomalyDetector:
    """Looks out for a loss that jumps, and for preferred answers that become much less likely than
    they were.
    """

    seen: int
    mean: float
    variance: float
    chosen: float | None
    collapsed: bool

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen, self.mean, self.variance = 0, 0.0, 0.0
        self.chosen, self.collapsed = None, False

    def see(self, record: Mapping[str, Any]) -> list[str]:
        """Takes in a record of the log; what there is to warn of."""
        return [said for said in (self._spike(record), self._collapse(record)) if said]

    def _spike(self, record: Mapping[str, Any]) -> str:
        loss = record.get("loss")
        if loss is None or not math.isfinite(loss):
            return ""
        off, spread = loss - self.mean, math.sqrt(self.variance)
        spike = self.seen >= SEEN and off > SPIKE * spread and off > 0.1 * abs(self.mean)
        said = (
            f"the loss jumped to {loss:.4g}, from {self.mean:.4g} on average (deviation "
            f"{spread:.2g})"
            if spike
            else ""
        )
        self.seen += 1
        keep = min(MEMORY, 1 - 1 / self.seen)
        self.variance = keep * (self.variance + (1 - keep) * off * off)
        self.mean += (1 - keep) * off
        return (
            f"{said}: look at the rows of these steps, or lower train.learning_rate" if said else ""
        )

    def _collapse(self, record: Mapping[str, Any]) -> str:
        """By held-out rows where there are any, which are the same every time."""
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
            f"preferred answers have become much less likely: eval/logps/chosen fell from "
            f"{self.chosen:.4g} to {now:.4g}; "
            "lower train.learning_rate, raise loss.beta, or add an sft term (loss.nll, mix)"
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


Phase = Literal["evaluation", "training"]


class Budget:
    """Tokens that run at once, and from where on: the last bits of a result depend on it, so a run
    that is taken up keeps it.

    ``changes``: (step, phase, tokens), ascending; at each step the evaluation comes before the
    training.
    """

    def __init__(self, tokens: int) -> None:
        self.changes: list[tuple[int, Phase, int]] = [(0, "evaluation", tokens)]

    def at(self, step: int, phase: Phase) -> int:
        return next(tokens for s, p, tokens in reversed(self.changes) if (s, p) <= (step, phase))

    def halve(self, step: int, phase: Phase) -> None:
        """Raises UserError when that was done before."""
        tokens = self.changes[-1][2]
        if len(self.changes) > 1 or tokens < 2:
            raise UserError(
                f"out of memory at step {step} ({phase}), also with {tokens} tokens at once",
                code="out-of-memory",
                where="train.micro_batch_tokens",
                fix="set train.checkpointing: full, model.lora, or a smaller data.max_length",
            )
        self.changes.append((step, phase, tokens // 2))

    def state_dict(self) -> list[list[Any]]:
        return [list(change) for change in self.changes]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        self.changes = [(step, phase, tokens) for step, phase, tokens in state]
