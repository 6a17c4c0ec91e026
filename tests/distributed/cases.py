"""Small runs of several processes, with sharded or replicated weights, whose measurements are
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.models.test_scores import reward_model
from tests.tiny_models import tiny
from tests.units import objective, units_for
from valence.distributed.process_group import Group
from valence.losses import LOSSES
from valence.models.build import build_policy, build_reference
from valence.models.digest import model_digest
from valence.models.policy_model import PolicyModel
from valence.models.reference import FrozenReference, Reference, SyncedReference
from valence.training.metrics import Meter
from valence.training.optim import adamw
from valence.training.step import AuxiliaryLoss, optimizer_step
from valence.types import MicroBatch

TARGETS = ["q_proj", "v_proj", "up_proj"]


@dataclass(frozen=True)
class Case:
    """A loss and its settings, trained for two steps. shares: add an sft term to the loss; packs:
    False runs one sequence at a time.
    """

    loss: str
    rows: int = 7
    budget: int = 40
    lora: bool = False
    dtype: torch.dtype = torch.float64
    architecture: str = "llama"
    checkpointing: str = "off"
    follows: bool = False
    packs: bool = True
    shares: bool = False
    sum_every_backward: bool = False
    shard_size: int | None = None
    reshard: bool = True

    @property
    def name(self) -> str:
        odd = [
            f"{field} {value}"
            for field, value in vars(self).items()
            if value != vars(Case(self.loss))[field]
        ]
        return " ".join([self.loss, *odd])


def models(case: Case) -> tuple[PolicyModel, Reference | None]:
    wide = torch.float32 if case.dtype == torch.bfloat16 else case.dtype
    lora = SimpleNamespace(rank=2, alpha=4, dropout=0.0, targets=TARGETS) if case.lora else None
    scores = LOSSES[case.loss].is_reward_model
    base = reward_model().to(wide) if scores else tiny(case.architecture, dtype=wide)
    policy = build_policy(base, dtype=case.dtype, lora=lora, checkpointing=case.checkpointing)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:  # as if it had trained before: the reference is another model then
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    reference = None
    if not scores:
        other = None if case.lora or case.follows else tiny(case.architecture, seed=5, dtype=wide)
        reference = build_reference(
            policy, fresh_adapter=case.lora, model=other, follows=case.follows
        )
    for engine in (policy, *([reference.engine] if isinstance(reference, FrozenReference) else [])):
        engine.lay_out(packed=case.packs)
    return policy, reference


def split(engine: PolicyModel, case: Case, group: Group) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    from valence.distributed.fsdp2 import shard

    layers = [
        module
        for module in engine.causal.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    shard(
        engine,
        layers,
        group,
        size=case.shard_size,
        compute=engine.compute,
        sum_every_backward=case.sum_every_backward,
        reshard=case.reshard,
    )  # type: ignore[arg-type]


def full_weights(weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: getattr(w, "full_tensor", lambda w=w: w)().detach().clone() for name, w in weights
    }


def measure(group: Group, cases: Sequence[Case], sharded: bool = True) -> dict[str, dict[str, Any]]:
    return {case.name: two_steps(group, case, sharded and group.size > 1) for case in cases}


def two_steps(group: Group, case: Case, sharded: bool) -> dict[str, Any]:
    policy, reference = models(case)
    if sharded:
        group.split(1, shard_size=case.shard_size)
        for engine in (
            policy,
            *([reference.engine] if isinstance(reference, FrozenReference) else []),
        ):
            split(engine, case, group)
    digests = [model_digest(policy, adapter=True)]
    actual = objective(case.loss, policy, reference, budget=case.budget)
    other = objective("sft", policy, None, budget=case.budget)
    actual.group = other.group = group
    optimizer = adamw(policy, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    # With AdamW's 1e-8, rounding decides the step of a weight with a gradient near zero.
    for group_options in optimizer.param_groups:
        group_options["eps"] = 1e-4
    message: list[dict[str, float]] = []
    for seed in (0, 1):
        meter = Meter()
        shares = (
            [AuxiliaryLoss("sft", other, 0.3, units_for("sft", 2, seed))] if case.shares else []
        )
        rows, following = units_for(case.loss, case.rows, seed), iter(units_for(case.loss, 3, 9))
        outcome, norm, applied = optimizer_step(
            actual, optimizer, rows, 1.0, shares, plan=actual.plan(rows, following, backward=True)
        )
        meter.pool(outcome.metrics)
        message.append(
            {"loss": float(outcome.loss), "norm": norm, "applied": applied} | meter.reduce(group)
        )
        if isinstance(reference, SyncedReference):
            reference.follow(dict(policy.named_parameters()), mix=0.6)
    messages: list[MicroBatch | None] = []
    evaluated = actual.run(
        units_for(case.loss, case.rows, 3), backward=False, rows=True, progress=messages.append
    )
    weights = full_weights(policy.named_parameters())
    digests += [model_digest(policy, adapter=flag) for flag in (True, False)]
    return {
        "steps": message,
        "evaluated": float(evaluated.loss),
        "rows": len(evaluated.rows),
        "calls": len(messages),
        "weights": weights,
        "digests": digests,
        "ran": outcome.tokens_per_rank,
        "followed": reference.digests().model if isinstance(reference, SyncedReference) else "",
    }
