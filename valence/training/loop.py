"""The one loop: steps, evaluations, the log, and when a run is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from valence.data.audit_text import audited
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.together import gathered
from valence.errors import UserError
from valence.models import speed
from valence.models.build import DTYPES
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference, SyncedReference
from valence.reports.console import number
from valence.reports.live import Dashboard
from valence.reports.online_signs import OnlineWatch
from valence.reports.results import FILES, read_history
from valence.reports.sinks import FanOut, JsonlSink, Sink
from valence.reports.trackers import trackers
from valence.rollouts import Sampling
from valence.runs.folder import RunFolder
from valence.runs.signals import Interrupted, Stop
from valence.terminal import Terminal, print_message, warn_on_stderr
from valence.training import measure
from valence.training.evaluate import Evaluation
from valence.training.memory import peak, with_memory
from valence.training.methods import Method, settings_of_step
from valence.training.online.rounds import NothingToLearnError, Rounds
from valence.training.optim import adamw, schedule, warmup_steps
from valence.training.pages import Pages
from valence.training.plan import make_plan
from valence.training.saving import HEAVY, Saver, registry_of
from valence.training.setup import AuxiliaryPart, Prepared
from valence.training.step import AuxiliaryLoss, Objective, StepResult, optimizer_step
from valence.training.track import (
    AnomalyDetector,
    BestMetricTracker,
    Budget,
    Counters,
    MetricsWindow,
)
from valence.types import Chat, Completion, Content, Mean

Callback = Callable[["Run", Mapping[str, Any]], None]
OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = Any  # a learning-rate scheduler, or a function of the optimizer that makes one

SHOWN = ("loss", "reward/mean", "eval/loss", "eval/rewards/accuracies", "eval/rewards/auc", "kl")
"""Metrics in the ``repr`` of a run, if its log has them."""


class Run:
    """One run: a policy, its reference, the rows, and where the run stands.

    ``fit`` trains to the end; ``evaluate`` measures any rows; ``state_dict`` and
    ``load_state_dict`` carry a run over to another process, which then goes on as the first would
    have. Without a ``folder`` nothing is written.
    """

    def __init__(
        self,
        prepared: Prepared,
        policy: PolicyModel,
        reference: Reference | None,
        *,
        folder: RunFolder | None = None,
        optimizer: OptimizerLike | None = None,
        scheduler: SchedulerLike | None = None,
        sinks: Sequence[Sink] = (),
        callbacks: Sequence[Callback] = (),
        console: Console | None = None,
        quiet: bool = False,
        stop: Stop | None = None,
        micro_batch_tokens: int | None = None,
        first: int = 0,
        finished: bool = False,
        world: Group | None = None,
    ) -> None:
        """micro_batch_tokens: tokens that run at once, where the recipe leaves it open; planned if
        not given. first: the step from which on the present rows are trained on, when a run is
        taken up with others. finished: it was so before, and is only here to be looked at. world:
        all processes.
        """
        self.prepared, self.recipe, self.folder = prepared, prepared.recipe, folder
        self.policy, self.reference = policy, reference
        self.console, self.quiet, self.callbacks = console or Terminal(), quiet, tuple(callbacks)
        self.world = world or Single()
        # of those that have other rows
        self.group = self.world.split(self.recipe.parallel.tensor)[0]
        run = self.recipe.run
        self.budget = Budget(micro_batch_tokens or self.planned_tokens())
        self.divided = any(hasattr(p, "placements") for p in policy.parameters())
        """Whether weights are split over processes."""
        self.objective = self._objective(prepared.method, settings_of_step(self.recipe))
        mixed = prepared.mixed if "train" in prepared.corpora else ()
        self.mixed = [(part, self._objective(part.method, part.settings)) for part in mixed]
        self.sampler = prepared.sampler if "train" in prepared.corpora else None
        self.rounds = Rounds(self) if prepared.method.online else None
        self.total_steps = prepared.steps_from(first) if self.sampler else 0
        self.counters = Counters(first=first, total=self.total_steps)
        self.own_optimizer = optimizer is None
        self.optimizer, self.scheduler = self._optimizer(optimizer, scheduler)
        self._jsonl = (
            JsonlSink(folder.path / "metrics.jsonl", self.warn)
            if folder and folder.writes
            else None
        )
        self.log = self._log(sinks)
        self.saver = Saver(self, folder, self._jsonl) if folder else None
        self.pages = Pages(folder.path, self.warn) if folder and folder.writes else None
        self.window, self.watch, self.online_watch = (
            MetricsWindow(),
            AnomalyDetector(),
            OnlineWatch(),
        )
        self.best, self.early = BestMetricTracker(run.keep_best), BestMetricTracker(run.early_stop)
        self.evaluations: dict[int, dict[str, float]] = {}
        # False from the moment the weights begin to change until the counters say so: such a state
        # must not be saved.
        self.whole = True
        self.together = self.world.size == 1
        """Whether all processes have come to the same place, so that they may save what there
        is.
        """
        self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "whole", False))
        self.nothing_to_learn = ""
        """Why no further round could be sampled that has something to train on."""
        self.said: set[str] = set()
        self.stop, self.finished = stop or Stop(self.console), finished
        self.base: str | None = None
        self.compared: str | None = None
        self._before_skips: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
        self.facts: dict[str, Any] = folder.facts if folder else {}
        self.audit = audited(prepared.corpora["train"].audit) if self.sampler else {}
        self.registry = registry_of(self, self._jsonl)

    def _log(self, given: Sequence[Sink]) -> FanOut:
        """The file, the sinks given and those of the recipe."""
        asked = (
            trackers([sink.model_dump() for sink in self.recipe.run.sinks], self.say_once)
            if self.folder
            else []
        )
        return FanOut(
            [self._jsonl] if self._jsonl else [],
            [*given, *asked] if self.world.rank == 0 else [],
            self.warn,
        )

    def _optimizer(
        self, given: OptimizerLike | None, scheduler: SchedulerLike | None
    ) -> tuple[torch.optim.Optimizer, Any]:
        """Those given, or those of the recipe.

        Raises UserError for an optimizer of other weights than the policy has.
        """
        policy, train = self.policy, self.recipe.train
        assert not isinstance(train.learning_rate, str), "load_recipe replaces auto"
        optimizer = _made(given, [p for p in policy.parameters() if p.requires_grad]) or adamw(
            policy,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            betas=train.betas,
            kind=train.optimizer,
            value_learning_rate=self.recipe.value.learning_rate,
        )
        own = {id(p) for p in policy.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            what = (
                "the optimizer given holds weights that are not those of the policy (which "
                "may be split over processes by now)"
            )
            raise UserError(
                what,
                code="optimizer-weights",
                where="optimizer",
                fix="give a function of the list of trained weights, which makes it",
            )
        return optimizer, _made(scheduler, optimizer) or schedule(
            optimizer, kind=train.schedule, warmup=train.warmup, total=max(1, self.total_steps)
        )

    def _objective(self, method: Method, settings: Mapping[str, Any]) -> Objective:
        reference, budget = (
            self.reference if method.asks_reference else None,
            self.budget.at(0, "evaluation"),
        )
        return Objective(
            method,
            dict(settings),
            self.policy,
            reference,
            self.group,
            budget,
            self.recipe.data.max_length,
            router_aux_loss=self.recipe.train.router_aux_loss,
        )

    def planned_tokens(self) -> int:
        """How many tokens are to run at once, where nothing has said so. All processes call it."""
        plan = make_plan(
            self.prepared, self.policy.causal, self.world, sharded=self.policy.is_sharded
        )
        return plan.micro_batch_tokens

    @property
    def objectives(self) -> list[Objective]:
        """All that a step trains with."""
        return [self.objective, *(objective for _, objective in self.mixed)]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.counters.step

    @property
    def tokens_seen(self) -> int:
        return self.counters.tokens_seen

    # ------------------------------------------------------------------ training

    def fit(self) -> dict[str, float]:
        """Trains to the last step, evaluating and saving on the way.

        Returns the last evaluation (or the last record).

        Raises Interrupted after a signal or run.max_time, with the step finished; UserError when
        too many steps in a row were not finite, or too many saves failed.
        """
        if self.sampler is None:
            raise UserError(
                "there is nothing to train on",
                code="train-data-missing",
                where="data.train",
                fix="name a file of rows",
            )
        self._caution()
        settings = {name: setting.value for name, setting in self.prepared.source.settings.items()}
        self.log.start(
            settings,
            self.folder.path if self.folder else None,
            self.folder is not None and self.folder.taken_up,
        )
        last: dict[str, Any] = {}
        seen, began = 0, (self.step, self.counters.settled)
        bar = Dashboard(
            self.console, "training", self.total_steps, start=self.step, quiet=self.quiet,
            warnings=lambda: self.facts.get("warnings", ()),
        )  # fmt: skip
        if self._jsonl and self.step:
            bar.recall(self._jsonl.path)
        with self.stop.waiting(), bar:
            while True:
                last = self._settle(bar) or last
                if seen:
                    bar.update(self.step, tokens=seen)
                stops = self.stops()
                if stops or self.step >= self.total_steps or self.ended_early:
                    break
                if self.rounds is not None:
                    if not self._sample_round(self.rounds):
                        last = self._evaluate_at_end(bar) or last
                        break
                    if self.rounds.collector.latest:
                        bar.answer(*self.rounds.collector.latest)
                seen += self._one_step().tokens
                self.stop.where = f"stopped after step {self.step} of {self.total_steps}"
        if stops:
            if self.stop.out_of_time and (self.step, self.counters.settled) == began:
                raise UserError(
                    "nothing was done within run.max_time",
                    code="max-time-too-short",
                    where="run.max_time",
                    fix="make it longer",
                )
            raise self.stop.ended()
        return self.evaluations.get(self.step, last)

    def _sample_round(self, rounds: Rounds) -> bool:
        """Whether there is a round to train on.

        Raises NothingToLearnError before the first step, or when train.max_zero_gradient_steps is
        null.
        """
        try:
            rounds.fill()
        except NothingToLearnError as error:
            if self.step == 0 or self.recipe.train.max_zero_gradient_steps is None:
                raise
            self.nothing_to_learn = f"{error.what} ({error.fix})"
            return False
        return True

    def _evaluate_at_end(self, bar: Dashboard) -> dict[str, Any]:
        """Evaluate and log where a run ends before its next step was known to be the last."""
        if not measure.due(self) or self.step in self.evaluations:
            return {}
        with bar.pause(), self.window.timing("evaluation"):
            record = {"step": self.step, **measure.evaluate_and_keep(self)}
        self.log.log(record)
        bar.record(record)
        return record

    @property
    def ended_early(self) -> str:
        """Why training ends before its last step; empty if it does not."""
        return self.early.exhausted or self.nothing_to_learn or self._without_gradient

    @property
    def _without_gradient(self) -> str:
        limit, count = self.recipe.train.max_zero_gradient_steps, self.counters.zero_gradient_steps
        if limit is None or count < limit:
            return ""
        return f"the last {count} steps had no gradient (train.max_zero_gradient_steps: {limit})"

    def stops(self) -> bool:
        """Whether any process was asked to stop: then all are. All come here."""
        asked = self.world.any(self.stop.requested)
        if asked and self.world.size > 1:
            said = gathered(self.world, [self.stop.reason, self.stop.status])
            self.stop.take_over(*next(each for each in said if each[0]))
            self.together = True
        return asked  # not what this process has been asked since, of which the others do not know

    def _caution(self) -> None:
        if self.recipe.model.lora is not None and self.recipe.model.lora.dropout > 0:
            self.say_once(
                "model.lora.dropout is above 0: the loss of a step now depends on how it is cut "
                "into micro-batches"
            )
        if self.recipe.train.router_aux_loss > 0:
            self.say_once(
                "train.router_aux_loss is above 0: the loss of a step depends on how it is cut "
                "into micro-batches"
            )
        for said in (
            self.prepared.ends_early,
            speed.slow(self.policy.device, DTYPES[self.recipe.model.dtype]),
        ):
            if said and self.folder:  # the plan has said it on the terminal
                self.folder.note("notes", said)
        if warmup_steps(self.recipe.train.warmup, self.total_steps) >= self.total_steps > 1:
            self.say_once(
                "train.warmup lasts as long as the run: the learning rate never falls, and may "
                "never reach its peak"
            )

    def _one_step(self) -> StepResult:
        """One optimizer step, and what the counters and the window say of it."""
        began = time.monotonic()
        before = self._light()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        outcome, norm, applied, examples = with_memory(self, "training", self._update)
        self.scheduler.step()
        counters, window = self.counters, self.window
        counters.step += 1
        if self.rounds is not None:
            self.rounds.passed()
        every = self.recipe.reference.sync_every
        if (
            applied
            and isinstance(self.reference, SyncedReference)
            and every
            and self.step % every == 0
        ):
            self.reference.follow(self.trained, self.recipe.reference.sync_mix)
        counters.tokens_seen += outcome.tokens
        counters.examples_seen += examples
        if applied:
            window.meter.pool(outcome.metrics)
        if self.group.rank == 0:  # what is known of all processes together
            window.meter.add(
                {"loss": _one(outcome.loss), "grad_norm": _one(torch.tensor(norm))}
                if applied
                else {}
            )
            window.meter.add(
                {
                    "waste": Mean(
                        torch.tensor(outcome.tokens - outcome.num_unique_tokens),
                        torch.tensor(outcome.tokens),
                    ),
                    "skipped": _one(torch.tensor(float(not applied))),
                }
            )
        window.ran(outcome.tokens_of)
        window.last = {"lr": learning_rate, "micro_batches": outcome.micro_batches}
        window.seconds += time.monotonic() - began
        self.whole = True
        if self.rounds is not None and applied:
            counters.zero_gradient_steps = counters.zero_gradient_steps + 1 if norm == 0 else 0
        self._guard(outcome, norm, applied, before)
        most = self.objective.micro_batch_tokens
        if outcome.largest > most:
            self.say_once(
                f"some rows have more than train.micro_batch_tokens ({most}) tokens: each of "
                f"them runs alone"
            )
        return outcome

    def _update(self) -> tuple[StepResult, float, bool, int]:
        """Return the measurements of a step, the gradient's norm, whether it was applied, and the
        number of examples.
        """
        assert self.sampler is not None
        at = self.step - self.counters.first
        if self.rounds is None:
            indices, later = self.sampler.step(at)
            units = self.sampler.units
            examples, following = [units[i] for i in indices], (units[i] for i in later)
        else:
            examples, following = self.rounds.next()
        auxiliary = [self._auxiliary_loss(part, objective) for part, objective in self.mixed]
        clip = self.recipe.train.clip_norm
        entropy = self._is_logged(self.step + 1)
        measured = optimizer_step(
            self.objective, self.optimizer, examples, following, clip, auxiliary, entropy
        )
        return *measured, len(examples) + sum(len(aux.examples) for aux in auxiliary)

    def _is_logged(self, step: int) -> bool:
        """Whether the log has a record of this step."""
        return (
            step % self.recipe.run.log_every == 0
            or step == self.total_steps
            or measure.due(self, step)
        )

    def _auxiliary_loss(self, part: AuxiliaryPart, objective: Objective) -> AuxiliaryLoss:
        """The loss of a method of `mix` in this step."""
        indices, following = part.sampler.step(self.step - self.counters.firsts.get(part.rows, 0))
        units = part.sampler.units
        examples, later = [units[i] for i in indices], (units[i] for i in following)
        return AuxiliaryLoss(part.name, objective, part.weight, examples, later)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The weights that train, by name."""
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    def _guard(
        self,
        outcome: StepResult,
        norm: float,
        applied: bool,
        before: tuple[dict[str, Any], list[dict[str, Any]]],
    ) -> None:
        """A step that was not finite is named; too many in a row end the run.

        ``before``: the state of what any step changes.
        """
        counters = self.counters
        if applied:
            counters.skipped_in_a_row, self._before_skips = 0, None
            return
        counters.skipped_in_a_row += 1
        self._before_skips = self._before_skips or before
        names = sorted(
            {name for names in gathered(self.group, outcome.not_finite()) for name in names}
        )
        where = self.prepared.origins(names) if names else "no single row (the gradient overflowed)"
        self.warn(
            f"step {self.step} was skipped: loss {float(outcome.loss):.4g}, gradient norm "
            f"{norm:.4g}; rows: {where}"
        )
        if counters.skipped_in_a_row >= self.recipe.train.max_skipped:
            self.together = True
            raise UserError(
                f"{counters.skipped_in_a_row} steps in a row had a loss or gradient that is not "
                f"finite",
                code="loss-not-finite",
                where=f"step {self.step}",
                fix="look at the rows named above, use model.dtype: float32, or lower "
                "train.learning_rate (with --allow "
                "train.learning_rate the run goes on from before these steps)",
            )

    def _settle(self, bar: Dashboard) -> dict[str, Any]:
        """What is due after a step: evaluation, log, save.

        Returns the record that was logged, if any.

        An interruption on the way leaves it undone, and a run that is taken up there begins with
        it.
        """
        counters, step = self.counters, self.step
        if counters.settled >= step:
            return {}
        found: dict[str, float] = {}
        if measure.due(self):
            with bar.pause(), self.window.timing("evaluation"):
                found = measure.evaluate_and_keep(self)
        record: dict[str, Any] = {}
        is_last = step == self.total_steps or bool(self.ended_early)
        if step and (found or step % self.recipe.run.log_every == 0 or is_last):
            record = self._window() | found
        elif found:
            record = {"step": 0, **self._of_the_machine()} | found
        is_best = self._use_evaluation(found) if found else False
        if record:
            self.log.log(record)
            bar.record(record)
            self.window.clear()
        counters.settled = step
        self._warn_of_anomalies(record)
        for callback in self.callbacks if record else ():
            callback(self, record)
        if self.pages is not None:
            self.pages.look()
        if step and (is_best or step % self.recipe.run.save_every == 0 or is_last):
            with bar.during("saving"):
                self.save(wait=False)
        elif self.saver is not None:
            self.saver.tell()
        return record

    def _use_evaluation(self, metrics: Mapping[str, float]) -> bool:
        """Compare with earlier evaluations. Returns whether this one is the best so far."""
        is_best = False
        if self.saver is not None:
            self.saver.look_at_best()
        # While steps are skipped, the state that would be saved is not that of this evaluation.
        if self._before_skips is None:
            is_best = self.best.see(self.step, metrics)
        self.early.see(self.step, metrics)
        return is_best

    def _warn_of_anomalies(self, record: Mapping[str, Any]) -> None:
        for message in self.watch.see(record):
            self.warn(f"step {self.step}: {message}")
        if record and self.rounds is not None:
            for sign in self.online_watch.see(record):
                self.warn(f"step {self.step}: {sign.said} {sign.do}")

    def _window(self) -> dict[str, float]:
        """The record of the steps since the last one."""
        assert self.sampler is not None
        counters, window = self.counters, self.window
        tokens, most, least = sum(window.tokens_of), max(window.tokens_of), min(window.tokens_of)
        several = self.group.size > 1
        shares = (
            {"ranks": self.group.size, "tokens/rank_max": most, "tokens/rank_min": least}
            if several
            else {}
        )
        return {
            "step": self.step,
            "epoch": (self.step - counters.first) / self.prepared.steps_per_epoch
            if self.rounds is None
            else self.rounds.epochs,
            **window.meter.reduce(self.objective.group),
            **window.last,
            "tokens": tokens,
            "tokens_seen": counters.tokens_seen,
            "examples_seen": counters.examples_seen,
            "tokens/s": tokens / window.seconds if window.seconds > 0 else 0.0,
            "seconds": window.seconds,
            **self._of_the_machine(),
            **shares,
            **({} if self.rounds is None else self.rounds.counters),
        }

    def _of_the_machine(self) -> dict[str, float]:
        spent = {f"seconds/{phase}": seconds for phase, seconds in self.window.spent.items()}
        return spent | {"memory": peak(self.policy.device)}

    def say_once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            self._say("notes", message)

    def warn(self, message: str) -> None:
        self._say("warnings", message)

    def _say(self, kind: str, message: str) -> None:
        if not self.quiet:
            print_message(self.console, message, "yellow")
        elif kind == "warnings":
            warn_on_stderr(self.console, message)
        if self.folder:
            self.folder.note(kind, message)

    # ------------------------------------------------------------------ measuring

    def evaluate(self, rows: Any = None, *, name: str = "eval") -> Evaluation:
        """Measures the policy as it is: on rows in memory, or on the recipe's ``eval``, ``test`` or
        ``train`` rows.
        """
        return measure.evaluate(self, rows, name)

    def sample(
        self, prompts: Sequence[Content], sampling: Sampling, n: int = 1, *, quiet: bool = True
    ) -> list[list[Completion]]:
        """n answers of the policy, as it is, to each prompt: the tokens that training would see,
        its own way of stopping. Unless quiet it shows its progress.

        Raises UserError of a reward model.
        """
        return measure.sample(self, prompts, sampling, n, quiet)

    # ------------------------------------------------------------------ state

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.run.dir)

    @property
    def report(self) -> Path:
        """The page with curves, samples and warnings."""
        return self.directory / FILES["report"]

    @property
    def model_dir(self) -> Path:
        """The trained model: a folder that transformers loads.

        It is written at the end of the run.
        """
        return self.directory / FILES["model"]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of the log, oldest first, as ``pandas.DataFrame`` takes them."""
        return read_history(self.directory)

    def ask(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Answer a prompt with the policy as it is now.

        prompt: text or chat messages. Text becomes a user message if it does in training
        (``data.as_chat``).
        temperature: 0 takes the most likely token each time.

        Raises UserError for a reward model.
        """
        content: Content = (
            prompt if isinstance(prompt, str) else Chat(tuple(dict(message) for message in prompt))
        )
        how = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        return self.sample([content], how)[0][0].text

    def __repr__(self) -> str:
        latest = dict[str, Any]()
        for record in self.history:
            latest |= record
        metrics = [
            f"{name}={number(latest[name])}"
            for name in SHOWN
            if isinstance(latest.get(name), int | float)
        ]
        steps = f"steps={self.step}/{max(self.step, self.total_steps)}"
        method, folder = f"method={self.recipe.method!r}", f"folder={str(self.directory)!r}"
        return f"Run({', '.join([method, steps, *metrics, folder])})"

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on.

        While steps are being skipped, it is that from before the first of them.
        """
        light, groups = self._before_skips or self._light()
        state = light | {name: self.registry.parts[name].state_dict() for name in HEAVY}
        state["processes"] = [
            each for own in gathered(self.group, state["processes"]) for each in own
        ]
        saved = state["optimizer"]["param_groups"]
        named = [
            old | {"params": group["params"]} for group, old in zip(saved, groups, strict=True)
        ]
        return state | {"optimizer": {**state["optimizer"], "param_groups": named}}

    def _light(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What of the state any step changes: all but weights and moments; and what a schedule sets
        in the optimizer.
        """
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return self.registry.state_dict(leaving_out=HEAVY), groups

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` was called.

        Raises UserError when it is of another model or another version.
        """
        self.registry.load_state_dict(state)

    def save(self, *, wait: bool = True) -> None:
        """Writes a checkpoint into the run's folder, if it has one: all processes call it.

        Raises UserError when it cannot be written; without ``wait`` only when that was so too
        often.
        """
        if self.saver is not None:
            with self.window.timing("saving"):
                self.saver.ready()
                self.saver.save(self.state_dict(), wait=wait)
                self.saver.tell(last=wait)


def _one(value: torch.Tensor) -> Mean:
    return Mean(value, torch.ones(()))


def _made(given: Any, argument: Any) -> Any:
    """An object given, or what a function given makes of the argument."""
    if given is None or (hasattr(given, "state_dict") and not isinstance(given, type)):
        return given
    return given(argument)


__all__ = ["Callback", "Interrupted", "OptimizerLike", "Run", "SchedulerLike"]
