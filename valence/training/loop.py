"""The one loop: steps, evaluations, the log, and what a run leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from rich.console import Console

from valence.checkpoint import store
from valence.dist.single import Single
from valence.engine.logprobs import Engine
from valence.engine.reference import AdapterOff, Following, Reference
from valence.errors import UserError
from valence.losses.stats import RewardShift
from valence.report.console import Progress
from valence.report.metrics import Meter
from valence.report.sinks import FanOut, JsonlSink, Sink
from valence.rollout import HFGenerator, Sampling
from valence.training.evaluate import Evaluation, evaluate
from valence.training.folder import RunFolder, now, versions
from valence.training.methods import Method
from valence.training.optim import adamw, schedule, warmup_steps
from valence.training.plan import make_plan
from valence.training.setup import Corpus, Part, Prepared, rows_to_measure
from valence.training.signals import Stop
from valence.training.step import Objective, Outcome, Share, optimizer_step
from valence.types import Batch, Completion, Content, Mean

SHOWN = ("loss", "rewards/margins", "rewards/accuracies", "rewards/auc", "rewards/spearman", "logps/token", "kl")
"""Numbers of an evaluation that are printed as soon as they are known."""
Callback = Callable[["Run", Mapping[str, Any]], None]
OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = Any  # a learning-rate scheduler, or a function of the optimizer that makes one


class Interrupted(Exception):
    """The run was asked to stop, and its last step is finished."""


class Run:
    """One run: a policy, its reference, the rows, and where the run stands.

    ``fit`` trains to the end; ``evaluate`` measures any rows; ``state_dict`` and ``load_state_dict`` carry a run over
    to another process, which then goes on as the first would have. Without a ``folder`` nothing is written.
    """

    def __init__(
        self,
        prepared: Prepared,
        policy: Engine,
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
    ) -> None:
        """micro_batch_tokens: tokens that run at once, where the recipe leaves it open; planned if not given."""
        self.prepared, self.recipe, self.folder = prepared, prepared.recipe, folder
        self.policy, self.reference = policy, reference
        self.console, self.quiet, self.callbacks = console or Console(), quiet, tuple(callbacks)
        train = self.recipe.train
        budget = micro_batch_tokens or make_plan(prepared, policy.causal).micro_batch_tokens
        self.objective = self._objective(prepared.method, self.recipe.loss, budget)
        mixed = prepared.mixed if "train" in prepared.corpora else ()
        self.mixed = [(part, self._objective(part.method, part.settings, budget)) for part in mixed]
        self.sampler = prepared.sampler if "train" in prepared.corpora else None
        self.total_steps = prepared.total_steps if self.sampler else 0
        self.optimizer = _made(optimizer, [p for p in policy.parameters() if p.requires_grad]) or adamw(
            policy, learning_rate=train.learning_rate, weight_decay=train.weight_decay, betas=train.betas, kind=train.optimizer
        )
        self.scheduler = _made(scheduler, self.optimizer) or schedule(
            self.optimizer, kind=train.schedule, warmup=train.warmup, total=max(1, self.total_steps)
        )
        self.log = FanOut([JsonlSink(folder.path / "metrics.jsonl")] if folder else [], list(sinks))
        self.step = 0
        self.tokens_seen = 0
        self.examples_seen = 0
        self.skipped_in_a_row = 0
        # False from the moment the weights begin to change until the counters say so: such a state must not be saved.
        self.whole = True
        self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "whole", False))
        self.evaluations: dict[int, dict[str, float]] = {}
        self.said: set[str] = set()
        self.stop = stop or Stop(self.console)
        self.base: str | None = None
        self.facts: dict[str, Any] = folder.facts if folder else {}
        self.audit: dict[str, Any] = prepared.corpora["train"].audit.to_dict() if self.sampler else {}

    def _objective(self, method: Method, settings: Mapping[str, Any], budget: int) -> Objective:
        reference = self.reference if method.needs_reference else None
        return Objective(method, dict(settings), self.policy, reference, Single(), budget, self.recipe.data.max_length)

    @property
    def objectives(self) -> list[Objective]:
        """All that a step trains with."""
        return [self.objective, *(objective for _, objective in self.mixed)]

    # ------------------------------------------------------------------ training

    def fit(self) -> dict[str, float]:
        """Trains to the last step, evaluating on the way. Returns the last evaluation (or the last record, without data.eval).

        Raises Interrupted after SIGINT or SIGTERM, with the step finished; UserError when too many
        steps in a row were not finite.
        """
        if self.sampler is None:
            raise UserError("there is nothing to train on", where="data.train", fix="name a file of rows")
        if self.recipe.model.lora is not None and self.recipe.model.lora.dropout > 0:
            self.say_once("model.lora.dropout is above 0: the loss of a step now depends on how it is cut into micro-batches")
        if self.prepared.ends_early:
            self.say_once(self.prepared.ends_early)
        last: dict[str, float] = {}
        if warmup_steps(self.recipe.train.warmup, self.total_steps) >= self.total_steps > 1:
            self.say_once("train.warmup lasts as long as the run: the learning rate never falls, and may never reach its peak")
        with self.stop.waiting(), Progress(self.console, "training", self.total_steps, start=self.step, quiet=self.quiet) as bar:
            if self.step == 0 and self.recipe.eval.at_start and "eval" in self.prepared.corpora:
                with bar.pause():
                    self._record({"step": 0} | self._evaluate_and_keep())
            meter, began, tokens, seen = Meter(), time.monotonic(), 0, 0
            while self.step < self.total_steps and not self.stop.requested:
                outcome, learning_rate = self._one_step(meter)
                tokens += outcome.tokens
                seen += outcome.tokens
                evaluating = self._evaluation_due()
                ending = self.step == self.total_steps or self.stop.requested
                if self.step % self.recipe.run.log_every == 0 or evaluating or ending:
                    seconds = time.monotonic() - began
                    last = self._window(meter, outcome, learning_rate, tokens, seconds)
                bar.update(self.step, tokens=seen, metrics=last)
                if last.get("step") == self.step:
                    if evaluating:
                        with bar.pause():
                            last = last | self._evaluate_and_keep()
                    self._record(last)
                    meter, began, tokens = Meter(), time.monotonic(), 0
        if self.stop.requested:
            raise Interrupted(f"stopped after step {self.step} of {self.total_steps}")
        return self.evaluations.get(self.step, last)

    def _one_step(self, meter: Meter) -> tuple[Outcome, float]:
        assert self.sampler is not None
        ours, following = self.sampler.step(self.step)
        units = self.sampler.units
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        shares = [self._share(part, objective) for part, objective in self.mixed]
        chosen, later = [units[i] for i in ours], (units[i] for i in following)
        outcome, norm, applied = optimizer_step(
            self.objective, self.optimizer, chosen, later, self.recipe.train.clip_norm, shares
        )
        self.scheduler.step()
        self.step += 1
        every = self.recipe.reference.sync_every
        if applied and isinstance(self.reference, Following) and every and self.step % every == 0:
            self.reference.follow(self.trained, self.recipe.reference.sync_mix)
        self.tokens_seen += outcome.tokens
        self.examples_seen += len(ours) + sum(len(share.units) for share in shares)
        self.whole = True
        self._guard(outcome, norm, applied)
        if applied:
            meter.pool(outcome.metrics)
            meter.add({"loss": _one(outcome.loss), "grad_norm": _one(torch.tensor(norm))})
        meter.add({
            "waste": Mean(torch.tensor(outcome.tokens - outcome.distinct_tokens), torch.tensor(outcome.tokens)),
            "skipped": _one(torch.tensor(float(not applied))),
        })  # fmt: skip
        most = self.objective.budget
        if outcome.largest > most:
            self.say_once(f"some rows have more than train.micro_batch_tokens ({most}) tokens: each of them runs alone")
        return outcome, learning_rate

    def _share(self, part: Part, objective: Objective) -> Share:
        """What a method of `mix` trains on in this step."""
        ours, following = part.sampler.step(self.step)
        units = part.sampler.units
        return Share(part.name, objective, part.weight, [units[i] for i in ours], (units[i] for i in following))

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The weights that train, by name."""
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    def _guard(self, outcome: Outcome, norm: float, applied: bool) -> None:
        """A step that was not finite is named; too many in a row end the run."""
        if applied:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        names = outcome.not_finite()
        where = self._origins(names) if names else "no single row (the gradient overflowed)"
        message = f"step {self.step} was skipped: loss {float(outcome.loss):.4g}, gradient norm {norm:.4g}; rows: {where}"
        self.console.print(message, style="yellow", markup=False)
        if self.folder:
            self.folder.note("warnings", message)
        if self.skipped_in_a_row >= self.recipe.train.max_skipped:
            raise UserError(
                f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite",
                where=f"step {self.step}",
                fix="lower train.learning_rate, use model.dtype: float32, or look at the rows named above",
            )

    def _origins(self, names: Sequence[str]) -> str:
        trained_on = (corpus for name, corpus in self.prepared.corpora.items() if name.endswith("train"))
        found = [str(u.origin) for corpus in trained_on for u in corpus.units if u.id in set(names)]
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        return ", ".join(found[:8]) + more

    def _window(self, meter: Meter, outcome: Outcome, learning_rate: float, tokens: int, seconds: float) -> dict[str, float]:
        """The record of the steps since the last one."""
        assert self.sampler is not None
        return {
            "step": self.step,
            "epoch": self.step / self.sampler.steps_per_epoch,
            **meter.reduce(self.objective.group),
            "lr": learning_rate,
            "micro_batches": outcome.micro_batches,
            "tokens": tokens,
            "tokens_seen": self.tokens_seen,
            "examples_seen": self.examples_seen,
            "tokens/s": tokens / seconds if seconds > 0 else 0.0,
            "seconds": seconds,
        }

    def _record(self, record: Mapping[str, Any]) -> None:
        self.log.log(record)
        for callback in self.callbacks:
            callback(self, record)

    def say_once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            if not self.quiet:
                self.console.print(message, style="yellow", markup=False)
            if self.folder:
                self.folder.note("notes", message)

    # ------------------------------------------------------------------ measuring

    def evaluate(self, rows: Any = None, *, name: str = "eval") -> Evaluation:
        """Measures the policy as it is: on rows in memory, or on the recipe's ``eval``, ``test`` or ``train`` rows."""
        if rows is not None:
            corpus = rows_to_measure(self.prepared, rows)
            name = "the given rows"
        elif name in self.prepared.corpora:
            corpus = self.prepared.corpora[name]
        else:
            raise UserError(f"there are no rows under data.{name}", where=f"data.{name}", fix="name a file of rows")
        return self._measured(corpus, f"evaluating ({name})", self.recipe.eval.max_examples if name == "eval" else None)

    def sample(self, prompts: Sequence[Content], sampling: Sampling, n: int = 1) -> list[list[Completion]]:
        """n answers of the policy, as it is, to each prompt: the tokens that training would see, its own way of stopping.

        Raises UserError of a reward model.
        """
        if self.prepared.method.of_scores:
            raise UserError("a reward model scores answers and gives none", where="sample", fix="use `valence score`")
        encoder = self.prepared.encoder
        generator = HFGenerator(self.policy.model, encoder.tokenizer, end_ids=encoder.end_ids)  # type: ignore[arg-type]
        with self.policy.stock():
            return generator.generate([encoder.encode_prompt(prompt) for prompt in prompts], n, sampling)

    def _measured(self, corpus: Corpus, phase: str, most: int | None) -> Evaluation:
        units = corpus.units[:most]
        per_unit = 2 if self.prepared.method.mismatches else 1
        total = per_unit * sum(len(unit.answers) for unit in units)
        done = tokens = 0
        with Progress(self.console, phase, total, quiet=self.quiet) as bar:

            def advance(batch: Batch) -> None:
                nonlocal done, tokens
                if self.stop.requested:
                    raise KeyboardInterrupt
                done += batch.sequences
                tokens += len(batch.tokens)
                bar.update(done, tokens=tokens)

            return evaluate(self.objective, units, corpus.examples, self.prepared.tokenizer, advance)

    def _evaluation_due(self) -> bool:
        assert self.sampler is not None
        if "eval" not in self.prepared.corpora:
            return False
        every = self.recipe.eval.every
        steps = round(every) if every >= 1 else max(1, round(every * self.sampler.steps_per_epoch))
        return self.step % steps == 0 or self.step == self.total_steps

    def _evaluate_and_keep(self) -> dict[str, float]:
        try:
            found = self.evaluate()
        except KeyboardInterrupt:
            if not self.stop.requested:
                raise
            return {}  # the loop ends at the next step anyway, and logs what it has
        if self.folder:
            self.folder.evaluation(self.step, found.metrics, found.rows)
        self.evaluations[self.step] = found.metrics
        if not self.quiet:
            shown = [name for name in SHOWN if name in found.metrics]
            numbers = "  ".join(f"{name} {found.metrics[name]:.4g}" for name in shown)
            self.console.print(f"step {self.step}, held out: {numbers}", markup=False, highlight=False, soft_wrap=True)
        return {f"eval/{name}": value for name, value in found.metrics.items()}

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on: trained weights, optimizer, schedule, position, counters, random state,
        and how many tokens run at once, on which the last bits of a result depend."""
        return {
            "weights": dict(self.trained),
            "reference": dict(self.reference.weights) if isinstance(self.reference, Following) else {},
            "base": self._base(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": store.random_state(),
            "micro_batch_tokens": self.objective.budget,
            "reward_shifts": [astuple(objective.shift) for objective in self.objectives],
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "examples_seen": self.examples_seen,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state_dict`` was called. Raises UserError when it is of another model."""
        self.load_weights(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        store.set_random_state(state["random"])
        for objective in self.objectives:
            objective.budget = state["micro_batch_tokens"]
        for name in ("step", "tokens_seen", "examples_seen", "skipped_in_a_row"):
            setattr(self, name, state[name])

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """The trained weights of a saved state and what a loss compares them with, but nothing else of it. Raises UserError when
        it is of another model."""
        own = self.trained
        saved = state["weights"]
        odd = sorted(own.keys() ^ saved.keys()) or [name for name, p in own.items() if p.shape != saved[name].shape]
        if odd or state["base"] != self._base():
            what = f"first difference: {odd[0]}" if odd else "the frozen weights under the adapter have changed"
            raise UserError(
                f"the saved weights are those of another model ({what})", where="checkpoint", fix="use the model of the saved run"
            )
        with torch.no_grad():
            for name, value in state["weights"].items():
                own[name].copy_(value)
        if isinstance(self.reference, Following):
            self.reference.follow(state["reference"])
        # Not those of a mix, when the run is only measured: its own method comes first.
        for objective, shift in zip(self.objectives, state["reward_shifts"], strict=False):
            objective.shift = RewardShift(*shift)

    def _base(self) -> str | None:
        """A digest of the frozen weights that an adapter was trained on."""
        if self.base is None and hasattr(self.policy.model, "peft_config"):
            self.base = AdapterOff(self.policy).digest()
        return self.base

    def save(self) -> None:
        """Writes the state under checkpoints/step-N of the run's folder, if it has one."""
        if self.folder is None:
            return
        target = self.folder.path / "checkpoints" / f"step-{self.step}"
        target.parent.mkdir(exist_ok=True)
        store.save(self.state_dict(), target)


def begin(folder: RunFolder, prepared: Prepared, command: str) -> None:
    """Writes what is known before the first step."""
    folder.write("config.yaml", prepared.source.to_yaml())
    folder.write("audit.json", {name: corpus.audit.to_dict() for name, corpus in prepared.corpora.items()})
    changed = [
        {"setting": name, "value": setting.value, "origin": setting.origin}
        for name, setting in prepared.source.settings.items()
        if not setting.is_default
    ]
    folder.state(command=command, **versions(), started=now(), status="running", changed=changed)


def _one(value: torch.Tensor) -> Mean:
    return Mean(value, torch.ones(()))


def _made(given: Any, argument: Any) -> Any:
    """An object given, or what a function given makes of the argument."""
    if given is None or hasattr(given, "state_dict"):
        return given
    return given(argument)
