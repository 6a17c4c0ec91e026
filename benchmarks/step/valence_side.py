"""Valence's side, which runs in this process: ``Objective.run``, as in every training step.

For "grpo", answers have old log-probabilities and advantages, like scored rollouts.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.cases import z0_of_trl
from benchmarks.step.cases import Case
from benchmarks.step.inputs import MAX_LENGTH, Models
from benchmarks.step.memory import peak_above_idle
from valence.batching.kl_pairs import make_kl_pairs_in_groups
from valence.batching.micro_batches import make_micro_batch
from valence.distributed.process_group import SingleProcess
from valence.methods import METHODS
from valence.models.build import build_policy, build_reference, load_model
from valence.models.cache import CachedReference
from valence.models.compiling import compile_layers, why_not
from valence.models.gradients import clear
from valence.models.reference import Reference
from valence.training.step import Objective, StepPlan
from valence.training.trainer import Prefetcher
from valence.types import TokenizedExample

BUDGET = 4096  # tokens of a micro-batch, as in a recipe by default
SETTINGS: dict[str, dict[str, Any]] = {"kto": z0_of_trl(8)}
# for grpo the reference is the behaviour policy
WITH_REFERENCE = (
    "kto",
    "dpo",
    "grpo",
)


@dataclass(frozen=True)
class Figures:
    """One step without an update: loss, gradient norm, time (s), and peak memory above idle (MB; 0
    if not measured).
    """

    loss: float
    grad_norm: float
    seconds: float
    peak: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Total seconds of consecutive steps, and seconds in which the main thread prepared
    micro-batches or waited for them.
    """

    waiting: float
    total: float


class ValenceSide:
    """A policy, a reference with cached values, and the rows of several steps."""

    def __init__(
        self,
        case: Case,
        models: Models,
        sets: list[list[TokenizedExample]],
        cache: Path,
        *,
        dtype: torch.dtype,
        checkpointing: bool,
    ) -> None:
        self.case, self.sets = case, sets
        adapter = str(models.adapter) if models.adapter else None
        attributes = ["reward"] if case.is_reward_model else None
        model = load_model(str(models.trained(case)), dtype=torch.float32, attributes=attributes)
        self.policy = build_policy(
            model, dtype=dtype, adapter=adapter, checkpointing="full" if checkpointing else "off"
        )
        if dtype == torch.bfloat16 and not why_not(self.policy.device):
            compile_layers(self.policy)
        self.reference: CachedReference | None = None
        self.teacher: Reference | None = None
        if case.method == "distill":
            teacher = load_model(str(models.reference), dtype=torch.float32)
            self.teacher = build_reference(
                self.policy, fresh_adapter=False, model=teacher, name="teacher"
            )
        if case.method in WITH_REFERENCE:
            reference_model = load_model(str(models.reference), dtype=torch.float32)
            self.reference = CachedReference(
                build_reference(
                    self.policy, fresh_adapter=False, model=reference_model, name="reference"
                ),
                cache,
            )
        if case.method == "grpo":
            self.sets = [[self._with_advantages(unit) for unit in units] for units in sets]

    def rows(self, number: int) -> list[dict[str, Any]]:
        """The rows of a step as sent to TRL's side, with the reference's values, which this call
        adds to the cache.
        """
        units = self.sets[number]
        records: list[dict[str, Any]] = [
            {
                "prompt": unit.prompt_ids,
                "answers": [answer.ids for answer in unit.answers],
                "label": unit.label,
                "advantages": unit.scores,
            }
            for unit in units
        ]
        if self.reference is not None:
            for row, unit in zip(records, units, strict=True):
                row["old"] = self._values(unit)
                row["ref"] = [sum(values) for values in row["old"]]
        if self.case.method == "kto":
            for row, unit in zip(records, mismatched(units), strict=True):
                row["mismatched_ref"] = sum(self._values(unit)[0])
        return records

    def _with_advantages(self, unit: TokenizedExample) -> TokenizedExample:
        """The example with the columns of a scored rollout. Its scores serve as advantages."""
        answers = [
            replace(answer, columns=(("old", tuple(old)), ("adv", (score,) * len(old))))
            for answer, old, score in zip(
                unit.answers, self._values(unit), unit.scores, strict=True
            )
        ]
        return replace(unit, answers=tuple(answers))

    def _values(self, unit: TokenizedExample) -> list[list[float]]:
        """The reference's log-probabilities (nats) of each token, by answer."""
        assert self.reference is not None
        batch = make_micro_batch([unit], device=self.policy.device)
        values, owner = self.reference(batch)[batch.loss_mask], batch.sequence_ids[batch.loss_mask]
        values_by_side = [values[owner == side].tolist() for side in range(len(unit.answers))]
        if [len(side_values) for side_values in values_by_side] != [
            len(answer.ids) for answer in unit.answers
        ]:
            raise RuntimeError(f"{unit.id}: the reference has no value for some tokens")
        return values_by_side

    def _objective(self) -> Objective:
        method = METHODS[self.case.method]
        settings = method.resolve(SETTINGS.get(self.case.method, {}))
        return Objective(
            method, settings, self.policy, self.reference, SingleProcess(), BUDGET, MAX_LENGTH,
            teacher=self.teacher,
        )  # fmt: skip

    def consecutive_steps(self, count: int, *, ahead: bool) -> StepTimes:
        """Run ``count`` steps as training does, after one warm-up step.

        ahead: prepare each step while the one before it computes.
        """
        objective, prefetcher = self._objective(), Prefetcher[StepPlan]()
        waiting = begin = 0.0
        with closing(prefetcher):
            for k in range(count + 1):
                units, following = (self.sets[n % len(self.sets)] for n in (k, k + 1))
                now = time.perf_counter()
                if k == 1:
                    waiting, begin = 0.0, now
                plan = prefetcher.take(k, partial(objective.plan, units, backward=True))
                waiting += time.perf_counter() - now
                if ahead:
                    prefetcher.start(k + 1, partial(objective.plan, following, backward=True))
                objective.run(units, plan=plan, backward=True).loss.item()
                clear(self.policy.parameters())
            return StepTimes(waiting, time.perf_counter() - begin)

    def step(self, number: int, *, memory: bool = False) -> Figures:
        """Forward and backward pass of one optimizer step."""
        units = self.sets[number]

        def run() -> tuple[float, float]:
            start = time.perf_counter()
            loss = self._objective().run(units, backward=True).loss
            return loss.item(), time.perf_counter() - start

        if memory:  # as in the first step, which allocates the gradients
            clear(self.policy.parameters(), keep=False)
        misses_before = self.reference.misses if self.reference else 0
        (loss, seconds), peak = peak_above_idle(run) if memory else (run(), 0.0)
        if self.reference and self.reference.misses > misses_before:
            raise RuntimeError(
                f"{self.case.name}: the step computed values of the reference, which TRL was given"
            )
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads).item()
        clear(self.policy.parameters())  # as the training's step does
        return Figures(loss, norm, seconds, peak)


def mismatched(units: list[TokenizedExample]) -> list[TokenizedExample]:
    """KTO's mismatched pairs, from which it estimates z0: each prompt with the previous row's
    completion.
    """
    return make_kl_pairs_in_groups(units, len(units), "previous", max_length=MAX_LENGTH)


def unshared(units: list[TokenizedExample]) -> list[TokenizedExample]:
    """The answers with separate prompts that differ in their first token, so that no prefix is
    shared.
    """
    return [
        replace(
            unit,
            prompt_ids=(3 + number * len(unit.answers) + k, *unit.prompt_ids[1:]),
            prompt_mask=unit.prompt_mask,
            answers=(answer,),
            scores=(unit.scores[k],),
        )
        for number, unit in enumerate(units)
        for k, answer in enumerate(unit.answers)
    ]
