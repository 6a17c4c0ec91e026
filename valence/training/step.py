"""One optimizer step: count, statistics, forward, loss, backward, clip, update. Nothing else changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from valence.data.forest import plant, planted
from valence.data.mismatch import mismatch, mismatch_groups
from valence.data.pack import collate, deal, pack, strands
from valence.dist.protocol import Group
from valence.engine.cache import Cached
from valence.engine.gradients import clear
from valence.engine.logprobs import Engine
from valence.engine.reference import Reference
from valence.errors import UserError
from valence.losses import stats
from valence.losses.average import Average, counts, divisors
from valence.losses.metrics import mean
from valence.training.methods import Method
from valence.training.passes import Outcome, Pass, SequenceRow
from valence.training.rounds import Found, Hand, in_rounds, in_turn, no_way_back
from valence.types import Batch, Encoded, TokenOut, sent


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
    router_aux_loss: float = 0.0
    """Weight of the load-balancing loss of routers in a step that trains. It is a product of means over the tokens of one
    micro-batch, so that above 0 the loss of a step depends on ``budget``."""

    def batches(self, units: Sequence[Encoded], groups: Sequence[int] | None = None) -> list[Batch]:
        """This process's micro-batches of these units."""
        return self.hand(units, groups).own

    def hand(self, units: Sequence[Encoded], groups: Sequence[int] | None = None) -> Hand:
        """What this process is dealt of the micro-batches of these units, by what they cost."""
        packed, size = self._packed(units), self.group.size
        costs = [self._cost([units[i] for i in rows]) if size > 1 else 1.0 for rows in packed]
        hands = in_turn(costs, size) if self.policy.lockstep else deal(costs, size)
        rounds = max(len(own) for own in hands)
        dealt = [packed[k] for k in hands[self.group.rank]]
        batches = [collate([units[i] for i in rows], rows, groups, self.policy.device) for rows in dealt]
        ghost = None
        if len(dealt) < rounds and (self.policy.lockstep or (self.method.loss.couples and not dealt)):
            cheapest = min(range(len(units)), key=lambda i: units[i].tokens)
            ghost = collate([units[cheapest]], [cheapest], groups, self.policy.device)
        return Hand(batches, rounds, ghost)

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

    def laid_out(self, units: Sequence[Encoded], extra: Sequence[Encoded], groups: Sequence[int] | None) -> Hand:
        """The micro-batches of a step that trains. Mismatched units go along where all fit one micro-batch: their prompts are
        then run once, and they are measured over those prompts' keys and values. Else they have passes of their own."""
        both = [strand for unit in (*units, *extra) for strand in strands(unit)]
        if extra and self.policy.packs and self.group.size == 1 and planted(both) <= self.budget:
            return Hand([collate(units, range(len(units)), groups, self.policy.device, measured=extra)], 1)
        return self.hand(units, groups)

    @torch.no_grad()
    def mismatched_sums(self, batch: Batch, out: TokenOut, ref: Tensor | None) -> Tensor:
        """Sums and counts of the mismatched sequences of a micro-batch, by reference point: [2, groups]."""
        assert self.method.loss.statistic is not None
        _, sums = self.method.loss.read(batch, out, ref, self.settings, view="seq")
        return self.method.loss.statistic(sums["logp"], sums["ref"], batch.group, batch.groups)

    @torch.no_grad()
    def apart(
        self, units: Sequence[Encoded], groups: Sequence[int], progress: Callable[[Batch | None], None]
    ) -> list[tuple[Batch, Tensor]]:
        """Mismatched units in passes of their own: this process's micro-batches and their sums."""

        def sums(batch: Batch) -> tuple[Batch, Tensor]:
            ref = self.compared(batch)
            return batch, self.mismatched_sums(batch, self.policy(batch), ref)

        return self.rounds(self.hand(units, groups), sums, self.beside, progress)

    def rounds(
        self,
        hand: Hand,
        run: Callable[[Batch], Found],
        beside: Callable[[Batch], object],
        progress: Callable[[Batch | None], None] = lambda _: None,
    ) -> list[Found]:
        """What ``run`` makes of each of this process's micro-batches. beside: the same passes over a ghost, for lockstep."""
        return in_rounds(hand, self.group, run, beside if self.policy.lockstep else None, progress, self.policy.shared)

    @torch.no_grad()
    def beside(self, ghost: Batch) -> None:
        """Takes part in what the other processes measure."""
        self.compared(ghost, ghost=True)
        self.policy(ghost)

    def compared(self, batch: Batch, *, ghost: bool = False) -> Tensor | None:
        """The reference's log-probabilities, if there is one. ghost: nothing is looked up or kept for these rows."""
        if ghost and isinstance(self.reference, Cached):
            return self.reference.beside(batch)
        return self.reference(batch) if self.reference else None

    def run(
        self,
        units: Sequence[Encoded],
        following: Iterable[Encoded] = (),
        *,
        backward: bool,
        rows: bool = False,
        weight: float = 1.0,
        ends: bool = True,
        entropy: bool = False,
        progress: Callable[[Batch | None], None] = lambda _: None,
        router_tokens: int | None = None,
    ) -> Outcome:
        """The loss of a step's units (in canonical order) and its metrics; ``backward`` adds gradients of weight * loss, and of
        the weighted load-balancing loss of routers. ends: nothing more is added to them in this step. entropy: also measure that
        of the policy. progress: called by all processes equally often. router_tokens: tokens over which the load-balancing loss
        is averaged, if not those of these units."""
        extra: list[Encoded] = []
        groups: list[int] | None = None
        if self.method.mismatches:
            extra, groups = self.mismatched(units, following)
        hand = self.laid_out(units, extra if backward else (), groups)
        batches = hand.own
        outcome = Outcome(
            loss=torch.zeros(()),
            micro_batches=0,
            distinct_tokens=planted([strand for unit in (*units, *extra) for strand in strands(unit)]),
            largest=0,
            tokens_of=[],
        )
        count, shared = self._counted([batch.part(trains=True) for batch in batches])
        if "delta" in shared and self.group.rank == 0:
            outcome.metrics["delta"] = [mean(shared["delta"][None])]
        ran = [len(batch.tokens) for batch in batches]
        largest = max(ran, default=0)
        if groups and all(all(batch.trains) for batch in batches):  # of all processes alike
            passes = self.apart(extra, groups, progress)
            ran += [len(batch.tokens) for batch, _ in passes]
            own = [found for _, found in passes] or [torch.zeros(2, max(groups) + 1, device=self.policy.device, dtype=self._type)]
            shared |= self._z0(torch.stack(own).sum(0), outcome)
        step = Pass(
            self, outcome, hand, count, shared, weight=weight, backward=backward, rows=rows, ends=ends,
            entropy=entropy and not self.method.of_scores, progress=progress,
            router_tokens=(router_tokens or num_tokens(units)) if backward and self.router_aux_loss else 0,
        )  # fmt: skip
        parts = [step.coupled()] if self.method.loss.couples and (hand.rounds > 1 or self.group.size > 1) else step.alone()
        self._together(outcome, parts, len(batches), sum(ran), largest)
        if step.router_tokens:
            local = outcome.router_aux_loss
            outcome.router_aux_loss = self.group.sum(
                _wide(torch.zeros((), device=self.policy.device) if local is None else local)
            )
        return outcome

    @property
    def _type(self) -> torch.dtype:
        """Of log-probabilities."""
        return torch.float64 if next(self.policy.parameters()).dtype == torch.float64 else torch.float32

    def _together(self, outcome: Outcome, parts: Sequence[Tensor], micro_batches: int, tokens: int, largest: int) -> None:
        """Puts together what the processes had of a step: its loss, and how much each of them ran."""
        ran = [[0] * self.group.size, [0] * self.group.size]
        ran[0][self.group.rank], ran[1][self.group.rank] = tokens, largest
        loss = _wide(torch.stack(list(parts)).sum() if parts else torch.zeros((), device=self.policy.device))
        own = torch.tensor([micro_batches, *ran[0], *ran[1]], dtype=loss.dtype)
        told = self.group.sum(torch.cat([loss[None], sent(own, loss.device)]))
        outcome.loss = told[0]
        sizes = [micro_batches, tokens, largest] if self.group.size == 1 else [int(size) for size in told[1:].tolist()]
        outcome.micro_batches = sizes[0]
        outcome.tokens_of = sizes[1 : 1 + self.group.size]
        outcome.largest = max(sizes[1 + self.group.size :])
        if self.method.loss.shifts:
            sums = outcome.class_sums if outcome.class_sums is not None else torch.zeros(2, 2, device=self.policy.device)
            outcome.class_sums = self.group.sum(_wide(sums))

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
            shared["delta"] = torch.full((), self.shift.delta, device=self.policy.device)
        if loss.credit is not None:
            found = [batch.target[:, 0] for batch in batches if batch.target is not None]
            scores = _wide(torch.cat(found) if found else torch.zeros(0, device=self.policy.device))
            shared["moments"] = stats.moments(self.group.sum(stats.powers(scores)))
        return count, shared

    def _z0(self, sums: Tensor, outcome: Outcome) -> dict[str, Tensor]:
        """kto's reference points z0 [groups] (nats), of which the metrics also tell the unclamped value."""
        z0, raw = stats.reference_point(self.group.sum(sums))
        if self.group.rank == 0:  # it is that of all
            outcome.metrics |= {"kl": [mean(z0)], "kl/raw": [mean(raw)]}
        return {"z0": z0}


def num_tokens(units: Sequence[Encoded]) -> int:
    """Return the number of tokens of all sequences, a shared one once per sequence."""
    return sum(unit.tokens for unit in units)


def _wide(values: Tensor) -> Tensor:
    """In float64, where the device has it: the last bits of a sum then do not depend on how the step was cut."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def clip(parameters: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Shortens gradients of this norm to at most this norm."""
    for mesh in {getattr(p, "device_mesh", None) for p in parameters}:  # no others with those split over the same processes
        clip_grads_with_norm_([p for p in parameters if getattr(p, "device_mesh", None) == mesh], most, norm)


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
    of_all = {"loss": [mean(own.loss[None])]} if share.objective.group.rank == 0 else {}
    metrics = {f"{share.name}/{name}": parts for name, parts in (own.metrics | of_all).items()}
    return replace(
        whole,
        loss=whole.loss + share.weight * own.loss,
        micro_batches=whole.micro_batches + own.micro_batches,
        tokens_of=[sum(both) for both in zip(whole.tokens_of, own.tokens_of, strict=True)],
        distinct_tokens=whole.distinct_tokens + own.distinct_tokens,
        largest=max(whole.largest, own.largest),
        metrics=whole.metrics | metrics,
        checks=whole.checks + own.checks,
        router_aux_loss=(
            own.router_aux_loss
            if whole.router_aux_loss is None or own.router_aux_loss is None
            else whole.router_aux_loss + own.router_aux_loss
        ),
    )


def _apply(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        what = "the optimizer does not take weights of which some are split over processes and some are not"
        fix = "give those of fewer than 2 axes a parameter group of their own, or set parallel.shard: off"
        raise UserError(what, code="optimizer-mixes-weights", where="optimizer", fix=fix) from error


def optimizer_step(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Encoded],
    following: Iterable[Encoded],
    clip_norm: float | None,
    shares: Sequence[Share] = (),
    entropy: bool = False,
) -> tuple[Outcome, float, bool]:
    """One update of the policy. Returns what was measured, the gradient's norm before clipping, and whether it was applied.

    entropy: also measure that of the policy, over the tokens of ``units`` that train.
    A loss or gradient that is not finite leaves the weights and the optimizer as they were.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    clear(trained)
    router_tokens = num_tokens(units) + sum(num_tokens(share.units) for share in shares)
    outcome = objective.run(units, following, backward=True, ends=not shares, entropy=entropy, router_tokens=router_tokens)
    learnt = [(objective, outcome)]
    for share in shares:
        last = share is shares[-1]
        with share.objective.policy.tempered(1.0):  # its rows are stored ones, at whatever temperature others are sampled
            own = share.objective.run(
                share.units, share.following, backward=True, weight=share.weight, ends=last, router_tokens=router_tokens
            )
        learnt.append((share.objective, own))
        outcome = _with_share(outcome, share, own)
    if outcome.router_aux_loss is not None:
        outcome = replace(outcome, loss=outcome.loss + objective.router_aux_loss * outcome.router_aux_loss)
    with no_way_back(objective.group.size > 1):
        objective.group.reduce_gradients(trained)
        norm = objective.group.norm(trained)
        if clip_norm is not None:
            clip(trained, clip_norm, norm)
    size, loss = torch.stack([norm.to(outcome.loss), outcome.loss]).tolist()  # the one time that the device is waited for
    applied = math.isfinite(size) and math.isfinite(loss)
    if applied:
        _apply(optimizer)
        for each, own in learnt:
            each.learn(own)
    clear(trained)
    return outcome, size, applied


__all__ = ["Objective", "Outcome", "SequenceRow", "Share", "clip", "optimizer_step"]
