"""One optimizer step, from top to bottom: build the prefix tree, cut and balance micro-batches,
count, estimate z0, run forward, loss and backward of each micro-batch, clip, update.

Start at ``optimizer_step``, near the end, which applies the gradient; nothing else changes a
weight. ``Objective.plan`` builds the micro-batches of one loss, and ``Objective.run`` computes this
loss and its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from valence.batching.kl_pairs import make_kl_pairs, make_kl_pairs_in_groups
from valence.batching.micro_batches import (
    RankBatches,
    StepPacker,
    balance_across_ranks,
    round_robin,
)
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError, out_of_memory
from valence.losses import stats
from valence.losses.average import Average, counts, divisors
from valence.losses.metrics import mean
from valence.losses.views import seq_view, sides, token_columns
from valence.methods import Method
from valence.models.cache import CachedReference
from valence.models.divergence import Distributions, TeacherDistributions
from valence.models.gradients import clear
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference, tempered
from valence.models.router import ROUTER_AUX_LOSS, num_trained_tokens
from valence.models.scores import Scorer
from valence.rollouts.hf import evaluating
from valence.types import Mean, MicroBatch, PolicyOutput, Ranked, TokenizedExample, sent

Progress = Callable[[MicroBatch | None], None]
"""Called after each micro-batch, or with None in a round in which this rank has none."""


def no_progress(batch: MicroBatch | None) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class SequenceResult:
    """Measurements of one sequence.

    unit: index of the example in the step. side: see ``MicroBatch``. logp, ref: sums of
    log-probabilities (nats). reward: the implicit reward, if the loss has one, or the score of a
    reward model. tokens: number of tokens that a loss reads. scores: outputs of a reward model
    that has several.
    """

    unit: int
    side: int
    logp: float | None
    ref: float | None
    reward: float | None
    tokens: int
    scores: tuple[float, ...] = ()


@dataclass
class StepResult:
    """Measurements of a step.

    ``loss``, ``micro_batches``, ``tokens_per_rank`` and ``largest`` are those of all ranks.
    ``metrics``, ``checks`` and ``rows`` are those of this rank, to be pooled or gathered.

    num_unique_tokens: tokens that any layout has to run. largest: tokens of the largest
    micro-batch. tokens_per_rank: tokens that ran through the policy, without dummies. checks: for
    each micro-batch the ids of its rows, whether their log-probabilities are finite, and whether
    its loss is. class_sums: for the reward shift of BCO. router_aux_loss: the load-balancing loss
    of routers without its weight: the mean of the micro-batches' values, weighted by their tokens
    (None: not computed). ``Objective.run`` does not add it to ``loss``.
    """

    loss: Tensor
    num_unique_tokens: int
    micro_batches: int = 0
    largest: int = 0
    tokens_per_rank: list[int] = field(default_factory=list[int])
    metrics: dict[str, list[Mean | Ranked]] = field(default_factory=dict[str, list[Mean | Ranked]])
    checks: list[tuple[tuple[str, ...], Tensor, Tensor]] = field(
        default_factory=list[tuple[tuple[str, ...], Tensor, Tensor]]
    )
    rows: list[SequenceResult] = field(default_factory=list[SequenceResult])
    class_sums: Tensor | None = None
    router_aux_loss: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens that ran through the policy, on all ranks together."""
        return sum(self.tokens_per_rank)

    def non_finite_ids(self) -> list[str]:
        """Return the content ids of the rows whose log-probability is not finite.

        These are all rows of a micro-batch when only its loss is not finite.
        """
        non_finite: list[str] = []
        for ids, is_finite, is_loss_finite in self.checks:
            if not bool(is_loss_finite):
                rows = [
                    id for id, finite in zip(ids, is_finite.tolist(), strict=True) if not finite
                ]
                non_finite += rows or ids
        return sorted(set(non_finite))


@dataclass(frozen=True)
class StepPlan:
    """One rank's micro-batches of a step, in host memory.

    batches: micro-batches of the examples. kl_batches: KL pairs in micro-batches without gradient;
    None if there are none, or if they are part of ``batches``. num_groups: reference points of
    KTO. num_unique_tokens: see ``StepResult``.
    """

    batches: RankBatches
    kl_batches: RankBatches | None
    num_groups: int
    num_unique_tokens: int


@dataclass
class Objective:
    """A method with its settings, a policy and a reference.

    Split invariance: counts and statistics of the complete step, over all ranks, are known before
    the first backward pass. ``micro_batch_tokens`` changes no result.

    teacher: computes the teacher's log-probabilities; None: the policy itself, with its current
    weights. shared_vocabulary: number of token ids that mean the same to policy and teacher; None:
    all. shift: the running statistic of BCO. router_aux_loss: weight of the load-balancing loss
    of routers. That loss is a product of means over the tokens of one micro-batch, so that above 0
    the loss of a step depends on ``micro_batch_tokens``.
    """

    method: Method
    settings: dict[str, Any]
    policy: PolicyModel
    reference: Reference | None
    group: Group
    micro_batch_tokens: int
    max_length: int
    shift: stats.RewardShift = field(default_factory=stats.RewardShift)
    router_aux_loss: float = 0.0
    teacher: Reference | None = None
    shared_vocabulary: int | None = None

    @property
    def has_collectives(self) -> bool:
        """Whether other processes take part in a step."""
        return self.group.size > 1 or self.policy.shares_rows or self.policy.is_sharded

    @property
    def gradient_group(self) -> Group:
        """The processes whose gradients add up: those with other rows or other tokens."""
        return self.group if self.policy.context is None else self.policy.context.replicas

    def run(
        self,
        examples: Sequence[TokenizedExample],
        *,
        plan: StepPlan | None = None,
        backward: bool,
        rows: bool = False,
        weight: float = 1.0,
        is_last: bool = True,
        entropy: bool = False,
        progress: Progress = no_progress,
        router_tokens: int | None = None,
    ) -> StepResult:
        """Compute the loss of a step and its metrics; with ``backward`` also the gradient.

        examples: those of the complete step, in canonical order. plan: what ``plan`` returned for
        these examples (None: plan now, with KL pairs from these examples alone). rows: return the
        measurements of each sequence. weight: factor of the loss in the gradient. is_last: no other
        loss of this step follows. entropy: measure that of the policy. router_tokens: tokens over
        which the load-balancing loss of routers is averaged, if not those of these examples.
        """
        loss, settings, policy, group = self.method.loss, self.settings, self.policy, self.group

        # Build the prefix tree of the step, cut it into micro-batches, and balance the ranks.
        if plan is None:
            plan = self.plan(examples, backward=backward)
        batches = plan.batches.to(policy.device)
        result = StepResult(torch.zeros(()), plan.num_unique_tokens)

        # Count over all micro-batches and ranks: averages divide by these.
        trained = [batch.part(requires_grad=True) for batch in batches.local]
        names = loss.averages(settings)
        count = divisors(names, group.sum(counts(names, trained)))
        shared = self._shared_statistics(trained, result)
        num_tokens = [len(batch.tokens) for batch in batches.local]
        largest = max(num_tokens, default=0)

        # Estimate z0 of KTO, without a gradient, unless the KL pairs are part of ``batches``.
        if plan.kl_batches is not None:
            kl_batches = plan.kl_batches.to(policy.device)
            num_tokens += [len(batch.tokens) for batch in kl_batches.local]
            shared["z0"] = self._estimate_z0(kl_batches, plan.num_groups, result, progress)

        # Further outputs of the policy.
        has_entropy = entropy and not self.method.is_reward_model
        outputs = [*loss.wants(settings), *(["entropy"] if has_entropy else [])]
        is_routed = backward and self.router_aux_loss > 0
        router_tokens = (router_tokens or total_tokens(examples)) if is_routed else 0

        losses: list[Tensor] = []
        if loss.couples and (batches.num_rounds > 1 or group.size > 1):
            # The gradient with respect to every log-probability comes first. Each micro-batch then
            # runs once more, backward through sum(logp * gradient).
            part, logps = self._coupled_loss(
                batches, outputs, shared, count, result, rows, backward, progress
            )
            losses.append(part.detach() / group.size)  # all ranks have computed the same loss
            if backward:
                (weight * part).backward()
                gradients = [logp.grad for logp in logps]
                self._backward_through_logps(batches, gradients, router_tokens, result, is_last)
        else:
            # Forward, loss and backward of each micro-batch.
            outputs += [ROUTER_AUX_LOSS] if router_tokens else []
            rounds = self.rounds(batches, progress)
            for batch, is_dummy in rounds:
                with rounds.running(), torch.set_grad_enabled(backward):
                    ref = self.reference_logps(batch, is_dummy=is_dummy)
                    teacher = None
                    if (divergence := loss.divergence(settings)) is not None:
                        teacher = self._teacher_distributions(batch, *divergence, is_dummy=is_dummy)
                    elif loss.needs_teacher:
                        batch = self._with_teacher(batch, is_dummy=is_dummy)
                    out = policy(batch, () if is_dummy else outputs, teacher)
                    if is_dummy:
                        if backward:
                            self._backward(_zero(out), is_last and rounds.is_last)
                        continue
                    if not all(batch.requires_grad):  # KL pairs are part of this micro-batch
                        sums = self._kl_sums(batch.part(requires_grad=False), out, ref)
                        shared["z0"] = self._reference_points(sums, result)
                        batch = batch.part(requires_grad=True)
                    statistics = self._statistics(batch, shared)
                    plain, view = loss.read(batch, out, ref, settings, statistics)
                    part = loss.total(plain, view, settings, count)
                    if backward:
                        share = weight * part
                        share = share + self._router_loss(batch, out, router_tokens, result)
                        self._backward(share, is_last and rounds.is_last)
                        del share
                    losses.append(part.detach())
                    self._record(batch, out, ref, plain, view, losses[-1], result, rows)
                    del out, plain, view, part  # free the graph before the next forward

        # Add up the loss and the sizes over the ranks.
        self._sum_over_ranks(
            result, losses, len(batches.local), sum(num_tokens), largest, is_routed=is_routed
        )
        return result

    # Planning a step

    def plan(
        self,
        examples: Sequence[TokenizedExample],
        following: Iterable[TokenizedExample] = (),
        *,
        backward: bool,
        micro_batch_tokens: int | None = None,
    ) -> StepPlan:
        """Divide a step into this rank's micro-batches, in host memory.

        following: later examples of the epoch, from which KL pairs are made if no example of the
        step has another prompt and completion.
        Reads no weights and communicates with no other rank, so that another thread may plan the
        next step meanwhile. micro_batch_tokens: the objective's, unless it may change meanwhile.
        Raises UserError when an example has no KL pair.
        """
        max_tokens = micro_batch_tokens or self.micro_batch_tokens
        kl_pairs: list[TokenizedExample] = []
        groups: list[int] | None = None
        if self.method.needs_kl_pairs:
            kl_pairs, groups = self.make_kl_pairs(examples, following)
        packer = StepPacker(examples, kl_pairs, groups, self.policy.device)
        kl_batches = None
        if backward and self._fits_one_micro_batch(packer, max_tokens):
            batch = packer.host_micro_batch(packer.example_indices, packer.kl_indices)
            batches = RankBatches([batch], 1)
        else:
            batches = self._divide(packer, packer.example_indices, max_tokens)
            if kl_pairs:
                kl_batches = self._divide(packer, packer.kl_indices, max_tokens)
        num_groups = max(groups or [0]) + 1
        return StepPlan(batches, kl_batches, num_groups, packer.num_unique_tokens)

    def make_kl_pairs(
        self, examples: Sequence[TokenizedExample], following: Iterable[TokenizedExample]
    ) -> tuple[list[TokenizedExample], list[int]]:
        """Return the KL pairs of a step, and which reference point each example belongs to."""
        scope = self.settings["z0_scope"]
        if scope == "step":
            pairs = make_kl_pairs(examples, following, max_length=self.max_length)
            return pairs, [0] * len(examples)
        size = scope["group"]
        pairs = make_kl_pairs_in_groups(
            examples, size, scope["pairing"], max_length=self.max_length
        )
        return pairs, [i // size for i in range(len(examples))]

    def _fits_one_micro_batch(self, packer: StepPacker, max_tokens: int) -> bool:
        """Whether examples and KL pairs can share one micro-batch.

        Their prompts are then run once, and the KL pairs read the keys and values of these.
        """
        return (
            bool(packer.kl_pairs)
            and self.policy.packs
            and self.group.size == 1
            and packer.num_unique_tokens <= max_tokens
        )

    def divide(self, examples: Sequence[TokenizedExample]) -> RankBatches:
        """Return this rank's micro-batches of these examples, on the policy's device."""
        packer = StepPacker(examples, device=self.policy.device)
        batches = self._divide(packer, packer.example_indices, self.micro_batch_tokens)
        return batches.to(self.policy.device)

    def _divide(self, packer: StepPacker, indices: Sequence[int], max_tokens: int) -> RankBatches:
        """Divide into micro-batches so small that each rank may have one, and balance the ranks."""
        size, is_sharded = self.group.size, self.policy.is_sharded
        share = -(-packer.num_tokens(indices) // size)
        packed = packer.pack(indices, max(1, min(max_tokens, share)))
        hidden_size: int = self.policy.causal.config.get_text_config().hidden_size
        costs = [packer.attention_cost(rows, hidden_size) if size > 1 else 1.0 for rows in packed]
        ranks = (round_robin if is_sharded else balance_across_ranks)(costs, size)
        num_rounds = max(map(len, ranks))
        local = [packer.host_micro_batch(packed[k]) for k in ranks[self.group.rank]]
        dummy = None
        if len(local) < num_rounds and (is_sharded or (self.method.loss.couples and not local)):
            shortest = min(indices, key=lambda i: packer.example(i).tokens)
            dummy = packer.host_micro_batch([shortest])
        return RankBatches(local, num_rounds, dummy)

    # Statistics of the step

    def _shared_statistics(
        self, batches: Sequence[MicroBatch], result: StepResult
    ) -> dict[str, Tensor]:
        """Return the statistics of the complete step that need no forward pass."""
        loss, device = self.method.loss, self.policy.device
        shared: dict[str, Tensor] = {}
        if loss.shifts:
            shared["delta"] = torch.full((), self.shift.delta, device=device)
            if self.group.rank == 0:  # the value is the same on all ranks
                result.metrics["delta"] = [mean(shared["delta"][None])]
        if loss.credit is not None:
            targets = [batch.target[:, 0] for batch in batches if batch.target is not None]
            scores = _to_float64(torch.cat(targets) if targets else torch.zeros(0, device=device))
            shared["moments"] = stats.moments(self.group.sum(stats.powers(scores)))
        return shared

    @torch.no_grad()
    def _estimate_z0(
        self, batches: RankBatches, num_groups: int, result: StepResult, progress: Progress
    ) -> Tensor:
        """Estimate the reference points of KTO from separate micro-batches of KL pairs."""
        sums: list[Tensor] = []
        rounds = self.rounds(batches, progress)
        for batch, is_dummy in rounds:
            with rounds.running():
                ref = self.reference_logps(batch, is_dummy=is_dummy)
                out = self.policy(batch)
                if not is_dummy:
                    sums.append(self._kl_sums(batch, out, ref))
        is_double = next(self.policy.parameters()).dtype == torch.float64
        dtype = torch.float64 if is_double else torch.float32
        zero = torch.zeros(2, num_groups, device=self.policy.device, dtype=dtype)
        return self._reference_points(torch.stack(sums or [zero]).sum(0), result)

    @torch.no_grad()
    def _kl_sums(self, batch: MicroBatch, out: PolicyOutput, ref: Tensor | None) -> Tensor:
        """Return sums and counts of log-ratios of the KL pairs, by reference point [2, groups]."""
        assert self.method.loss.statistic is not None
        _, sums = self.method.loss.read(batch, out, ref, self.settings, view="seq")
        return self.method.loss.statistic(sums["logp"], sums["ref"], batch.group, batch.num_groups)

    def _reference_points(self, sums: Tensor, result: StepResult) -> Tensor:
        """Return z0 [groups] (nats), and record it with its unclamped value."""
        z0, unclamped = stats.reference_point(self.group.sum(sums))
        if self.group.rank == 0:  # the value is the same on all ranks
            result.metrics |= {"kl": [mean(z0)], "kl/raw": [mean(unclamped)]}
        return z0

    # Running micro-batches

    def rounds(self, batches: RankBatches, progress: Progress = no_progress) -> MicroBatchRounds:
        """Return the rounds in which the ranks run these micro-batches together."""
        return MicroBatchRounds(batches, self.policy, self.group, progress)

    def reference_logps(self, batch: MicroBatch, *, is_dummy: bool = False) -> Tensor | None:
        """Return the reference's log-probabilities, if there is one."""
        return _logps(self.reference, batch, is_dummy=is_dummy) if self.reference else None

    @torch.no_grad()
    def _with_teacher(self, batch: MicroBatch, *, is_dummy: bool) -> MicroBatch:
        """Return the micro-batch with the teacher's log-probabilities, at the temperature of the
        policy, as a token column.
        """
        read, rows = _read_by_teacher(batch)
        with self._as_teacher():
            if self.teacher is not None:
                logp = _logps(self.teacher, read, is_dummy=is_dummy)
            else:
                logp = self.policy(read).logp
        return replace(batch, token_columns={**batch.token_columns, "teacher": logp[rows]})

    def _teacher_distributions(
        self, batch: MicroBatch, beta: float, top_k: int | None, *, is_dummy: bool
    ) -> TeacherDistributions | None:
        """Return the teacher's distributions at the tokens of a micro-batch; None for a dummy."""
        with self._as_teacher():
            source = (self.teacher or self.policy).distributions(*_read_by_teacher(batch), top_k)
        if is_dummy:
            return None
        vocabulary = self.policy.vocabulary
        if isinstance(source, Distributions):
            vocabulary = min(vocabulary, source.vocabulary, self.shared_vocabulary or vocabulary)
        return TeacherDistributions(source, vocabulary, beta, top_k)

    @contextmanager
    def _as_teacher(self) -> Iterator[None]:
        """Inside the block the teacher has the temperature of the policy, and a policy that is its
        teacher runs without the dropout of an adapter.
        """
        is_policy = self.teacher is None
        with (
            tempered(self.teacher, self.policy.temperature),
            evaluating(self.policy) if is_policy else nullcontext(),
        ):
            yield

    @torch.no_grad()
    def token_signals(self, examples: Sequence[TokenizedExample]) -> list[list[float]]:
        """Compute log p_teacher - log p_policy of each trained token (nats), by example and in the
        order of its tokens.

        All processes of the group call it.
        """
        local_signals: list[tuple[list[int], list[float]]] = []
        rounds = self.rounds(self.divide(examples))
        for batch, is_dummy in rounds:
            with rounds.running(), evaluating(self.policy):
                batch = self._with_teacher(batch, is_dummy=is_dummy)
                logps = self.policy(batch).logp[batch.scored]
            if not is_dummy:
                units = batch.unit[batch.sequence_ids[batch.scored]]
                values = batch.token_columns["teacher"] - logps
                local_signals.append((units.tolist(), values.tolist()))
        signals: list[list[float]] = [[] for _ in examples]
        for batches in gather_objects(self.group, local_signals):
            for units, values in batches:
                for unit, value in zip(units, values, strict=True):
                    signals[unit].append(value)
        return signals

    def _coupled_loss(
        self,
        batches: RankBatches,
        outputs: Sequence[str],
        shared: Mapping[str, Tensor],
        count: dict[Average, Tensor],
        result: StepResult,
        rows: bool,
        backward: bool,
        progress: Progress,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute a loss that depends on the sequences of all micro-batches together.

        Returns it, and the log-probabilities of each micro-batch: with ``backward``, leaves of its
        graph.
        """
        loss, settings = self.method.loss, self.settings
        is_idle = not batches.local
        logps: list[Tensor] = []
        views: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        if is_idle and batches.dummy is not None:  # its view has the columns to join, without rows
            batches = replace(batches, local=[batches.dummy])
        rounds = self.rounds(batches, (lambda _: progress(None)) if is_idle else progress)
        for batch, is_dummy in rounds:
            with rounds.running():
                ref = self.reference_logps(batch, is_dummy=is_dummy or is_idle)
                with torch.no_grad():
                    out = self.policy(batch, () if is_dummy else outputs)
                if is_dummy:
                    continue
                out = replace(out, logp=out.logp.detach().requires_grad_(backward))
                statistics = self._statistics(batch, shared)
                plain, view = loss.read(batch, out, ref, settings, statistics)
                views.append((plain, view))
                if not is_idle:
                    logps.append(out.logp)
                    self._record(batch, out, ref, plain, view, torch.zeros(()), result, rows)
        plain, view = (
            _join_views([pair[kind] for pair in views], self.group, is_idle) for kind in (0, 1)
        )
        return loss.total(plain, view, settings, count), logps

    def _backward_through_logps(
        self,
        batches: RankBatches,
        gradients: Iterable[Tensor | None],
        router_tokens: int,
        result: StepResult,
        is_last: bool,
    ) -> None:
        """Run each micro-batch again, backward from the gradient of its log-probabilities."""
        outputs = (ROUTER_AUX_LOSS,) if router_tokens else ()
        gradients = iter(gradients)
        rounds = self.rounds(batches)
        for batch, is_dummy in rounds:
            with rounds.running():
                out = self.policy(batch, () if is_dummy else outputs)
                if is_dummy:
                    share = _zero(out)
                else:
                    share = (out.logp * next(gradients)).sum()
                    share = share + self._router_loss(batch, out, router_tokens, result)
                self._backward(share, is_last and rounds.is_last)
                del out, share  # free the graph before the next forward

    def _backward(self, share: Tensor, is_last: bool) -> None:
        """Add to the gradient. The last backward of a step adds up sharded gradients over ranks."""
        if self.policy.is_sharded:
            from valence.distributed.fsdp2 import sync_gradients

            sync_gradients(self.policy, is_last)
        share.backward()

    def _router_loss(
        self, batch: MicroBatch, out: PolicyOutput, router_tokens: int, result: StepResult
    ) -> Tensor | float:
        """Record this micro-batch's load-balancing loss. Returns its weighted share of the mean
        over ``router_tokens``; 0 if it is off.
        """
        loss = out.router_aux_loss
        if loss is None:
            return 0.0
        num_tokens = num_trained_tokens(batch)
        share = num_tokens / router_tokens
        detached, total = loss.detach(), result.router_aux_loss
        record = Mean(num_tokens * detached, torch.full_like(detached, num_tokens))
        result.metrics.setdefault(ROUTER_AUX_LOSS, []).append(record)
        result.router_aux_loss = share * detached + (0 if total is None else total)
        return self.router_aux_loss * share * loss

    def _statistics(self, batch: MicroBatch, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the statistics of the step, and the reference point of each sequence."""
        statistics = {
            name: values[batch.group] if name == "z0" else values for name, values in shared.items()
        }
        if "thresholds" in self.method.loss.reads:
            # Computed for each micro-batch, because each runs backward through them.
            assert isinstance(self.policy, Scorer)
            assert self.policy.thresholds is not None
            statistics["thresholds"] = self.policy.thresholds
        return statistics

    # Results

    def _record(
        self,
        batch: MicroBatch,
        out: PolicyOutput,
        ref: Tensor | None,
        plain: dict[str, Tensor],
        view: dict[str, Tensor],
        part: Tensor,
        result: StepResult,
        rows: bool,
    ) -> None:
        """Record metrics, finiteness, and with ``rows`` the measurements of each sequence."""
        loss, settings = self.method.loss, self.settings
        out = replace(out, logp=out.logp.detach())
        sums = seq_view(batch, token_columns(batch, out, ref))
        is_finite = torch.isfinite(sums["logp"] - sums["ref"] if "ref" in sums else sums["logp"])
        if out.score is not None:
            is_finite &= torch.isfinite(out.score.detach()).all(1)
        result.checks.append((batch.ids, is_finite, torch.isfinite(part) & is_finite.all()))
        for name, metric in loss.measure(batch, out, ref, plain, view, settings).items():
            result.metrics.setdefault(name, []).append(metric)
        if out.entropy is not None:
            entropy = mean(out.entropy.detach()[batch.scored])
            result.metrics.setdefault("entropy", []).append(entropy)
        if loss.shifts:
            class_sums, total = stats.class_sums(view), result.class_sums
            result.class_sums = class_sums if total is None else total + class_sums
        if rows:
            rewards = loss.rewards(view, settings) or loss.rewards(sums, settings)
            result.rows += _sequence_results(batch, sums, out.score, rewards)

    def _sum_over_ranks(
        self,
        result: StepResult,
        losses: Sequence[Tensor],
        micro_batches: int,
        tokens: int,
        largest: int,
        *,
        is_routed: bool,
    ) -> None:
        """Add up the loss over the ranks, and gather their sizes."""
        size, rank, device = self.group.size, self.group.rank, self.policy.device
        tokens_per_rank, largest_per_rank = [0] * size, [0] * size
        tokens_per_rank[rank], largest_per_rank[rank] = tokens, largest
        loss = _to_float64(
            torch.stack(list(losses)).sum() if losses else torch.zeros((), device=device)
        )
        sizes = torch.tensor([micro_batches, *tokens_per_rank, *largest_per_rank], dtype=loss.dtype)
        totals = self.group.sum(torch.cat([loss[None], sent(sizes, loss.device)]))
        result.loss = totals[0]
        if size == 1:  # no need to wait for the device
            all_sizes = [micro_batches, tokens, largest]
        else:
            all_sizes = [int(total) for total in totals[1:].tolist()]
        result.micro_batches = all_sizes[0]
        result.tokens_per_rank = all_sizes[1 : 1 + size]
        result.largest = max(all_sizes[1 + size :])
        if self.method.loss.shifts:
            sums = result.class_sums
            sums = torch.zeros(2, 2, device=device) if sums is None else sums
            result.class_sums = self.group.sum(_to_float64(sums))
        if is_routed:
            local = result.router_aux_loss
            zero = torch.zeros((), device=device)
            result.router_aux_loss = self.group.sum(_to_float64(zero if local is None else local))

    def update_statistics(self, result: StepResult) -> None:
        """Update the running statistics after the step was applied."""
        if result.class_sums is not None:
            self.shift = self.shift.after(result.class_sums, self.settings["beta"])


class AgreedOutOfMemoryError(torch.OutOfMemoryError):
    """Memory ran out in some rank, and all ranks raise this together: all can repeat the work."""


@dataclass
class MicroBatchRounds:
    """The rounds of one rank: as many as the rank with the most micro-batches has.

    Yields each micro-batch and whether it is a dummy. A rank without a micro-batch runs the dummy
    where weights are sharded, because every forward is then collective. The body of the loop runs
    ``with rounds.running()``.

    When memory runs out where forwards are collective, the rank raises UserError. Elsewhere all
    ranks raise AgreedOutOfMemoryError together, after the last round; a single process raises the
    original error.
    """

    batches: RankBatches
    policy: PolicyModel
    group: Group
    progress: Progress
    is_last: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _has_run: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[tuple[MicroBatch, bool]]:
        local, dummy, is_sharded = self.batches.local, self.batches.dummy, self.policy.is_sharded
        for k in range(self.batches.num_rounds):
            self.is_last = k + 1 == self.batches.num_rounds
            batch = local[k] if k < len(local) and self._failure is None else None
            turn = batch if batch is not None else dummy if is_sharded else None
            if turn is not None:
                self._has_run = False
                yield turn, batch is None
                assert self._has_run, "each micro-batch runs inside rounds.running()"
            self.progress(batch if self._failure is None else None)
        if is_sharded or not self.group.any(self._failure is not None):
            return
        if self._failure is not None and self.group.size == 1:
            raise self._failure
        reason = str(self._failure or "another rank ran out of memory")
        raise AgreedOutOfMemoryError(reason) from self._failure

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a micro-batch: name ranks that did not reach it, and note out of memory."""
        self._has_run, is_sharded = True, self.policy.is_sharded
        place = self.group.collective("a micro-batch") if is_sharded else nullcontext()
        try:
            with final_out_of_memory(self.policy.shares_rows or is_sharded), place:
                yield
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self._failure = error


def _logps(reference: Reference, batch: MicroBatch, *, is_dummy: bool) -> Tensor:
    """Return the log-probabilities of a reference. Those of dummy rows are not cached."""
    if is_dummy and isinstance(reference, CachedReference):
        return reference.join_collectives(batch)
    return reference(batch)


def _read_by_teacher(batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
    """Return the micro-batch that the teacher reads, and the rows of the trained tokens in it."""
    if batch.teacher is None:
        return batch, batch.scored
    assert batch.teacher_rows is not None
    return batch.teacher, batch.teacher_rows


def _zero(out: PolicyOutput) -> Tensor:
    """A loss without gradient for a dummy, whose backward takes part in collectives."""
    return ((out.logp if out.score is None else out.score) * 0).sum()


def _sequence_results(
    batch: MicroBatch,
    sums: dict[str, Tensor],
    scores: Tensor | None,
    rewards: Sequence[Tensor] | None,
) -> list[SequenceResult]:
    """Return the measurements of each sequence. rewards: [S], or those of both sides of pairs."""
    columns = batch.unit.tolist(), batch.side.tolist(), map(int, sums["n"].tolist())
    if scores is not None:
        return [
            SequenceResult(unit, side, None, None, row[0], n)
            if len(row) == 1
            else SequenceResult(unit, side, None, None, None, n, tuple(row))
            for unit, side, n, row in zip(*columns, scores.detach().tolist(), strict=True)
        ]
    no_values: list[None] = [None] * batch.sequences
    refs = sums["ref"].tolist() if "ref" in sums else no_values
    if rewards is None:
        by_sequence = no_values
    elif len(rewards) == 1:
        by_sequence = rewards[0].tolist()
    else:
        both = torch.cat(list(rewards))
        by_sequence = torch.empty_like(both).index_put((torch.cat(sides(batch)),), both).tolist()
    values = zip(*columns, sums["logp"].tolist(), refs, by_sequence, strict=True)
    return [SequenceResult(unit, side, logp, r, rw, n) for unit, side, n, logp, r, rw in values]


def _join_views(
    views: Sequence[dict[str, Tensor]], group: Group, is_idle: bool
) -> dict[str, Tensor]:
    """Join the views of all micro-batches of all ranks, in the order of the step.

    The order breaks ties. Values without an axis hold for all. Only this rank's part has a
    gradient. is_idle: this rank ran only a dummy, whose values are dropped.
    """
    joined = {
        name: torch.cat([view[name] for view in views])
        for name, value in sorted(views[0].items())
        if value.ndim
    }
    if group.size > 1:
        joined = _gather({n: v[:0] if is_idle else v for n, v in joined.items()}, group)
    order = joined["unit"].argsort(stable=True)
    return {
        name: joined[name][order] if name in joined else value for name, value in views[0].items()
    }


def _gather(local: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Gather the values [S, ...] of all ranks. This rank's part keeps its gradient.

    They are sent as one table in float64, which represents every float32 and every index exactly.
    """
    widths = [math.prod(value.shape[1:]) for value in local.values()]
    parts = [
        value.detach().double().reshape(len(value), width)
        for value, width in zip(local.values(), widths, strict=True)
    ]
    table = torch.cat(parts, 1)
    ends = group.gather(torch.tensor([len(table)], device=table.device)).cumsum(0).tolist()
    start, end = ends[group.rank] - len(table), ends[group.rank]
    gathered: dict[str, Tensor] = {}
    columns = group.gather(table).split(widths, 1)
    for (name, value), column in zip(local.items(), columns, strict=True):
        all_ranks = column.reshape(-1, *value.shape[1:]).to(value.dtype)
        gathered[name] = torch.cat([all_ranks[:start], value, all_ranks[end:]])
    return gathered


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A second loss of a step: ``weight`` times its objective over further examples.

    name: prefix of its metrics. plan: see ``Objective.run``.
    """

    name: str
    objective: Objective
    weight: float
    examples: Sequence[TokenizedExample]
    plan: StepPlan | None = None


def optimizer_step(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[TokenizedExample],
    clip_norm: float | None,
    auxiliary: Sequence[AuxiliaryLoss] = (),
    entropy: bool = False,
    plan: StepPlan | None = None,
) -> tuple[StepResult, float, bool]:
    """Update the policy once.

    Returns the measurements, the norm of the gradient before clipping, and whether the update was
    applied. A loss or gradient that is not finite leaves weights and optimizer unchanged.

    entropy: measure that of the policy over the trained tokens of ``examples``. plan: see
    ``Objective.run``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clear(parameters)

    with final_out_of_memory(objective.has_collectives):
        result, results = loss_and_gradient(
            objective, examples, auxiliary, entropy=entropy, plan=plan
        )

        # Clip and update.
        objective.gradient_group.reduce_gradients(parameters)
        norm = objective.gradient_group.norm(parameters)
        if clip_norm is not None:
            clip_gradients(parameters, clip_norm, norm)
    # With one process, the only place in a step that waits for the device.
    norm_value, loss_value = torch.stack([norm.to(result.loss), result.loss]).tolist()
    is_applied = math.isfinite(norm_value) and math.isfinite(loss_value)
    if is_applied:
        _update(optimizer)
        for updated_objective, objective_result in results:
            updated_objective.update_statistics(objective_result)
    clear(parameters)
    return result, norm_value, is_applied


def loss_and_gradient(
    objective: Objective,
    examples: Sequence[TokenizedExample],
    auxiliary: Sequence[AuxiliaryLoss] = (),
    entropy: bool = False,
    plan: StepPlan | None = None,
) -> tuple[StepResult, list[tuple[Objective, StepResult]]]:
    """Compute the loss of a step, and add its gradient to those of the weights.

    Arguments: see ``optimizer_step``. Returns the measurements of all losses together, and those of
    each objective.
    """
    router_tokens = total_tokens(examples) + sum(total_tokens(aux.examples) for aux in auxiliary)
    result = objective.run(
        examples, plan=plan, backward=True, is_last=not auxiliary, entropy=entropy,
        router_tokens=router_tokens,
    )  # fmt: skip
    results = [(objective, result)]
    for aux in auxiliary:
        # Their examples were not sampled at the temperature of the rollouts.
        with aux.objective.policy.tempered(1.0):
            aux_result = aux.objective.run(
                aux.examples, plan=aux.plan, backward=True, weight=aux.weight,
                is_last=aux is auxiliary[-1], router_tokens=router_tokens,
            )  # fmt: skip
        results.append((aux.objective, aux_result))
        result = _with_auxiliary(result, aux, aux_result)
    if result.router_aux_loss is not None:
        router_loss = objective.router_aux_loss * result.router_aux_loss
        result = replace(result, loss=result.loss + router_loss)
    return result, results


def _with_auxiliary(result: StepResult, aux: AuxiliaryLoss, aux_result: StepResult) -> StepResult:
    """Add the measurements of an auxiliary loss, whose metrics get its name as a prefix."""
    is_first = aux.objective.group.rank == 0
    loss_metric = {"loss": [mean(aux_result.loss[None])]} if is_first else {}
    metrics = {f"{aux.name}/{n}": parts for n, parts in (aux_result.metrics | loss_metric).items()}
    router_losses = [
        part.router_aux_loss for part in (result, aux_result) if part.router_aux_loss is not None
    ]
    return replace(
        result,
        loss=result.loss + aux.weight * aux_result.loss,
        micro_batches=result.micro_batches + aux_result.micro_batches,
        tokens_per_rank=[
            a + b for a, b in zip(result.tokens_per_rank, aux_result.tokens_per_rank, strict=True)
        ],
        num_unique_tokens=result.num_unique_tokens + aux_result.num_unique_tokens,
        largest=max(result.largest, aux_result.largest),
        metrics=result.metrics | metrics,
        checks=result.checks + aux_result.checks,
        router_aux_loss=torch.stack(router_losses).sum() if router_losses else None,
    )


def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of this norm to at most ``max_norm``."""
    # Tensors that are split over different processes cannot be scaled in one call.
    for mesh in {getattr(p, "device_mesh", None) for p in parameters}:
        group = [p for p in parameters if getattr(p, "device_mesh", None) == mesh]
        clip_grads_with_norm_(group, max_norm, norm)


def _update(optimizer: torch.optim.Optimizer) -> None:
    """Change the weights."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise UserError(
            "the optimizer does not support a parameter group with sharded and unsharded weights",
            code="optimizer-mixes-weights",
            where="optimizer",
            fix="choose another optimizer, use a separate parameter group for weights with fewer "
            "than 2 dimensions, or set parallel.shard: off",
        ) from error


@contextmanager
def final_out_of_memory(is_collective: bool) -> Iterator[None]:
    """Raise UserError for out of memory where other ranks take part, and have not agreed to repeat
    the work: one rank cannot repeat a collective operation.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_agreed = isinstance(error, AgreedOutOfMemoryError)
        if is_agreed or not is_collective or not out_of_memory(error):
            raise
        raise UserError(
            "out of memory in a collective operation",
            code="out-of-memory",
            where="train.micro_batch_tokens",
            fix="halve it, or set train.checkpointing: full, then rerun the same command to resume",
        ) from error


def total_tokens(examples: Sequence[TokenizedExample]) -> int:
    """Return the number of tokens of all sequences. A shared prompt counts for each of them."""
    return sum(example.tokens for example in examples)


def _to_float64(values: Tensor) -> Tensor:
    """Convert to float64 where the device has it, for sums over ranks."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
