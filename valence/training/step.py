"""One optimizer step: count, statistics, forward, loss, backward, clip, update. Nothing else changes a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from valence.data.forest import planted
from valence.data.mismatch import mismatch, mismatch_groups
from valence.data.pack import collate, pack, strands
from valence.dist.protocol import Group
from valence.engine.logprobs import Engine
from valence.engine.reference import Reference
from valence.losses import average, stats
from valence.losses.views import VIEWS, seq_view
from valence.training.methods import Method
from valence.types import Batch, Encoded, Mean, Ranked


@dataclass(frozen=True)
class SequenceRow:
    """What one sequence measured: summed log-probabilities (nats), trained tokens, implicit reward if any."""

    unit: int
    side: int
    logp: float
    ref: float | None
    reward: float | None
    tokens: int


@dataclass
class Outcome:
    """What a pass over the units of one step gave. ``metrics`` are to be pooled over micro-batches; ``tokens`` are those that ran
    through the policy, ``distinct_tokens`` those that any layout has to run."""

    loss: Tensor
    micro_batches: int
    tokens: int
    distinct_tokens: int
    largest: int
    metrics: dict[str, list[Mean | Ranked]] = field(default_factory=dict[str, list[Mean | Ranked]])
    checks: list[tuple[tuple[str, ...], Tensor, Tensor]] = field(default_factory=list[tuple[tuple[str, ...], Tensor, Tensor]])
    rows: list[SequenceRow] = field(default_factory=list[SequenceRow])

    def not_finite(self) -> list[str]:
        """Content ids of the rows whose log-probability is not finite; of all rows of a micro-batch when only its loss is not."""
        names: list[str] = []
        for ids, sequences, loss in self.checks:
            if not bool(loss):
                bad = [row for row, fine in zip(ids, sequences.tolist(), strict=True) if not fine]
                names += bad or ids
        return sorted(set(names))


@dataclass
class Objective:
    """A method with its settings, bound to a policy and a reference: turns units into a loss, and into gradients.

    Split invariance: the counts and statistics of the whole step over all processes are known before the first forward with a
    gradient, so ``budget`` (tokens that run at once) changes no number.
    """

    method: Method
    settings: dict[str, Any]
    policy: Engine
    reference: Reference | None
    group: Group
    budget: int
    max_length: int

    def batches(self, units: Sequence[Encoded], groups: Sequence[int] | None = None) -> list[Batch]:
        """The micro-batches of these units."""
        dealt = pack(units, self.budget)
        return [collate([units[i] for i in rows], rows, groups, self.policy.device) for rows in dealt]

    def mismatched(self, units: Sequence[Encoded], following: Iterable[Encoded]) -> tuple[list[Encoded], list[int]]:
        """The step's mismatched units and which reference point (group) each unit of the step belongs to."""
        scope = self.settings["z0_scope"]
        if scope == "step":
            return mismatch(units, following, max_length=self.max_length), [0] * len(units)
        size = scope["group"]
        found = mismatch_groups(units, size, scope["pairing"], max_length=self.max_length)
        return found, [i // size for i in range(len(units))]

    def laid_out(self, units: Sequence[Encoded], extra: Sequence[Encoded], groups: Sequence[int] | None) -> list[Batch]:
        """The micro-batches of a step that trains. Mismatched units go along where all fit one micro-batch: their prompts are
        then run once, and they are measured over those prompts' keys and values. Else they have passes of their own."""
        both = [strand for unit in (*units, *extra) for strand in strands(unit)]
        if extra and self.policy.packs and planted(both) <= self.budget:
            return [collate(units, range(len(units)), groups, self.policy.device, measured=extra)]
        return self.batches(units, groups)

    @torch.no_grad()
    def mismatched_sums(self, batch: Batch, logp: Tensor, ref: Tensor | None) -> Tensor:
        """Sums and counts of the mismatched sequences of a micro-batch, by reference point: [2, groups]."""
        assert self.method.loss.statistic is not None
        assert ref is not None
        sums = seq_view(batch, logp, ref)
        return self.method.loss.statistic(sums["logp"], sums["ref"], batch.group, batch.groups)

    @torch.no_grad()
    def apart(
        self, units: Sequence[Encoded], groups: Sequence[int], progress: Callable[[Batch], None]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Mismatched units in passes of their own: micro-batches and their sums."""
        assert self.reference is not None
        for batch in self.batches(units, groups):
            sums = self.mismatched_sums(batch, self.policy(batch).logp, self.reference(batch))
            progress(batch)
            yield batch, sums

    def run(
        self,
        units: Sequence[Encoded],
        following: Iterable[Encoded] = (),
        *,
        backward: bool,
        rows: bool = False,
        progress: Callable[[Batch], None] = lambda _: None,
    ) -> Outcome:
        """The loss of a step's units (in canonical order) and its metrics; ``backward`` adds gradients to the weights."""
        extra: list[Encoded] = []
        groups: list[int] | None = None
        if self.method.mismatches:
            extra, groups = self.mismatched(units, following)
        batches = self.laid_out(units, extra if backward else (), groups)
        count = self.group.sum(average.count(self.method.loss.average, [batch.part(trains=True) for batch in batches]))
        outcome = Outcome(
            loss=torch.zeros(()),
            micro_batches=len(batches),
            tokens=sum(len(batch.tokens) for batch in batches),
            distinct_tokens=planted([strand for unit in (*units, *extra) for strand in strands(unit)]),
            largest=max(len(batch.tokens) for batch in batches),
        )
        sums: Tensor | None = None
        if groups and all(batches[0].trains):
            passes = list(self.apart(extra, groups, progress))
            sums = torch.stack([found for _, found in passes]).sum(0)
            outcome.tokens += sum(len(batch.tokens) for batch, _ in passes)
        shared = self._shared(sums, outcome) if sums is not None else {}
        parts: list[Tensor] = []
        for batch in batches:
            parts.append(self._micro_batch(batch, shared, count, outcome, backward=backward, rows=rows))
            progress(batch)
        outcome.loss = self.group.sum(torch.stack(parts).cpu().double().sum())  # one wait for the device in a step
        return outcome

    def _shared(self, sums: Tensor, outcome: Outcome) -> dict[str, Tensor]:
        """The step's statistics for its losses: z0 [groups] (nats), of which the metrics also tell the unclamped value."""
        z0, raw = stats.reference_point(self.group.sum(sums))
        outcome.metrics |= {"kl": [_mean(z0)], "kl/raw": [_mean(raw)]}
        return {"z0": z0}

    def _micro_batch(
        self, batch: Batch, shared: dict[str, Tensor], count: Tensor, outcome: Outcome, *, backward: bool, rows: bool
    ) -> Tensor:
        """This micro-batch's part of the step's loss."""
        loss_row = self.method.loss
        ref = self.reference(batch) if self.reference else None
        with torch.set_grad_enabled(backward):
            logp = self.policy(batch).logp
            if not all(batch.trains):
                shared = self._shared(self.mismatched_sums(batch.part(trains=False), logp.detach(), ref), outcome)
                batch = batch.part(trains=True)
            view = VIEWS[loss_row.view](batch, logp, ref)
            view |= {name: values[batch.group] for name, values in shared.items()}
            loss = loss_row(view, self.settings)
            part = average.weighted_sum(loss, view["weight"]) / count
            if backward:
                part.backward()
        sums = seq_view(batch, logp.detach(), ref)
        finite = torch.isfinite(sums["logp"] - sums.get("ref", torch.zeros(())))
        outcome.checks.append((batch.ids, finite, torch.isfinite(part.detach())))
        for name, metric in loss_row.metrics(view, loss_row.reward, self.settings).items():
            outcome.metrics.setdefault(name, []).append(metric)
        if rows:
            outcome.rows += self._rows(batch, logp.detach(), ref)
        return part.detach()

    def _rows(self, batch: Batch, logp: Tensor, ref: Tensor | None) -> list[SequenceRow]:
        sums = seq_view(batch, logp, ref)
        reward = self.method.loss.reward
        rewards = reward(sums["logp"], sums["ref"], **self.settings).tolist() if reward else [None] * batch.sequences
        refs = sums["ref"].tolist() if ref is not None else [None] * batch.sequences
        columns = zip(
            batch.unit.tolist(), batch.side.tolist(), sums["logp"].tolist(), refs, rewards, sums["n"].tolist(), strict=True
        )
        return [SequenceRow(u, side, lp, rf, rw, int(n)) for u, side, lp, rf, rw, n in columns]


def optimizer_step(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Encoded],
    following: Iterable[Encoded],
    clip_norm: float | None,
    progress: Callable[[Batch], None] = lambda _: None,
) -> tuple[Outcome, float, bool]:
    """One update of the policy. Returns what was measured, the gradient's norm before clipping, and whether it was applied.

    A loss or gradient that is not finite leaves the weights and the optimizer as they were.
    """
    optimizer.zero_grad(set_to_none=True)
    outcome = objective.run(units, following, backward=True, progress=progress)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm if clip_norm is not None else float("inf"))
    applied = bool(torch.isfinite(norm)) and bool(torch.isfinite(outcome.loss))
    if applied:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return outcome, float(norm), applied


def _mean(values: Tensor) -> Mean:
    return Mean(values.sum(), values.new_tensor(values.numel()))
