"""One optimizer step: count, statistics, forward, loss, backward, clip, update. Nothing else changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from valence.data.forest import plant, planted
from valence.data.mismatch import mismatch, mismatch_groups
from valence.data.pack import collate, deal, pack, strands
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
        """This process's micro-batches of these units: of all of them those that it is dealt, by what they cost."""
        dealt = self._packed(units)
        if self.group.size > 1:
            costs = [self._cost([units[i] for i in rows]) for rows in dealt]
            dealt = [dealt[k] for k in deal(costs, self.group.size)[self.group.rank]]
        return [collate([units[i] for i in rows], rows, groups, self.policy.device) for rows in dealt]

    def _packed(self, units: Sequence[Encoded]) -> list[list[int]]:
        """The micro-batches of all processes, small enough that each process may have one."""
        whole = planted([strand for unit in units for strand in strands(unit)])
        return pack(units, max(1, min(self.budget, -(-whole // self.group.size))))

    def _cost(self, units: Sequence[Encoded]) -> float:
        """What a micro-batch costs, in tokens: attention to a context of 6 hidden sizes is as dear as a layer's products."""
        forest = plant([strand for unit in units for strand in strands(unit)])
        return len(forest.tokens) + float((forest.pos + 1).sum()) / (6 * self.policy.causal.config.get_text_config().hidden_size)

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
        if extra and self.policy.packs and self.group.size == 1 and planted(both) <= self.budget:
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
            micro_batches=0,
            distinct_tokens=planted([strand for unit in (*units, *extra) for strand in strands(unit)]),
            largest=0,
            tokens_of=[],
        )
        count, shared = self._counted([batch.part(trains=True) for batch in batches])
        if "delta" in shared:
            outcome.metrics["delta"] = [mean(shared["delta"][None])]
        ran = [len(batch.tokens) for batch in batches]
        largest = max(ran, default=0)
        if groups and all(all(batch.trains) for batch in batches):
            passes = list(self.apart(extra, groups, progress))
            ran += [len(batch.tokens) for batch, _ in passes]
            own = [found for _, found in passes] or [torch.zeros(2, max(groups) + 1, device=self.policy.device, dtype=self._type)]
            shared |= self._z0(torch.stack(own).sum(0), outcome)
        step = _Pass(self, outcome, count, shared, weight=weight, backward=backward, rows=rows, progress=progress)
        if self.method.loss.couples and (len(batches) > 1 or self.group.size > 1):
            parts = [step.coupled(batches or self._any_batch(units, groups), idle=not batches)]
        else:
            parts = [step.alone(batch) for batch in batches]
        self._together(outcome, parts, len(batches), sum(ran), largest)
        return outcome

    @property
    def _type(self) -> torch.dtype:
        """Of log-probabilities."""
        return torch.float64 if next(self.policy.parameters()).dtype == torch.float64 else torch.float32

    def _any_batch(self, units: Sequence[Encoded], groups: Sequence[int] | None) -> list[Batch]:
        """A micro-batch for a process that has none, to take part in what depends on all of them."""
        rows = self._packed(units)[0]
        return [collate([units[i] for i in rows], rows, groups, self.policy.device)]

    def _together(self, outcome: Outcome, parts: Sequence[Tensor], micro_batches: int, tokens: int, largest: int) -> None:
        """Puts together what the processes had of a step: its loss, and how much each of them ran."""
        ran = torch.zeros(2, self.group.size)
        ran[:, self.group.rank] = torch.tensor([tokens, largest])
        loss = torch.stack(list(parts)).sum() if parts else torch.zeros((), device=self.policy.device)
        told = torch.cat([_wide(loss)[None], _wide(torch.tensor([micro_batches, *ran.flatten().tolist()]).to(loss.device))])
        told = self.group.sum(told)
        outcome.loss = told[0]
        sizes = [micro_batches, tokens, largest] if self.group.size == 1 else [int(size) for size in told[1:].tolist()]
        outcome.micro_batches = sizes[0]
        outcome.tokens_of = sizes[1 : 1 + self.group.size]
        outcome.largest = max(sizes[1 + self.group.size :])
        if self.method.loss.shifts:
            own = outcome.class_sums if outcome.class_sums is not None else torch.zeros(2, 2, device=self.policy.device)
            outcome.class_sums = self.group.sum(_wide(own))

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
            found = [batch.target[:, 0] for batch in batches if batch.target is not None]
            scores = _wide(torch.cat(found) if found else torch.zeros(0, device=self.policy.device))
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

    def coupled(self, batches: Sequence[Batch], idle: bool = False) -> Tensor:
        """This process's share of the step's loss where it depends on sequences of all micro-batches together. Its gradient with
        respect to every log-probability comes first; each micro-batch then runs once more, backward through
        sum(logp * gradient). ``idle``: the batches are another process's."""
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
            if not idle:
                self._note(batch, out, ref, *reads[-1], torch.zeros(()))
        plain, view = (_joined([read[side] for read in reads], self.of.group, idle) for side in (0, 1))
        part = loss.total(plain, view, settings, self.count)
        if self.backward:
            (self.weight * part).backward()
            for batch, leaf in zip(batches, leaves, strict=True) if not idle else ():
                (self.of.policy(batch).logp * leaf.grad).sum().backward()
        return part.detach() / self.of.group.size  # all of them have found the same

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


def _joined(views: Sequence[dict[str, Tensor]], group: Group, idle: bool) -> dict[str, Tensor]:
    """The views of several micro-batches, of all processes, as one in the order of the step, which breaks ties. What has no axis
    holds for all. Only this process's part has a gradient."""
    own = {name: torch.cat([view[name] for view in views]) for name, value in sorted(views[0].items()) if value.ndim}
    whole = {name: _gathered(value[:0] if idle else value, group) for name, value in own.items()}
    order = whole["unit"].argsort(stable=True)
    return {name: whole[name][order] if name in whole else value for name, value in views[0].items()}


def _gathered(own: Tensor, group: Group) -> Tensor:
    """All processes' values [S, ...], this process's among them as they are, with their gradient."""
    if group.size == 1:
        return own
    ends = group.gather(torch.tensor([len(own)], device=own.device)).cumsum(0).tolist()
    found = group.gather(own.detach())
    return torch.cat([found[: ends[group.rank] - len(own)], own, found[ends[group.rank] :]])


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
        tokens_of=[sum(both) for both in zip(whole.tokens_of, own.tokens_of, strict=True)],
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
    objective.group.reduce_gradients(trained)
    norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm if clip_norm is not None else float("inf"))
    size, loss = torch.stack([norm.to(outcome.loss), outcome.loss]).tolist()  # the one time that the device is waited for
    applied = math.isfinite(size) and math.isfinite(loss)
    if applied:
        optimizer.step()
        for each, own in learnt:
            each.learn(own)
    optimizer.zero_grad(set_to_none=True)
    return outcome, size, applied
