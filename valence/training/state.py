"""Everything of a run that a checkpoint holds, and how it is saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, Protocol

import torch

from valence.config.needs import settings_of_step
from valence.config.schema import SELF
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError
from valence.losses.stats import RewardShift
from valence.methods import Method
from valence.models.policy_model import PolicyModel
from valence.models.reference import AdapterDisabledReference, Reference, SyncedReference
from valence.reports.diagnostics import OTHER_MODEL, Advice, CollapseDetector
from valence.reports.sinks import JsonlSink
from valence.training import state_files
from valence.training.metrics import Meter
from valence.training.optim import (
    OptimizerLike,
    SchedulerLike,
    evaluation_weights,
    has_evaluation_weights,
    make_optimizer,
    make_scheduler,
)
from valence.training.prepare import AuxiliaryPart, Prepared
from valence.training.state_files import RandomState, Registry, State, Stateful, StateFunctions
from valence.training.step import Objective
from valence.training.track import (
    AnomalyDetector,
    BestMetricTracker,
    Budget,
    Counters,
    MetricsWindow,
)

HEAVY = ("weights", "reference", "optimizer")
"""Parts of the state that only an applied step changes."""

LightState = tuple[State, list[dict[str, Any]]]
"""The parts that every step changes, and the settings of the optimizer's parameter groups."""


class SampledRounds(Stateful, Protocol):
    """The rounds of online training."""

    def settle(self) -> None:
        """Finish work in the background that ``state_dict`` cannot hold. All processes call it."""
        ...


class TrainState:
    """The state of a training run: policy, optimizer, counters, metrics and random numbers.

    objective: what the run trains and is evaluated with. auxiliary: the losses of `mix`, each with
    its rows. group: the processes with other rows. rounds: the state of online training, if any.
    is_consistent: False while an optimizer step changes the weights; such a state must not be
    saved. state_before_skips: that before the first of the steps that are being skipped.
    """

    def __init__(
        self,
        prepared: Prepared,
        policy: PolicyModel,
        reference: Reference | None,
        group: Group,
        *,
        micro_batch_tokens: int,
        optimizer: OptimizerLike | None = None,
        scheduler: SchedulerLike = None,
        log: JsonlSink | None = None,
        trains: bool = True,
    ) -> None:
        """log: the log file, whose length is part of the state. trains: False for a run that is
        only measured, whose recipe may name an optimizer that must not be imported.

        Raises UserError for an optimizer of weights that are not the policy's.
        """
        self.recipe = recipe = prepared.recipe
        self.policy, self.reference, self.group, self._log = policy, reference, group, log
        self._shared_vocabulary = prepared.shared_vocabulary
        self.moving_teacher = _moving_average(policy) if recipe.teacher.has_average else None
        has_rows = "train" in prepared.corpora
        self.budget = Budget(micro_batch_tokens)
        self.objective = self._objective(prepared.method, settings_of_step(recipe))
        self.auxiliary: list[tuple[AuxiliaryPart, Objective]] = [
            (part, self._objective(part.method, part.settings))
            for part in (prepared.mixed if has_rows else ())
        ]
        self.total_steps = prepared.total_steps if has_rows else 0
        self.counters = Counters(total=self.total_steps)
        self.is_default_optimizer = optimizer is None
        plain = recipe.train.model_copy(update={"optimizer": "adamw", "optimizer_settings": {}})
        self.optimizer = make_optimizer(
            recipe if trains else recipe.model_copy(update={"train": plain}), policy, optimizer
        )
        self.scheduler = make_scheduler(recipe, self.optimizer, self.total_steps, scheduler)
        self.window = MetricsWindow()
        self.anomalies = AnomalyDetector()
        teacher = recipe.teacher.weights if recipe.teacher.model == SELF else OTHER_MODEL
        self.collapse = CollapseDetector(Advice(recipe.method, recipe.loss, teacher=teacher))
        self.best = BestMetricTracker(recipe.run.keep_best)
        self.early_stop = BestMetricTracker(recipe.run.early_stop)
        self.evaluations: dict[int, dict[str, float]] = {}
        self.rounds: SampledRounds | None = None
        self.is_consistent = True
        self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "is_consistent", False))
        self.state_before_skips: LightState | None = None
        self._base_digest: str | None = None
        self._reference_digest: str | None = None

    def _objective(self, method: Method, settings: Mapping[str, Any]) -> Objective:
        return Objective(
            method,
            dict(settings),
            self.policy,
            self.reference if method.asks_reference else None,
            self.group,
            self.budget.at(0, "evaluation"),
            self.recipe.data.max_length,
            router_aux_loss=self.recipe.train.router_aux_loss,
            teacher=self._teacher_of(method),
            shared_vocabulary=self._shared_vocabulary if method.loss.needs_teacher else None,
        )

    def _teacher_of(self, method: Method) -> Reference | None:
        """The teacher of a method; None if it has none, or if the policy itself is the teacher."""
        spec = self.recipe.teacher
        if not method.loss.needs_teacher or (spec.model == SELF and spec.weights == "live"):
            return None
        return self.moving_teacher or self.reference

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.counters.step

    @property
    def objectives(self) -> list[Objective]:
        """Everything that a step trains with; the run's own method comes first."""
        return [self.objective, *(objective for _, objective in self.auxiliary)]

    @property
    def trained_weights(self) -> dict[str, torch.nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Inside the block, the policy has the weights to measure, sample and export (see
        ``optim.evaluation_weights``).
        """
        with evaluation_weights(self.optimizer):
            yield

    @property
    def optimized_parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def has_split_weights(self) -> bool:
        """Whether weights are split over processes, by FSDP or tensor parallelism."""
        return any(hasattr(p, "placements") for p in self.policy.parameters())

    # Saving and loading

    @property
    def registry(self) -> Registry:
        """Every part that has state.

        Random numbers come last: nothing may be drawn between their loading and the next step.
        """
        registry = Registry()
        registry.add("weights", StateFunctions(self._weights, self._load_weights))
        registry.add("reference", StateFunctions(self._reference, self._load_reference))
        if self.moving_teacher is not None:
            registry.add("teacher", StateFunctions(self._teacher, self._load_teacher))
        registry.add("optimizer", StateFunctions(self.optimizer.state_dict, self._load_optimizer))
        registry.add("scheduler", self.scheduler)
        registry.add("shifts", StateFunctions(self._shifts, self._load_shifts))
        registry.add("counters", self.counters)
        if self.rounds is not None:
            registry.add("rounds", self.rounds)
        registry.add(
            "evaluations", StateFunctions(lambda: dict(self.evaluations), self.evaluations.update)
        )
        registry.add("best", self.best)
        registry.add("early_stop", self.early_stop)
        registry.add("watch", self.anomalies)
        registry.add("online_watch", self.collapse)
        registry.add("budget", self.budget)
        registry.add("log", self._log or StateFunctions(lambda: {"bytes": 0}, lambda _: None))
        registry.add("processes", StateFunctions(self._process_state, self._load_process_states))
        return registry

    def state_dict(self) -> State:
        """Return everything that the rest of the run depends on. All processes call it.

        While steps are being skipped, it is the state before the first of them. Waits for
        completions that are being sampled.
        """
        if self.rounds is not None:
            self.rounds.settle()
        light, groups = self.state_before_skips or self.light()
        registry = self.registry
        state = light | {name: registry.parts[name].state_dict() for name in HEAVY}
        state["processes"] = [
            process for local in gather_objects(self.group, state["processes"]) for process in local
        ]
        saved = state["optimizer"]["param_groups"]
        merged = [
            old | {"params": group["params"]} for group, old in zip(saved, groups, strict=True)
        ]
        return state | {"optimizer": {**state["optimizer"], "param_groups": merged}}

    def light(self, random: RandomState | None = None) -> LightState:
        """Return the part of the state that every step changes, also one that is skipped.

        random: the random numbers of an earlier moment, to be part of it.
        """
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        light = self.registry.state_dict(leaving_out=HEAVY)
        return light | ({"processes": [self._process(random)]} if random else {}), groups

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called.

        Raises UserError when the state is of another model or another version.
        """
        self.registry.load_state_dict(state)

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Load what measuring and sampling depend on: weights, and ``load_progress``.

        Raises UserError when the state is of another model.
        """
        load_weights(self.policy, self.reference, state)
        self.load_progress(state)

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Load running statistics of the losses, a moving average of the weights, counters and
        evaluations.
        """
        self._load_shifts(state["shifts"])
        if self.moving_teacher is not None and "teacher" in state:
            self._load_teacher(state["teacher"])
        self.counters.load_state_dict(state["counters"])
        self.evaluations.update(state["evaluations"])

    def _weights(self) -> State:
        """The trained weights, and a digest of the frozen ones under an adapter.

        evaluation: the weights to use, where the optimizer trains others.
        """
        if self._base_digest is None:
            self._base_digest = _digest_of_base(self.policy)
        evaluation: dict[str, torch.Tensor] = {}
        if has_evaluation_weights(self.optimizer):
            with self.evaluation_weights():
                evaluation = {n: p.detach().clone() for n, p in self.trained_weights.items()}
        values = dict(self.trained_weights)
        return {"base": self._base_digest, "values": values, "evaluation": evaluation}

    def _load_weights(self, state: Mapping[str, Any]) -> None:
        if self._base_digest is None:
            self._base_digest = _digest_of_base(self.policy)
        _load_policy_weights(self.policy, state, self._base_digest, state["values"])

    def _reference(self) -> State:
        if isinstance(self.reference, SyncedReference):
            return {"digest": None, "weights": dict(self.reference.weights)}
        if self.reference is not None and self._reference_digest is None:
            # Once: it never changes, and hashing it takes as long as a save.
            self._reference_digest = self.reference.digests().weights
        return {"digest": self._reference_digest, "weights": {}}

    def _load_reference(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.reference, SyncedReference):
            state_files.put(state["weights"], self.reference.weights)
        elif state["digest"] != self._reference()["digest"]:
            setting, name = self.recipe.reference_model
            name = self.recipe.teacher.model if self.recipe.teacher.is_served else name
            raise UserError(
                f"the reference ({name or self.recipe.model.name}) is not the model that the run "
                f"started with",
                code="reference-changed",
                where=setting if name else "model.name",
                fix="restore the original model, or start over with --fresh",
            )

    def _teacher(self) -> State:
        assert self.moving_teacher is not None
        return {"weights": dict(self.moving_teacher.weights)}

    def _load_teacher(self, state: Mapping[str, Any]) -> None:
        assert self.moving_teacher is not None
        state_files.put(state["weights"], self.moving_teacher.weights)

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state_files.for_optimizer(state, self.optimizer))

    def _shifts(self) -> list[tuple[float, ...]]:
        return [astuple(objective.shift) for objective in self.objectives]

    def _load_shifts(self, state: Sequence[Sequence[float]]) -> None:
        # A run that is only measured has no auxiliary losses, whose shifts come after its own.
        for objective, shift in zip(self.objectives, state, strict=False):
            objective.shift = RewardShift(*shift)  # type: ignore[arg-type]

    def _process_state(self) -> list[State]:
        """State that differs between processes: metrics since the last record, random numbers."""
        return [self._process(RandomState())]

    def _process(self, random: RandomState) -> State:
        return {"window": self.window.state_dict(), "random": random.state_dict()}

    def _load_process_states(self, state: Sequence[State]) -> None:
        """Load the states of all processes.

        With another number of processes, their metrics are distributed over them, and an additional
        process seeds its random numbers from the seed and its rank.
        """
        group, window = self.group, self.window
        window.load_state_dict(state[0]["window"])
        if len(state) != group.size:
            window.meter = Meter()
            for process in state[group.rank :: group.size]:
                other = MetricsWindow()
                other.load_state_dict(process["window"])
                window.add(other)
            window.tokens_of = (
                [sum(window.tokens_of), *[0] * (group.size - 1)] if window.tokens_of else []
            )
        elif group.rank:
            window.load_state_dict(state[group.rank]["window"])
        if group.rank < len(state):
            RandomState().load_state_dict(state[group.rank]["random"])
        else:
            torch.manual_seed(self.recipe.train.seed + group.rank)


def _moving_average(policy: PolicyModel) -> SyncedReference:
    if any(hasattr(p, "placements") for p in policy.parameters()):
        raise UserError(
            "a moving average of weights that are split over processes is not supported",
            code="setting-conflict",
            where="teacher.weights",
            fix="set teacher.weights: initial, or parallel.shard: off and parallel.tensor: 1",
        )
    return SyncedReference(policy)


def load_weights(
    policy: PolicyModel, reference: Reference | None, state: Mapping[str, Any]
) -> None:
    """Load the weights to use of a saved state, and those of a reference that follows the policy.

    Raises UserError when the state is of another model.
    """
    saved = state["weights"]
    values = saved.get("evaluation") or saved["values"]
    _load_policy_weights(policy, saved, _digest_of_base(policy), values)
    if isinstance(reference, SyncedReference):
        state_files.put(state["reference"]["weights"], reference.weights)


def _load_policy_weights(
    policy: PolicyModel,
    state: Mapping[str, Any],
    base_digest: str | None,
    saved: Mapping[str, Any],
) -> None:
    weights = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    differing = sorted(weights.keys() ^ saved.keys()) or [
        name for name, p in weights.items() if p.shape != saved[name].shape
    ]
    if differing or state["base"] != base_digest:
        difference = (
            f"first difference: {differing[0]}"
            if differing
            else "the frozen weights under the adapter have changed"
        )
        raise UserError(
            f"the checkpoint belongs to a different model ({difference})",
            code="model-changed" if differing else "base-model-changed",
            where="checkpoint",
            fix="set model.name to the model of the saved run (see config.yaml in its folder), or "
            "start over with --fresh",
        )
    state_files.put(saved, weights)


def _digest_of_base(policy: PolicyModel) -> str | None:
    """Digest of the frozen weights under an adapter; None without an adapter."""
    if not hasattr(policy.model, "peft_config"):
        return None
    return AdapterDisabledReference(policy).digests().weights
