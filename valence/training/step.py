"""One optimizer step: count, statistics, forward, loss, backward, clip, update. Nothing else changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from valence.data.forest import planted
from valence.data.mismatch import mismatch, mismatch_groups
from valence.data.pack import collate, pack, strands
from valence.dist.protocol import Group
from valence.engine.logprobs import Engine
from valence.engine.reference import Reference
from valence.engine.scores import Scorer
from valence.losses import stats
from valence.losses.average import Average, counts, divisors
from valence.losses.metrics import mean
from valence.losses.views import seq_view, token_columns
from valence.training.methods import Method
from valence.types import Batch, Encoded, Mean, Ranked, TokenOut


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
    """What a pass over the units of one step gave. ``metrics`` are to be pooled over micro-batches; ``tokens`` are those that ran
    through the policy, ``distinct_tokens`` those that any layout has to run; ``class_sums``: see there, for BCO's delta."""

    loss: Tensor
    micro_batches: int
    tokens: int
    distinct_tokens: int
    largest: int
    metrics: dict[str, list[Mean | Ranked]] = field(default_factory=dict[str, list[Mean | Ranked]])
    checks: list[tuple[tuple[str, ...], Tensor, Tensor]] = field(default_factory=list[tuple[tuple[str, ...], Tensor, Tensor]])
    rows: list[SequenceRow] = field(default_factory=list[SequenceRow])
    class_sums: Tensor | None = None

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
    shift: stats.RewardShift = field(default_factory=stats.RewardShift)

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
    def mismatched_sums(self, batch: Batch, out: TokenOut, ref: Tensor | None) -> Tensor:
        """Sums and counts of the mismatched sequences of a micro-batch, by reference point: [2, groups]."""
        assert self.method.loss.statistic is not None
        _, sums = self.method.loss.read(batch, out, ref, self.settings, view="seq")
        return self.method.loss.statistic(sums["logp"], sums["ref"], batch.group, batch.groups)

    @torch.no_grad()
    def apart(
        self, units: Sequence[Encoded], groups: Sequence[int], progress: Callable[[Batch], None]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Mismatched units in passes of their own: micro-batches and their sums."""
        assert self.reference is not None
        for batch in self.batches(units, groups):
            sums = self.mismatched_sums(batch, self.policy(batch), self.reference(batch))
            progress(batch)
            yield batch, sums

    def run(
        self,
        units: Sequence[Encoded],
        following: Iterable[Encoded] = (),
        *,
        backward: bool,
        rows: bool = False,
        weight: float = 1.0,
        progress: Callable[[Batch], None] = lambda _: None,
    ) -> Outcome:
        """The loss of a step's units (in canonical order) and its metrics; ``backward`` adds gradients of weight * loss."""
        extra: list[Encoded] = []
        groups: list[int] | None = None
        if self.method.mismatches:
            extra, groups = self.mismatched(units, following)
        batches = self.laid_out(units, extra if backward else (), groups)
        outcome = Outcome(
            loss=torch.zeros(()),
            micro_batches=len(batches),
            tokens=sum(len(batch.tokens) for batch in batches),
            distinct_tokens=planted([strand for unit in (*units, *extra) for strand in strands(unit)]),
            largest=max(len(batch.tokens) for batch in batches),
        )
        count, shared = self._counted([batch.part(trains=True) for batch in batches])
        if "delta" in shared:
            outcome.metrics["delta"] = [mean(shared["delta"][None])]
        if groups and all(batches[0].trains):
            passes = list(self.apart(extra, groups, progress))
            outcome.tokens += sum(len(batch.tokens) for batch, _ in passes)
            shared |= self._z0(torch.stack([found for _, found in passes]).sum(0), outcome)
        step = _Pass(self, outcome, count, shared, weight=weight, backward=backward, rows=rows, progress=progress)
        if self.method.loss.couples and len(batches) > 1:
            parts = [step.coupled(batches)]
        else:
            parts = [step.alone(batch) for batch in batches]
        outcome.loss = self.group.sum(_wide(torch.stack(parts)).sum())
        if outcome.class_sums is not None:
            outcome.class_sums = self.group.sum(outcome.class_sums)
        return outcome

    def learn(self, outcome: Outcome) -> None:
        """Takes what a step measured into the running statistics, after it was applied."""
        if outcome.class_sums is not None:
            self.shift = self.shift.after(outcome.class_sums, self.settings["beta"])

    def _counted(self, batches: Sequence[Batch]) -> tuple[dict[Average, Tensor], dict[str, Tensor]]:
        """What the whole step's averages divide by, and what its losses share that needs no forward pass."""
        loss = self.method.loss
        names = loss.averages(self.settings)
        count = divisors(names, self.group.sum(counts(names, batches)))
        shared: dict[str, Tensor] = {}
        if loss.shifts:
            shared["delta"] = torch.tensor(self.shift.delta, device=self.policy.device)
        if loss.credit is not None:
            scores = _wide(torch.cat([batch.target[:, 0] for batch in batches if batch.target is not None]))
            shared["moments"] = stats.moments(self.group.sum(stats.powers(scores)))
        return count, shared

    def _z0(self, sums: Tensor, outcome: Outcome) -> dict[str, Tensor]:
        """kto's reference points z0 [groups] (nats), of which the metrics also tell the unclamped value."""
        z0, raw = stats.reference_point(self.group.sum(sums))
        outcome.metrics |= {"kl": [mean(z0)], "kl/raw": [mean(raw)]}
        return {"z0": z0}


@dataclass
class _Pass:
    """The forward (and backward) passes of one step: what all of its micro-batches share."""

    of: Objective
    outcome: Outcome
    count: dict[Average, Tensor]
    shared: dict[str, Tensor]
    weight: float
    backward: bool
    rows: bool
    progress: Callable[[Batch], None]

    def alone(self, batch: Batch) -> Tensor:
        """A micro-batch's part of the step's loss."""
        loss, settings = self.of.method.loss, self.of.settings
        ref = self.of.reference(batch) if self.of.reference else None
        with torch.set_grad_enabled(self.backward):
            out = self.of.policy(batch, loss.wants(settings))
            if not all(batch.trains):
                self.shared |= self.of._z0(self.of.mismatched_sums(batch.part(trains=False), out, ref), self.outcome)
                batch = batch.part(trains=True)
            plain, view = loss.read(batch, out, ref, settings, self._shared_of(batch))
            part = loss.total(plain, view, settings, self.count)
            if self.backward:
                (self.weight * part).backward()
        self._note(batch, out, ref, plain, view, part.detach())
        return part.detach()

    def coupled(self, batches: Sequence[Batch]) -> Tensor:
        """The step's loss where it depends on sequences of all micro-batches together. Its gradient with respect to every
        log-probability comes first; each micro-batch then runs once more, backward through sum(logp * gradient)."""
        loss, settings = self.of.method.loss, self.of.settings
        leaves: list[Tensor] = []
        reads: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        for batch in batches:
            ref = self.of.reference(batch) if self.of.reference else None
            with torch.no_grad():
                out = self.of.policy(batch, loss.wants(settings))
            out = replace(out, logp=out.logp.detach().requires_grad_(self.backward))
            leaves.append(out.logp)
            reads.append(loss.read(batch, out, ref, settings, self._shared_of(batch)))
            self._note(batch, out, ref, *reads[-1], torch.zeros(()))
        plain, view = (_joined([read[side] for read in reads]) for side in (0, 1))
        part = loss.total(plain, view, settings, self.count)
        if self.backward:
            (self.weight * part).backward()
            for batch, leaf in zip(batches, leaves, strict=True):
                (self.of.policy(batch).logp * leaf.grad).sum().backward()
        return part.detach()

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
        for name, metric in loss.measure(batch, out, ref, plain, self.of.settings).items():
            outcome.metrics.setdefault(name, []).append(metric)
        if loss.shifts:
            found = stats.class_sums(view)
            outcome.class_sums = found if outcome.class_sums is None else outcome.class_sums + found
        if self.rows:
            outcome.rows += self._rows(batch, sums) if out.score is None else _scored_rows(batch, out.score.detach(), sums["n"])
        self.progress(batch)

    def _rows(self, batch: Batch, sums: dict[str, Tensor]) -> list[SequenceRow]:
        reward = self.of.method.loss.reward
        rewards = reward(sums, self.of.settings).tolist() if reward else [None] * batch.sequences
        refs = sums["ref"].tolist() if "ref" in sums else [None] * batch.sequences
        columns = zip(
            batch.unit.tolist(), batch.side.tolist(), sums["logp"].tolist(), refs, rewards, sums["n"].tolist(), strict=True
        )
        return [SequenceRow(u, side, lp, rf, rw, int(n)) for u, side, lp, rf, rw, n in columns]


def _scored_rows(batch: Batch, score: Tensor, n: Tensor) -> list[SequenceRow]:
    """What a reward model gave: its score is the reward where there is but one."""
    columns = zip(batch.unit.tolist(), batch.side.tolist(), n.tolist(), score.tolist(), strict=True)
    return [
        SequenceRow(unit, side, None, None, own[0] if len(own) == 1 else None, int(count), tuple(own) if len(own) > 1 else ())
        for unit, side, count, own in columns
    ]


def _wide(values: Tensor) -> Tensor:
    """In float64, where the device has it: the last bits of a sum then do not depend on how the step was cut."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _joined(views: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The views of several micro-batches as one, in the order of the step, which breaks ties. What has no axis holds for all."""
    order = torch.cat([view["unit"] for view in views]).argsort(stable=True)
    return {name: torch.cat([view[name] for view in views])[order] if value.ndim else value for name, value in views[0].items()}


@dataclass(frozen=True)
class Share:
    """What another method adds to a step: weight * its loss over units of its own. ``name``: of its numbers in the log."""

    name: str
    objective: Objective
    weight: float
    units: Sequence[Encoded]
    following: Iterable[Encoded]


def _with_share(whole: Outcome, share: Share, own: Outcome) -> Outcome:
    """The outcome of a step with that of one of its shares, whose numbers keep names of their own."""
    metrics = {f"{share.name}/{name}": parts for name, parts in (own.metrics | {"loss": [mean(own.loss[None])]}).items()}
    return replace(
        whole,
        loss=whole.loss + share.weight * own.loss,
        micro_batches=whole.micro_batches + own.micro_batches,
        tokens=whole.tokens + own.tokens,
        distinct_tokens=whole.distinct_tokens + own.distinct_tokens,
        largest=max(whole.largest, own.largest),
        metrics=whole.metrics | metrics,
        checks=whole.checks + own.checks,
    )


def optimizer_step(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Encoded],
    following: Iterable[Encoded],
    clip_norm: float | None,
    shares: Sequence[Share] = (),
) -> tuple[Outcome, float, bool]:
    """One update of the policy. Returns what was measured, the gradient's norm before clipping, and whether it was applied.

    A loss or gradient that is not finite leaves the weights and the optimizer as they were.
    """
    optimizer.zero_grad(set_to_none=True)
    outcome = objective.run(units, following, backward=True)
    learnt = [(objective, outcome)]
    for share in shares:
        own = share.objective.run(share.units, share.following, backward=True, weight=share.weight)
        learnt.append((share.objective, own))
        outcome = _with_share(outcome, share, own)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm if clip_norm is not None else float("inf"))
    size, loss = torch.stack([norm.to(outcome.loss), outcome.loss]).tolist()  # the one time that the device is waited for
    applied = math.isfinite(size) and math.isfinite(loss)
    if applied:
        optimizer.step()
        for each, own in learnt:
            each.learn(own)
    optimizer.zero_grad(set_to_none=True)
    return outcome, size, applied
