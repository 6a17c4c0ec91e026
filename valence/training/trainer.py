"""The training loop: steps, evaluations, the log, and when the run is saved.

Also the thread that prepares the next step, and the report page that is updated meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from valence.config.schema import Recipe
from valence.distributed.process_group import Group, gather_objects
from valence.errors import UserError, naming_arguments
from valence.models.build import DTYPES
from valence.models.dtypes import slow_dtype
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference, SyncedReference
from valence.reports.console import Dashboard, Progress
from valence.reports.formatting import number
from valence.reports.run_record import MODEL, REPORT, read_history
from valence.reports.sinks import SAMPLES, FanOut, JsonlSink
from valence.rollouts import Sampling
from valence.training.callbacks import CallbackLike, Callbacks
from valence.training.checkpoints import Saver
from valence.training.episodes import episodes_of
from valence.training.evaluate import Evaluation
from valence.training.examples import (
    ExampleSource,
    NothingToLearnError,
    StepExamples,
    StoredExamples,
)
from valence.training.feedback_test import feedback_test
from valence.training.folder import Messages, RunFolder
from valence.training.model_files import ModelWriter
from valence.training.optim import warmup_steps
from valence.training.out_of_memory import MemoryRetry, peak_memory
from valence.training.prepare import AuxiliaryPart, Prepared, rows_to_measure
from valence.training.sampling import PolicySampler, check_can_generate, sampling_failed
from valence.training.signals import SharedStop
from valence.training.state import TrainState
from valence.training.state_files import RandomState
from valence.training.step import (
    AuxiliaryLoss,
    Objective,
    StepPlan,
    StepResult,
    loss_and_gradient,
    optimizer_step,
)
from valence.types import Chat, Completion, Content, Mean, Origin, Prompt, TokenizedExample

SHOWN = ("loss", "reward/mean", "eval/loss", "eval/rewards/accuracies", "eval/rewards/auc", "kl")
"""Metrics in the ``repr`` of a trainer, if its log has them."""

PRINTED = (
    "loss",
    "reward/mean",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/auc",
    "rewards/spearman",
    "logps/token",
    "kl",
    "rollout/length",
)
"""Metrics of an evaluation that are printed as soon as they are known."""


@dataclass(frozen=True)
class StepInputs:
    """What an optimizer step computes on: examples, and the micro-batches of this rank.

    auxiliary: the losses of `mix`, with their examples and micro-batches.
    """

    examples: Sequence[TokenizedExample]
    plan: StepPlan
    auxiliary: Sequence[AuxiliaryLoss]


class Trainer:
    """Train, evaluate and sample a policy.

    ``fit`` trains to the last step. ``evaluate`` computes metrics on any rows. ``state_dict`` and
    ``load_state_dict`` move a run to another process, which continues exactly as the first process
    would have. Without a ``folder``, nothing is written.

    ended: a message if training ends before its last step because nothing is left to learn.
    """

    def __init__(
        self,
        prepared: Prepared,
        state: TrainState,
        examples: ExampleSource,
        *,
        world: Group,
        stop: SharedStop,
        messages: Messages,
        retry: MemoryRetry,
        log: FanOut,
        model_writer: ModelWriter,
        folder: RunFolder | None = None,
        jsonl: JsonlSink | None = None,
        saver: Saver | None = None,
        callbacks: Sequence[CallbackLike] = (),
        finished: bool = False,
    ) -> None:
        """world: all processes. log: where records go. jsonl: the log file, in the process that
        writes it. finished: the run is only measured, not trained.
        """
        self.prepared, self.state, self.examples = prepared, state, examples
        self.world, self.stop, self.messages, self.retry = world, stop, messages, retry
        self.log, self.model_writer, self.folder, self.saver = log, model_writer, folder, saver
        self.callbacks, self.finished = Callbacks(callbacks), finished
        self._jsonl = jsonl
        self._prefetcher = Prefetcher[StepInputs]()
        self.pages = (
            Pages(folder.path, messages.warn) if folder is not None and folder.writes else None
        )
        self.nothing_to_learn = ""

    # Properties for users

    @property
    def recipe(self) -> Recipe:
        return self.prepared.recipe

    @property
    def policy(self) -> PolicyModel:
        return self.state.policy

    @property
    def reference(self) -> Reference | None:
        return self.state.reference

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the complete run."""
        return self.state.total_steps

    @property
    def tokens_seen(self) -> int:
        """Tokens that ran through the policy in training."""
        return self.state.counters.tokens_seen

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Metrics on the rows of ``data.eval``, by step."""
        return self.state.evaluations

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.run.dir)

    @property
    def report(self) -> Path:
        """The report: an HTML page with curves, samples and warnings."""
        return self.directory / REPORT

    @property
    def model_dir(self) -> Path:
        """The trained model: a folder that transformers loads, written at the end of the run."""
        return self.directory / MODEL

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of the log, oldest first, in a form that ``pandas.DataFrame`` accepts."""
        return read_history(self.directory)

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
        return f"Trainer({', '.join([method, steps, *metrics, folder])})"

    # Training

    def fit(self) -> dict[str, float]:
        """Train to the last step, with evaluations and checkpoints as the recipe says. The last
        checkpoint is written when it returns.

        Returns the metrics of the last evaluation, or the last record of the log if there was none.

        Raises Interrupted after a signal or run.max_time, once the current step is finished.
        Raises UserError when too many consecutive steps, or all steps, had a loss or gradient that
        is not finite, or when too many saves failed.
        """
        with naming_arguments(self.messages.names_arguments):
            return self._fit()

    def _fit(self) -> dict[str, float]:
        if "train" not in self.prepared.corpora:
            raise UserError(
                "there is no training data",
                code="train-data-missing",
                where="data.train",
                fix="set it to a file of rows",
            )
        self._note_settings()
        settings = {name: setting.value for name, setting in self.prepared.source.settings.items()}
        self.log.start(
            settings,
            self.folder.path if self.folder else None,
            self.folder is not None and self.folder.is_resumed,
        )
        counters = self.state.counters
        last: dict[str, Any] = {}
        num_tokens, start = 0, (counters.step, counters.settled)
        facts = self.model_writer.facts
        bar = Dashboard(
            self.messages.console, "training", self.total_steps, start=self.step,
            warnings=lambda: facts.get("warnings", ()),
        )  # fmt: skip
        if self._jsonl and self.step:
            bar.recall(self._jsonl.path)
        self.callbacks.on_start(self)
        self._test_feedback()
        with self.stop.local.waiting(), bar, closing(self._prefetcher):
            while True:
                last = self._finish_step(bar) or last
                if num_tokens:
                    bar.update(self.step, tokens=num_tokens)
                is_stopped = self.stop.requested()
                if is_stopped or self.step >= self.total_steps or self.ended_early:
                    if self.ended_early and not is_stopped:  # perhaps by a callback just now
                        last = self._evaluate_at_end(bar) or last
                    break
                if not self._prepare_step():
                    last = self._evaluate_at_end(bar) or last
                    break
                if self.examples.latest_completion:
                    bar.answer(*self.examples.latest_completion)
                num_tokens += self._train_step().tokens
                self.callbacks.on_step(self)
                self.stop.local.where = f"stopped after step {self.step} of {self.total_steps}"
        if is_stopped:
            if self.stop.local.out_of_time and (counters.step, counters.settled) == start:
                raise UserError(
                    f"run.max_time: {self.recipe.run.max_time} is too short to load the model and "
                    "finish one step",
                    code="max-time-too-short",
                    where="run.max_time",
                    fix="raise run.max_time, for example to 01:00:00 (hours, minutes, seconds)",
                )
            raise self.stop.local.ended()
        if counters.step and counters.skipped_in_a_row == counters.step:
            raise self._not_finite()
        self.save()  # the last checkpoint may still be being written
        return self.evaluations.get(self.step, last)

    # A training loop of the user

    def batches(self) -> Iterator[StepInputs]:
        """The batches of the steps that are left, for a training loop of your own.

        In online training, each batch is sampled and scored when it is asked for. ``step`` counts
        the batches that the loop is done with.
        """
        while self.step < self.total_steps and self._prepare_step():
            budgets = [objective.micro_batch_tokens for objective in self.state.objectives]
            yield self._prepare_inputs(self.step, budgets, self.examples.next_step)
            self.state.counters.step += 1
            self.examples.finish_step()

    def loss_and_gradient(self, batch: StepInputs) -> Tensor:
        """Compute the loss of a batch, and add its gradient to those of ``policy``'s weights.

        Both are those of the recipe's method, averaged over all micro-batches and processes.
        Returns the loss, a tensor without gradient.
        """
        objective, weights = self.state.objective, list(self.state.trained_weights.values())
        # The gradients of earlier calls are already summed over the processes.
        earlier = [p.grad for p in weights]
        for p in weights if objective.has_collectives else ():
            p.grad = None
        result, results = loss_and_gradient(
            objective, batch.examples, batch.auxiliary, plan=batch.plan
        )
        objective.gradient_group.reduce_gradients(weights)
        for p, grad in zip(weights, earlier, strict=True) if objective.has_collectives else ():
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad
        for measured, part in results:
            measured.update_statistics(part)
        return result.loss

    def close(self) -> None:
        """Release the run's folder, and connections and processes, after a loop of your own."""
        self.examples.close()
        if self.folder is not None:
            self.folder.close()

    def end(self, reason: str) -> None:
        """End training after the current step, for a callback. All processes must call this method.

        The run is then finished as after its last step: with evaluation, model and report.
        """
        self.nothing_to_learn = self.nothing_to_learn or reason

    def _test_feedback(self) -> None:
        """Before the first step, say whether the model uses the feedback of the training rows.

        The results are in run.json by list of rows, without the feedback.
        """
        results: dict[str, dict[str, Any]] = {}
        for name, corpus in self.prepared.corpora.items() if self.step == 0 else ():
            method = self.prepared.method_for(name)
            objective = next(o for o in self.state.objectives if o.method is method)
            if not (method.loss.needs_teacher and name.endswith("train")) or method.online:
                continue
            test = feedback_test(objective, self.prepared, corpus)
            if test is not None:
                (self.messages.note_once if test.is_used else self.messages.warn)(str(test))
                results[name] = {**asdict(test), "is_used": test.is_used, "sentence": str(test)}
        if results and self.folder is not None:
            self.folder.record(feedback_test=results)

    def _note_settings(self) -> None:
        """Note settings whose effect may surprise."""
        recipe = self.recipe
        depends = "is above 0: the loss of a step depends on its micro-batches"
        if recipe.model.lora is not None and recipe.model.lora.dropout > 0:
            self.messages.note_once(f"model.lora.dropout {depends}")
        if recipe.train.router_aux_loss > 0:
            self.messages.note_once(f"train.router_aux_loss {depends}")
        if note := slow_dtype(self.policy.device, DTYPES[recipe.model.dtype]):
            self.messages.record_note(note)  # printed with the plan
        if warmup_steps(recipe.train.warmup, self.total_steps) >= self.total_steps > 1:
            self.messages.note_once(
                "train.warmup lasts as long as the run, so the learning rate never falls and may "
                "not reach its peak: lower train.warmup"
            )

    def _prepare_step(self) -> bool:
        """Return whether there are examples to train on.

        Raises NothingToLearnError before the first step, or when train.max_zero_gradient_steps is
        null.
        """
        try:
            self.examples.prepare_step()
        except NothingToLearnError as error:
            if self.step == 0 or self.recipe.train.max_zero_gradient_steps is None:
                raise
            self.nothing_to_learn = f"{error.message} ({error.fix})"
            return False
        return True

    @property
    def ended_early(self) -> str:
        """Why training ends before its last step; empty if it does not."""
        return (
            self.state.early_stop.exhausted
            or self.nothing_to_learn
            or self._zero_gradient_reason
            or self._collapse_reason
        )

    @property
    def _collapse_reason(self) -> str:
        """What shows that the policy has collapsed; empty if that does not end training."""
        collapsed = self.state.collapse.collapsed
        ends = collapsed and self.recipe.train.stop_on_collapse
        return f"{collapsed.rstrip('.')} (train.stop_on_collapse)" if ends else ""

    @property
    def _zero_gradient_reason(self) -> str:
        """Why the gradient ends training; empty if it does not."""
        limit = self.recipe.train.max_zero_gradient_steps
        count = self.state.counters.zero_gradient_steps
        if limit is None or count < limit:
            return ""
        return f"the last {count} steps had no gradient (train.max_zero_gradient_steps: {limit})"

    def _train_step(self) -> StepResult:
        """Make one optimizer step, and update counters and the metrics window."""
        start = time.monotonic()
        state, counters, window = self.state, self.state.counters, self.state.window
        random = RandomState()
        learning_rate = float(state.optimizer.param_groups[0]["lr"])
        result, norm, is_applied, num_examples = self.retry.run("training", self._update)
        if not is_applied:  # only random numbers have changed so far
            state.state_before_skips = state.state_before_skips or state.light(random)
        state.scheduler.step()
        counters.step += 1
        self.examples.finish_step()
        if is_applied:
            self._follow_policy()
        counters.tokens_seen += result.tokens
        counters.examples_seen += num_examples
        if is_applied:
            window.meter.pool(result.metrics)
        if state.group.rank == 0:  # these are known for all processes together
            if is_applied:
                window.meter.add({"loss": _one(result.loss), "grad_norm": _one(torch.tensor(norm))})
            waste = torch.tensor(result.tokens - result.num_unique_tokens)
            window.meter.add(
                {
                    "waste": Mean(waste, torch.tensor(result.tokens)),
                    "skipped": _one(torch.tensor(float(not is_applied))),
                }
            )
        window.add_tokens(result.tokens_per_rank)
        window.last = {"lr": learning_rate, "micro_batches": result.micro_batches}
        window.seconds += time.monotonic() - start
        state.is_consistent = True
        if self.prepared.method.online and is_applied:
            counters.zero_gradient_steps = counters.zero_gradient_steps + 1 if norm == 0 else 0
        self._check_finite(result, norm, is_applied)
        limit = state.objective.micro_batch_tokens
        if result.largest > limit:
            self.messages.note_once(
                f"some rows have more than train.micro_batch_tokens ({limit}) tokens: each runs "
                f"in a micro-batch by itself"
            )
        return result

    def _follow_policy(self) -> None:
        """Move a teacher that is a moving average, and a reference that follows the policy every
        ``reference.sync_every`` steps.
        """
        state, settings = self.state, self.recipe.reference
        followers: list[tuple[SyncedReference, float]] = []
        if state.moving_teacher is not None:
            followers.append((state.moving_teacher, self.recipe.teacher.rate))
        is_due = settings.sync_every is not None and self.step % settings.sync_every == 0
        if isinstance(state.reference, SyncedReference) and is_due:
            followers.append((state.reference, settings.sync_mix))
        if followers:
            with state.evaluation_weights():
                for follower, mix in followers:
                    follower.follow(state.trained_weights, mix)

    def _update(self) -> tuple[StepResult, float, bool, int]:
        """Return the measurements of a step, the norm of its gradient, whether it was applied, and
        the number of examples.
        """
        state, step = self.state, self.step
        # Micro-batches are smaller when a step is repeated because memory ran out.
        budgets = tuple(objective.micro_batch_tokens for objective in state.objectives)
        inputs = self._prefetcher.take(
            (step, budgets), partial(self._prepare_inputs, step, budgets, self.examples.next_step)
        )
        upcoming_step = self.examples.upcoming_step()
        if upcoming_step is not None and step + 1 < self.total_steps:
            prepare = partial(self._prepare_inputs, step + 1, budgets, upcoming_step)
            self._prefetcher.start((step + 1, budgets), prepare)
        result, norm, is_applied = optimizer_step(
            state.objective,
            state.optimizer,
            inputs.examples,
            self.recipe.train.clip_norm,
            inputs.auxiliary,
            entropy=self._is_logged(step + 1),
            plan=inputs.plan,
        )
        num_examples = len(inputs.examples) + sum(len(aux.examples) for aux in inputs.auxiliary)
        return result, norm, is_applied, num_examples

    def _prepare_inputs(
        self, step: int, budgets: Sequence[int], get_examples: Callable[[], StepExamples]
    ) -> StepInputs:
        """Prepare an optimizer step. The thread of the prefetcher runs this one step ahead, so that
        it must not read what training changes.

        budgets: ``micro_batch_tokens`` of each objective.
        """
        objective, *_ = self.state.objectives
        examples, following = get_examples()
        plan = objective.plan(examples, following, backward=True, micro_batch_tokens=budgets[0])
        auxiliary = [
            self._prepare_auxiliary(step, part, auxiliary_objective, micro_batch_tokens)
            for (part, auxiliary_objective), micro_batch_tokens in zip(
                self.state.auxiliary, budgets[1:], strict=True
            )
        ]
        return StepInputs(examples, plan, auxiliary)

    def _prepare_auxiliary(
        self, step: int, part: AuxiliaryPart, objective: Objective, micro_batch_tokens: int
    ) -> AuxiliaryLoss:
        """Prepare the loss of a method of `mix` in a step."""
        indices, later = part.sampler.step(step)
        rows = part.sampler.units
        examples, following = [rows[i] for i in indices], (rows[i] for i in later)
        plan = objective.plan(
            examples, following, backward=True, micro_batch_tokens=micro_batch_tokens
        )
        return AuxiliaryLoss(part.name, objective, part.weight, examples, plan)

    def _is_logged(self, step: int) -> bool:
        """Whether the log has a record of this step."""
        every = self.recipe.run.log_every
        return step % every == 0 or step == self.total_steps or self._is_evaluated(step)

    def _check_finite(self, result: StepResult, norm: float, is_applied: bool) -> None:
        """Report a step that was not finite. Raises UserError when too many in a row were not."""
        state, counters = self.state, self.state.counters
        if is_applied:
            counters.skipped_in_a_row, state.state_before_skips = 0, None
            return
        counters.skipped_in_a_row += 1
        names = sorted(
            {
                name
                for names in gather_objects(state.group, result.non_finite_ids())
                for name in names
            }
        )
        where = self.prepared.origins(names) if names else "no single row (the gradient overflowed)"
        self.messages.warn(
            f"step {self.step} was skipped, because the loss ({float(result.loss):.4g}) or the "
            f"gradient norm ({norm:.4g}) is not finite; rows: {where}"
        )
        if counters.skipped_in_a_row >= self.recipe.train.max_skipped:
            self.stop.is_synchronized = True
            raise self._not_finite()

    def _not_finite(self) -> UserError:
        return UserError(
            f"{self.state.counters.skipped_in_a_row} consecutive steps had a loss or gradient that "
            "is not finite",
            code="loss-not-finite",
            where=f"step {self.step}",
            fix="check the rows named above, set model.dtype: float32, or lower "
            "train.learning_rate. Add --allow SETTING to resume from the checkpoint before "
            "these steps, or --fresh to start over if that fails too",
        )

    # After a step

    def _finish_step(self, bar: Dashboard) -> dict[str, Any]:
        """Evaluate, log and save if that is due after this step. Returns the logged record.

        If this is interrupted, the resumed run repeats it before its first step.
        """
        state, step = self.state, self.step
        if state.counters.settled >= step:
            return {}
        metrics: dict[str, float] = {}
        if self._is_evaluated(step):
            with bar.pause(), state.window.timing("evaluation"):
                metrics = self._evaluate_and_record()
        record: dict[str, Any] = {}
        is_last = step == self.total_steps or bool(self.ended_early)
        if step and (metrics or step % self.recipe.run.log_every == 0 or is_last):
            record = self._record() | metrics
        elif metrics:
            record = {"step": 0, **self._system_metrics()} | metrics
        is_best = self._compare_evaluation(metrics) if metrics else False
        if record:
            self.log.log(record)
            bar.record(record)
            state.window.clear()
        state.counters.settled = step
        self._warn_of_anomalies(record)
        if record:
            self.callbacks.on_log(self, record)
        if self.pages is not None:
            self.pages.update()
        if step and (is_best or step % self.recipe.run.save_every == 0 or is_last):
            with bar.during("saving"):
                self.save(wait=False)
        elif self.saver is not None:
            self.saver.check_failures()
        return record

    def _evaluate_at_end(self, bar: Dashboard) -> dict[str, Any]:
        """Evaluate and log where training ends because nothing is left to learn."""
        if not self._is_evaluated(self.step) or self.step in self.evaluations:
            return {}
        with bar.pause(), self.state.window.timing("evaluation"):
            record = {"step": self.step, **self._evaluate_and_record()}
        self.log.log(record)
        bar.record(record)
        return record

    def _is_evaluated(self, step: int) -> bool:
        """Whether the rows of ``data.eval`` are measured after this step."""
        if "eval" not in self.prepared.corpora:
            return False
        if step == 0:
            return self.recipe.eval.at_start
        return (
            step % self.prepared.evaluation_interval == 0
            or step == self.total_steps
            or bool(self.ended_early)
        )

    def _evaluate_and_record(self) -> dict[str, float]:
        """Evaluate, and write the result. Returns the metrics by their names in the log."""
        evaluation = self.evaluate()
        metrics, rows = evaluation.metrics, evaluation.rows
        if self.folder:
            self.folder.evaluation(self.step, metrics, rows)
        self.evaluations[self.step] = metrics
        self.callbacks.on_evaluation(self, metrics)
        self.log.table(SAMPLES, self.step, rows)
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in PRINTED if name in metrics)
        self.messages.print(f"step {self.step}, held out: {shown}")
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _compare_evaluation(self, metrics: Mapping[str, float]) -> bool:
        """Compare with earlier evaluations. Returns whether this one is the best so far."""
        state, is_best = self.state, False
        if self.saver is not None:
            self.saver.check_best()
        # While steps are skipped, the state that would be saved is not that of this evaluation.
        if state.state_before_skips is None:
            is_best = state.best.update(self.step, metrics)
        state.early_stop.update(self.step, metrics)
        return is_best

    def _warn_of_anomalies(self, record: Mapping[str, Any]) -> None:
        for message in self.state.anomalies.update(record):
            self.messages.warn(f"step {self.step}: {message}")
        method = self.prepared.method
        if record and (method.online or method.loss.needs_teacher):
            for diagnosis in self.state.collapse.observe(record):
                self.messages.warn(f"step {self.step}: {diagnosis.message} {diagnosis.advice}")

    def _record(self) -> dict[str, float]:
        """The record of the steps since the last one."""
        state, window, tokens_of = self.state, self.state.window, self.state.window.tokens_of
        tokens, num_ranks = sum(tokens_of), state.group.size
        ranks = {
            "ranks": num_ranks,
            "tokens/rank_max": max(tokens_of),
            "tokens/rank_min": min(tokens_of),
        }
        return {
            "step": self.step,
            "epoch": self.examples.epoch,
            **window.meter.reduce(state.group),
            **window.last,
            "tokens": tokens,
            "tokens_seen": state.counters.tokens_seen,
            "examples_seen": state.counters.examples_seen,
            "tokens/s": tokens / window.seconds if window.seconds > 0 else 0.0,
            "seconds": window.seconds,
            **self._system_metrics(),
            **(ranks if num_ranks > 1 else {}),
            **self.examples.metrics,
        }

    def _system_metrics(self) -> dict[str, float]:
        seconds = {f"seconds/{phase}": spent for phase, spent in self.state.window.spent.items()}
        return seconds | peak_memory(self.policy.device)

    # Measuring and sampling

    def evaluate(self, rows: Any = None, *, name: str = "eval") -> Evaluation:
        """Compute the metrics of the current policy on ``rows`` (in memory), or, without ``rows``,
        on the recipe's rows of this ``name``: ``eval``, ``test`` or ``train``.

        Raises UserError when there are no such rows.
        """
        if rows is not None:
            corpus = rows_to_measure(self.prepared, rows)
            name = "rows in memory"
        elif name in self.prepared.corpora:
            corpus = self.prepared.corpora[name]
        else:
            raise UserError(
                f"there are no rows under data.{name}",
                code="rows-missing",
                where=f"data.{name}",
                fix="set it to a file of rows",
            )
        limit = self.recipe.eval.max_examples if name == "eval" else None
        with self.state.evaluation_weights():
            evaluation = self.examples.evaluate(corpus, limit, f"evaluating ({name})")
        return _mark_training_rows(evaluation, corpus.trained_origins)

    def evaluate_training_rows(self) -> Evaluation | None:
        """Measure some of the training rows (``eval.train_examples``), drawn from all of them.

        None where there are none to measure. Raises UserError where these few cannot be measured
        together, such as judgements of KTO that share one prompt.
        """
        rows = self.prepared.measured_training_rows
        if not rows:
            return None
        assert isinstance(self.examples, StoredExamples)
        corpus = self.prepared.corpora["train"]
        with self.state.evaluation_weights():
            return self.examples.measure(rows, corpus, "measuring training rows")

    def sample(
        self,
        prompts: Sequence[Content | Prompt],
        sampling: Sampling,
        n: int = 1,
        *,
        quiet: bool = True,
    ) -> list[list[Completion]]:
        """Sample n completions of each prompt from the current policy.

        Prompts are tokenized, completions end, and tools are called, as in training. quiet: show no
        progress.

        Raises UserError for a reward model, or when the policy's logits are not finite.
        """
        check_can_generate(self.prepared.method)
        encoder = self.prepared.encoder
        sampler = PolicySampler(self.policy, encoder, version=lambda: self.step)
        rows = [
            p if isinstance(p, Prompt) else Prompt(prompt=p, origin=Origin("prompt", k))
            for k, p in enumerate(prompts, 1)
        ]
        token_ids = [encoder.encode_prompt(row.prompt) for row in rows]
        use = self.prepared.tool_use
        episodes = episodes_of(use, rows, n, sampling, range(len(rows))) if use else ()
        total, num_ended = n * len(token_ids), 0
        console = self.messages.console
        with Progress(console, "answering prompts", total, quiet=quiet, brief=True) as bar:

            def advance(count: int) -> None:
                nonlocal num_ended
                num_ended += count
                bar.update(num_ended)

            try:
                with self.state.evaluation_weights():
                    return sampler.generate(
                        token_ids, n, sampling, progress=advance, episodes=episodes
                    )
            except FloatingPointError as error:
                raise sampling_failed(error, self.step) from error

    def ask(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Answer a prompt with the current policy.

        prompt: text or chat messages. Text becomes a user message if it does in training
        (``data.as_chat``). temperature: 0 takes the most likely token each time.

        Raises UserError for a reward model.
        """
        content: Content = (
            prompt if isinstance(prompt, str) else Chat(tuple(dict(message) for message in prompt))
        )
        sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        return self.sample([content], sampling)[0][0].text

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the run. All processes must call this method."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned, and continue from there.

        Raises UserError when the state is from another model or another version of Valence.
        """
        self._prefetcher.discard()
        self.state.load_state_dict(state)

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint to the run's folder, if there is one. All processes must call this
        method.

        Raises UserError when the checkpoint cannot be written. With ``wait=False``, raises it only
        when too many saves have failed.
        """
        if self.saver is None:
            return
        before = self.saver.saved
        with self.state.window.timing("saving"):
            self.saver.prepare()
            self.saver.save(self.state_dict(), wait=wait)
            self.saver.check_failures(is_last=wait)
        if self.saver.saved != before:
            self.callbacks.on_save(self, self.saver.checkpoints.path(self.step))


def _mark_training_rows(evaluation: Evaluation, origins: Collection[str]) -> Evaluation:
    """The evaluation with ``in_train`` set on the rows at these places, which say nothing about new
    rows.
    """
    if not origins:
        return evaluation
    rows = [
        {**row, "in_train": True} if row.get("origin") in origins else row
        for row in evaluation.rows
    ]
    return replace(evaluation, rows=rows)


def _one(value: torch.Tensor) -> Mean:
    return Mean(value, torch.ones(()))


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Prepares one value ahead in a thread.

    Why a thread, and why no process: dev/decisions/0041-the-next-step-is-planned-in-a-thread.md.
    Only one ``prepare`` runs at any time: ``take`` waits for the thread before it prepares a value
    itself. The thread starts when it is first needed, and ends with ``close``.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._next: tuple[Hashable, Future[T]] | None = None

    def start(self, key: Hashable, prepare: Callable[[], T]) -> None:
        """Prepare the value of a key in the thread. ``take`` returns it, or raises its error."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "valence-prefetch")
        self._next = key, self._executor.submit(prepare)

    def take(self, key: Hashable, prepare: Callable[[], T]) -> T:
        """Return the value of a key. If another one was started, discard that and prepare now."""
        if self._next is not None and self._next[0] != key:
            self.discard()
        if self._next is None:
            return prepare()
        (_, future), self._next = self._next, None
        return future.result()

    def discard(self) -> None:
        """Wait for the thread, and forget its value or error."""
        if self._next is not None:
            (_, future), self._next = self._next, None
            if not future.cancel():
                future.exception()

    def close(self) -> None:
        """End the thread. A later ``start`` starts another one."""
        executor, self._executor, self._next = self._executor, None, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)


MIN_INTERVAL, MAX_SHARE = 20.0, 1 / 50
"""The page is written at most once in this many seconds, and takes at most this share of the time.
"""


class Pages:
    """Write the report page when it is due. Failures are reported once and stop nothing."""

    def __init__(
        self, folder: Path, warn: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._warn, self._clock = folder, warn, clock
        self._due = clock() + MIN_INTERVAL
        self._has_warned = False

    def update(self) -> None:
        """Write the page if it is due."""
        began = self._clock()
        if began < self._due:
            return
        self.write("running")
        now = self._clock()
        self._due = now + max(MIN_INTERVAL, (now - began) / MAX_SHARE)

    def write(self, status: str) -> None:
        """Write the page. status: the run's status on it."""
        from valence.reports.page import write_page

        try:
            write_page(self._folder, status)
        except Exception as error:  # a defect of the page must not end training
            if not self._has_warned:
                self._warn(f"the report page cannot be written ({error!r})")
            self._has_warned = True
