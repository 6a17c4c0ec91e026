"""Where the examples of each optimizer step come from, and how held-out rows are measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from valence.data.sampler import Sampler
from valence.errors import UserError
from valence.reports.console import Progress
from valence.training.evaluate import Evaluation, evaluate
from valence.training.folder import Messages
from valence.training.out_of_memory import MemoryRetry
from valence.training.prepare import Corpus, Prepared
from valence.training.signals import SharedStop
from valence.training.state import TrainState
from valence.types import MicroBatch, TokenizedExample

StepExamples = tuple[Sequence[TokenizedExample], Iterable[TokenizedExample]]
"""The examples of a step, and those that follow in the epoch, from which KL pairs may be made."""


class NothingToLearnError(UserError):
    """No round of online training could be sampled that has something to train on."""


class ExampleSource(Protocol):
    """The examples of a run: stored rows, or completions that the policy samples."""

    @property
    def latest_completion(self) -> tuple[str, str, float | None] | None:
        """Prompt, completion and reward of a completion that was sampled lately, to be shown."""
        ...

    def prepare_step(self) -> None:
        """Make the examples of the next step available.

        Raises NothingToLearnError when there are none that have something to teach.
        """
        ...

    def next_step(self) -> StepExamples:
        """Return the examples of the next optimizer step."""
        ...

    def upcoming_step(self) -> Callable[[], StepExamples] | None:
        """Return a function for the examples of the step after the next one, which another thread
        may call. None where these depend on the weights after the next step.
        """
        ...

    def finish_step(self) -> None:
        """Called after each optimizer step."""
        ...

    def evaluate(self, corpus: Corpus, limit: int | None, phase: str) -> Evaluation:
        """Measure the policy on the first ``limit`` rows of a corpus."""
        ...

    @property
    def epoch(self) -> float:
        """Passes over the training rows so far."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Further metrics for the log."""
        ...

    def resume(self, changed: Collection[str]) -> None:
        """Adapt the loaded state to settings that have changed, by name."""
        ...

    def close(self) -> None:
        """Release connections and processes."""
        ...


class StoredExamples:
    """Trains on the rows of the recipe, and measures the policy on held-out rows."""

    def __init__(
        self,
        prepared: Prepared,
        state: TrainState,
        stop: SharedStop,
        messages: Messages,
        retry: MemoryRetry,
    ) -> None:
        self._prepared, self._state, self._stop = prepared, state, stop
        self._messages, self._retry = messages, retry
        self._sampler: Sampler | None = prepared.sampler if "train" in prepared.corpora else None

    @property
    def latest_completion(self) -> None:
        return None

    def prepare_step(self) -> None:
        pass

    def next_step(self) -> StepExamples:
        return self._examples_of(self._state.step)

    def upcoming_step(self) -> Callable[[], StepExamples]:
        return partial(self._examples_of, self._state.step + 1)

    def _examples_of(self, step: int) -> StepExamples:
        assert self._sampler is not None
        indices, later = self._sampler.step(step)
        units = self._sampler.units
        return [units[i] for i in indices], (units[i] for i in later)

    def finish_step(self) -> None:
        pass

    @property
    def epoch(self) -> float:
        return self._state.step / self._prepared.steps_per_epoch

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def resume(self, changed: Collection[str]) -> None:
        pass

    def close(self) -> None:
        pass

    def evaluate(self, corpus: Corpus, limit: int | None, phase: str) -> Evaluation:
        return self.measure(corpus.units[:limit], corpus, phase)

    def measure(self, units: Sequence[TokenizedExample], corpus: Corpus, phase: str) -> Evaluation:
        """Measure the policy on these rows of a corpus."""
        return self._retry.run("evaluation", lambda: self._measure(units, corpus, phase))

    def _measure(self, units: Sequence[TokenizedExample], corpus: Corpus, phase: str) -> Evaluation:
        num_processes = self._state.group.size
        num_sequences = sum(len(unit.answers) for unit in units) * (
            2 if self._prepared.method.needs_kl_pairs else 1
        )
        done = tokens = 0
        messages = self._messages
        with Progress(messages.console, phase, len(units)) as bar:

            def advance(batch: MicroBatch | None) -> None:
                nonlocal done, tokens
                self._stop.check()
                if batch is not None:  # the other processes have done about as much
                    done += batch.sequences * num_processes
                    tokens += len(batch.tokens) * num_processes
                share = min(done, num_sequences) / max(1, num_sequences)
                bar.update(int(len(units) * share), tokens=tokens)

            with self._stop.deferred():
                result = evaluate(
                    self._state.objective,
                    units,
                    corpus.examples,
                    self._prepared.tokenizer,
                    advance,
                )
            bar.update(len(units), tokens=tokens)
            return result
