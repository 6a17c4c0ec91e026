"""The forward (and backward) passes of one step, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from valence.dist.protocol import Group
from valence.engine.router import ROUTER_AUX_LOSS, num_trained_tokens
from valence.engine.scores import Scorer
from valence.losses import stats
from valence.losses.average import Average
from valence.losses.metrics import mean
from valence.losses.views import seq_view, sides, token_columns
from valence.training.rounds import Hand
from valence.types import Batch, Mean, Ranked, TokenOut

if TYPE_CHECKING:
    from valence.training.step import Objective


@dataclass(frozen=True)
class SequenceRow:
    """What one sequence measured: summed log-probabilities (nats), trained tokens, implicit reward if any; or the scores that a
    reward model gave it."""

    unit: int
    side: int
    logp: float | None
    ref: float | None
    reward: float | None
    tokens: int
    scores: tuple[float, ...] = ()


@dataclass
class Outcome:
    """What a pass over the units of one step gave, on all processes together but for what is to be pooled or gathered:
    ``metrics``, ``checks`` and ``rows`` of this process. ``distinct_tokens``: what any layout has to run; ``class_sums``: see
    there, for BCO's delta."""

    loss: Tensor
    micro_batches: int
    distinct_tokens: int
    largest: int
    tokens_of: list[int]
    """Tokens that ran through the policy, of each process."""
    metrics: dict[str, list[Mean | Ranked]] = field(default_factory=dict[str, list[Mean | Ranked]])
    checks: list[tuple[tuple[str, ...], Tensor, Tensor]] = field(default_factory=list[tuple[tuple[str, ...], Tensor, Tensor]])
    rows: list[SequenceRow] = field(default_factory=list[SequenceRow])
    class_sums: Tensor | None = None
    router_aux_loss: Tensor | None = None
    """The step's load-balancing loss of routers, without its weight, which is not part of ``loss``: the mean of the
    micro-batches' values, weighted by their tokens. None: none was computed."""

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of)

    def not_finite(self) -> list[str]:
        """Content ids of the rows whose log-probability is not finite; of all rows of a micro-batch when only its loss is not."""
        names: list[str] = []
        for ids, sequences, loss in self.checks:
            if not bool(loss):
                bad = [row for row, fine in zip(ids, sequences.tolist(), strict=True) if not fine]
                names += bad or ids
        return sorted(set(names))


@dataclass
class Pass:
    """The forward (and backward) passes of one step: what all of its micro-batches share."""

    of: Objective
    outcome: Outcome
    hand: Hand
    count: dict[Average, Tensor]
    shared: dict[str, Tensor]
    weight: float
    backward: bool
    rows: bool
    ends: bool
    entropy: bool
    progress: Callable[[Batch | None], None]
    router_tokens: int = 0
    """Tokens of the whole step, over which the load-balancing loss of routers is a mean; 0: it is off."""

    def __post_init__(self) -> None:
        self.left = self.hand.rounds

    @property
    def wants(self) -> tuple[str, ...]:
        """Outputs of the policy model that are needed besides log-probabilities."""
        return (*self.of.method.loss.wants(self.of.settings), *(["entropy"] if self.entropy else []))

    @property
    def _router_wants(self) -> tuple[str, ...]:
        return (ROUTER_AUX_LOSS,) if self.router_tokens else ()

    def alone(self) -> list[Tensor]:
        """The parts of the step's loss that this process's micro-batches have, each by itself."""

        def beside(ghost: Batch) -> None:
            self.of.compared(ghost, ghost=True)
            self._again(ghost, None)

        return self.of.rounds(self.hand, self._part, beside, self.progress)

    def _part(self, batch: Batch) -> Tensor:
        loss, settings = self.of.method.loss, self.of.settings
        ref = self.of.compared(batch)
        with torch.set_grad_enabled(self.backward):
            out = self.of.policy(batch, (*self.wants, *self._router_wants))
            if not all(batch.trains):
                self.shared |= self.of._z0(self.of.mismatched_sums(batch.part(trains=False), out, ref), self.outcome)
                batch = batch.part(trains=True)
            plain, view = loss.read(batch, out, ref, settings, self._shared_of(batch))
            part = loss.total(plain, view, settings, self.count)
            self._slope(self._with_router_term(self.weight * part, batch, out))
        self._note(batch, out, ref, plain, view, part.detach())
        return part.detach()

    def coupled(self) -> Tensor:
        """This process's share of the step's loss where it depends on sequences of all micro-batches together. Its gradient with
        respect to every log-probability comes first; each micro-batch then runs once more, backward through
        sum(logp * gradient)."""
        loss, settings, group = self.of.method.loss, self.of.settings, self.of.group
        idle = not self.hand.own
        leaves: list[Tensor] = []

        def read(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            ref = self.of.compared(batch, ghost=idle)
            with torch.no_grad():
                out = self.of.policy(batch, self.wants)
            out = replace(out, logp=out.logp.detach().requires_grad_(self.backward))
            found = loss.read(batch, out, ref, settings, self._shared_of(batch))
            if not idle:
                leaves.append(out.logp)
                self._note(batch, out, ref, *found, torch.zeros(()))
            return found

        told = (lambda _: self.progress(None)) if idle else self.progress
        reads = self.of.rounds(self.hand.never_empty, read, self.of.beside, told)
        plain, view = (_joined([found[side] for found in reads], group, idle) for side in (0, 1))
        part = loss.total(plain, view, settings, self.count)
        if self.backward:
            (self.weight * part).backward()
            slopes = iter(leaves)
            self.of.rounds(self.hand, lambda batch: self._again(batch, next(slopes).grad), lambda ghost: self._again(ghost, None))
        return part.detach() / group.size  # all of them have found the same

    def _again(self, batch: Batch, slope: Tensor | None) -> None:
        """Runs a micro-batch for its gradient alone, given the slope of its log-probabilities; None: it adds nothing."""
        with torch.set_grad_enabled(self.backward):
            out = self.of.policy(batch, () if slope is None else self._router_wants)
            said = out.logp if out.score is None else out.score
            self._slope(self._with_router_term((said * (0 if slope is None else slope)).sum(), batch, out))

    def _with_router_term(self, part: Tensor, batch: Batch, out: TokenOut) -> Tensor:
        """Add this micro-batch's share of the weighted load-balancing loss to ``part``, and record the loss."""
        loss = out.router_aux_loss
        if loss is None:
            return part
        num_tokens = num_trained_tokens(batch)
        share = num_tokens / self.router_tokens
        detached, total = loss.detach(), self.outcome.router_aux_loss
        record = Mean(num_tokens * detached, torch.full_like(detached, num_tokens))
        self.outcome.metrics.setdefault(ROUTER_AUX_LOSS, []).append(record)
        self.outcome.router_aux_loss = share * detached if total is None else total + share * detached
        return part + self.of.router_aux_loss * share * loss

    def _slope(self, part: Tensor) -> None:
        """Adds its gradient, where that is wanted. In lockstep the last of a step adds up those of all processes."""
        if not self.backward:
            return
        self.left -= 1
        if self.of.policy.lockstep:
            from valence.dist.fsdp2 import sync_gradients

            sync_gradients(self.of.policy, self.ends and self.left == 0)
        part.backward()

    def _shared_of(self, batch: Batch) -> dict[str, Tensor]:
        """What holds for the whole step, and the reference point of each sequence."""
        found = {name: values[batch.group] if name == "z0" else values for name, values in self.shared.items()}
        if "thresholds" in self.of.method.loss.reads:  # anew for each micro-batch, as each runs backward through them
            assert isinstance(self.of.policy, Scorer)
            assert self.of.policy.thresholds is not None
            found["thresholds"] = self.of.policy.thresholds
        return found

    def _note(
        self, batch: Batch, out: TokenOut, ref: Tensor | None, plain: dict[str, Tensor], view: dict[str, Tensor], part: Tensor
    ) -> None:
        """What a micro-batch measured, for the log, for guards, and for tables of rows."""
        loss, outcome = self.of.method.loss, self.outcome
        out = replace(out, logp=out.logp.detach())
        sums = seq_view(batch, token_columns(batch, out, ref))
        finite = torch.isfinite(sums["logp"] - sums["ref"] if "ref" in sums else sums["logp"])
        if out.score is not None:
            finite &= torch.isfinite(out.score.detach()).all(1)
        outcome.checks.append((batch.ids, finite, torch.isfinite(part) & finite.all()))
        for name, metric in loss.measure(batch, out, ref, plain, view, self.of.settings).items():
            outcome.metrics.setdefault(name, []).append(metric)
        if out.entropy is not None:
            outcome.metrics.setdefault("entropy", []).append(mean(out.entropy.detach()[batch.scored]))
        if loss.shifts:
            found = stats.class_sums(view)
            outcome.class_sums = found if outcome.class_sums is None else outcome.class_sums + found
        if self.rows:
            outcome.rows += (
                self._rows(batch, sums, view) if out.score is None else _scored_rows(batch, out.score.detach(), sums["n"])
            )

    def _rows(self, batch: Batch, sums: dict[str, Tensor], view: dict[str, Tensor]) -> list[SequenceRow]:
        rewards = self._rewards(batch, view)
        refs = sums["ref"].tolist() if "ref" in sums else [None] * batch.sequences
        columns = zip(
            batch.unit.tolist(), batch.side.tolist(), sums["logp"].tolist(), refs, rewards, sums["n"].tolist(), strict=True
        )
        return [SequenceRow(u, side, lp, rf, rw, int(n)) for u, side, lp, rf, rw, n in columns]

    def _rewards(self, batch: Batch, view: dict[str, Tensor]) -> Sequence[float | None]:
        """The implicit reward of each sequence, if the loss has one."""
        rewards = self.of.method.loss.rewards(view, self.of.settings)
        if rewards is None:
            return [None] * batch.sequences
        if len(rewards) == 1:
            return rewards[0].tolist()
        by_sequence = torch.empty_like(torch.cat(rewards))
        return by_sequence.index_put((torch.cat(sides(batch)),), torch.cat(rewards)).tolist()


def _scored_rows(batch: Batch, score: Tensor, n: Tensor) -> list[SequenceRow]:
    """What a reward model gave: its score is the reward where there is but one."""
    columns = zip(batch.unit.tolist(), batch.side.tolist(), n.tolist(), score.tolist(), strict=True)
    return [
        SequenceRow(unit, side, None, None, own[0] if len(own) == 1 else None, int(count), tuple(own) if len(own) > 1 else ())
        for unit, side, count, own in columns
    ]


def _joined(views: Sequence[dict[str, Tensor]], group: Group, idle: bool) -> dict[str, Tensor]:
    """The views of several micro-batches, of all processes, as one in the order of the step, which breaks ties. What has no axis
    holds for all. Only this process's part has a gradient."""
    whole = {name: torch.cat([view[name] for view in views]) for name, value in sorted(views[0].items()) if value.ndim}
    if group.size > 1:
        whole = _gathered({name: value[:0] if idle else value for name, value in whole.items()}, group)
    order = whole["unit"].argsort(stable=True)
    return {name: whole[name][order] if name in whole else value for name, value in views[0].items()}


def _gathered(own: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """All processes' values [S, ...], this process's among them as they are, with their gradient. Sent as one table in float64,
    which has every float32 and every index as it is."""
    table = torch.cat([value.detach().double().reshape(len(value), prod(value.shape[1:])) for value in own.values()], 1)
    ends = group.gather(torch.tensor([len(table)], device=table.device)).cumsum(0).tolist()
    start, end = ends[group.rank] - len(table), ends[group.rank]
    columns = group.gather(table).split([prod(value.shape[1:]) for value in own.values()], 1)
    found = {}
    for (name, value), column in zip(own.items(), columns, strict=True):
        theirs = column.reshape(-1, *value.shape[1:]).to(value.dtype)
        found[name] = torch.cat([theirs[:start], value, theirs[end:]])
    return found
