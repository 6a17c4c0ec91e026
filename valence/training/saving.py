"""What of a run is state, how it is put back, and when a save of it has failed too often."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from valence.distributed import shards
from valence.distributed.together import gathered
from valence.errors import UserError
from valence.losses.stats import RewardShift
from valence.models.cache import CachedReference
from valence.models.reference import AdapterDisabledReference, SyncedReference
from valence.reports.metrics import Meter
from valence.reports.sinks import JsonlSink
from valence.runs import store
from valence.runs.folder import RunFolder
from valence.runs.keeper import Checkpoints
from valence.runs.state import RandomState, Registry, State, Through
from valence.training.track import MetricsWindow

if TYPE_CHECKING:
    from valence.training.finish import About
    from valence.training.loop import Run

HEAVY = ("weights", "reference", "optimizer")
"""Parts of the state that only an applied step changes."""


def registry_of(run: Run, log: JsonlSink | None) -> Registry:
    """Everything of a run that has state.

    What is random comes last: nothing may be drawn between its loading and the next step.
    """
    registry = Registry()
    registry.add("weights", Through(lambda: _weights(run), lambda state: _put_weights(run, state)))
    registry.add(
        "reference", Through(lambda: _reference(run), lambda state: _put_reference(run, state))
    )
    registry.add(
        "optimizer", Through(run.optimizer.state_dict, lambda state: _put_optimizer(run, state))
    )
    registry.add("scheduler", run.scheduler)
    registry.add(
        "shifts",
        Through(
            lambda: [astuple(each.shift) for each in run.objectives],
            lambda state: _put_shifts(run, state),
        ),
    )
    registry.add("counters", run.counters)
    if run.rounds is not None:
        registry.add("rounds", run.rounds)
    registry.add("evaluations", Through(lambda: dict(run.evaluations), run.evaluations.update))
    registry.add("best", run.best)
    registry.add("early_stop", run.early)
    registry.add("watch", run.watch)
    registry.add("online_watch", run.online_watch)
    registry.add("budget", run.budget)
    registry.add("log", log or Through(lambda: {"bytes": 0}, lambda _: None))
    registry.add("processes", PerProcess(run))
    return registry


class PerProcess:
    """What each process of a run has of its own: what it measured since the last record, and where
    its random draws stand.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.random = run, RandomState()

    def state_dict(self) -> list[State]:
        """Of this process: those of all are put together when they are saved."""
        return [{"window": self.run.window.state_dict(), "random": self.random.state_dict()}]

    def load_state_dict(self, state: Sequence[State]) -> None:
        """On another number of processes each takes over the measurements of as many as there are
        for it; one that is new draws from the seed and its rank.
        """
        group, window = self.run.group, self.run.window
        window.load_state_dict(state[0]["window"])
        if len(state) != group.size:
            window.meter = Meter()
            for each in state[group.rank :: group.size]:
                other = MetricsWindow()
                other.load_state_dict(each["window"])
                window.add(other)
            window.tokens_of = (
                [sum(window.tokens_of), *[0] * (group.size - 1)] if window.tokens_of else []
            )
        elif group.rank:
            window.load_state_dict(state[group.rank]["window"])
        if group.rank < len(state):
            self.random.load_state_dict(state[group.rank]["random"])
        else:
            torch.manual_seed(self.run.recipe.train.seed + group.rank)


def load_weights(run: Run, state: Mapping[str, Any]) -> None:
    """Of a saved state only the trained weights, what a loss compares them with, the counters and
    the evaluations.

    Raises UserError when it is of another model.
    """
    _put_weights(run, state["weights"])
    if isinstance(run.reference, SyncedReference):
        _put_reference(run, state["reference"])
    _put_shifts(run, state["shifts"])
    run.counters.load_state_dict(state["counters"])
    run.evaluations.update(state["evaluations"])


def _weights(run: Run) -> dict[str, Any]:
    """The trained weights, and a digest of the frozen ones under an adapter."""
    adapted = hasattr(run.policy.model, "peft_config")
    if adapted and run.base is None:
        run.base = AdapterDisabledReference(run.policy).digests().weights
    return {"base": run.base, "values": dict(run.trained)}


def _put_weights(run: Run, state: Mapping[str, Any]) -> None:
    now, saved = _weights(run), state["values"]
    own = now["values"]
    odd = sorted(own.keys() ^ saved.keys()) or [
        name for name, p in own.items() if p.shape != saved[name].shape
    ]
    if odd or state["base"] != now["base"]:
        what = (
            f"first difference: {odd[0]}"
            if odd
            else "the frozen weights under the adapter have changed"
        )
        raise UserError(
            f"the saved weights are those of another model ({what})",
            code="model-changed" if odd else "base-model-changed",
            where="checkpoint",
            fix="use the model of the saved run",
        )
    store.put(saved, own)


def _reference(run: Run) -> dict[str, Any]:
    if isinstance(run.reference, SyncedReference):
        return {"digest": None, "weights": dict(run.reference.weights)}
    if run.reference is not None and run.compared is None:
        # once: it never changes, and hashing it takes as long as a save
        run.compared = run.reference.digests().weights
    return {"digest": run.compared, "weights": {}}


def _put_reference(run: Run, state: Mapping[str, Any]) -> None:
    if isinstance(run.reference, SyncedReference):
        store.put(state["weights"], run.reference.weights)
    elif state["digest"] != _reference(run)["digest"]:
        name = run.recipe.reference.model or run.recipe.model.name
        raise UserError(
            f"the reference ({name}) is another model than the run began with",
            code="reference-changed",
            where="reference.model",
            fix="put back the model that it was, or start anew with --fresh",
        )


def _put_optimizer(run: Run, state: Mapping[str, Any]) -> None:
    run.optimizer.load_state_dict(store.for_optimizer(state, run.optimizer))


def _put_shifts(run: Run, state: Sequence[Sequence[float]]) -> None:
    # Not those of a mix, when the run is only measured: its own method comes first.
    for objective, shift in zip(run.objectives, state, strict=False):
        objective.shift = RewardShift(*shift)  # type: ignore[arg-type]


class Saver:
    """The checkpoints of a run with a folder."""

    def __init__(self, run: Run, folder: RunFolder, log: JsonlSink | None) -> None:
        """log: of the process that writes it."""
        self.run, self.folder, self.log = run, folder, log
        together = run.world if run.divided else None
        self.checkpoints = Checkpoints(
            folder.path / "checkpoints", run.recipe.run.keep, together, shards.write
        )
        self.about: About | None = None
        self.saved: tuple[int, int] | None = None
        """Where the run stood, and how far it was settled, in the newest checkpoint."""

    def ready(self) -> None:
        """What all processes do before one of them saves: what each has written must be on the disk
        by then.
        """
        from valence.training.finish import about_model

        self.look_at_best()
        self.about = about_model(self.run) if self.run.recipe.run.save_hf else None
        if not isinstance(self.run.reference, CachedReference) or self.run.world.size == 1:
            return
        said = None
        try:
            self.run.reference.sync()
        except OSError as error:
            said = (
                f"rank {self.run.world.rank}: {self.run.reference.folder} cannot be written "
                f"({error.strerror})"
            )
        for each in filter(None, gathered(self.run.world, said)):
            self.run.warn(each)

    def save(self, state: Mapping[str, Any], *, wait: bool) -> None:
        """Begins to write a checkpoint, unless there is nothing new to write; with ``wait`` does
        it, though it failed before. All processes call it; where each holds all weights, one alone
        writes.
        """
        if not (self.folder.writes or self.run.divided):
            return
        if wait:
            self.checkpoints.wait()
            self._told()
        wanted, counters = self.run.recipe.run, state["counters"]
        stands = counters["step"], counters["settled"]
        if not counters["step"] or self.saved == stands:
            return
        cached = self.run.reference if isinstance(self.run.reference, CachedReference) else None
        self.checkpoints.save(
            counters["step"],
            state if wanted.save_state else None,
            self.folder.identity,
            first=[
                *([self.log.sync] if self.log else []),
                self.folder.sync,
                *([cached.sync] if cached else []),
            ],
            beside=self._write_model if wanted.save_hf else None,
            spare=self.run.best.step,
            wait=wait,
        )
        self.saved = stands

    def look_at_best(self) -> None:
        """When the save of the best checkpoint has failed, the one before it is the best again:
        else that one would be removed, and none be found by the name. All processes call it.
        """
        best = self.run.best
        if (best.best, best.step) == best.kept or best.step == self.run.step:
            return
        self.checkpoints.wait()
        lost = (
            self.folder.writes
            and best.step is not None
            and not os.path.isdir(self.checkpoints.path(best.step))
        )
        if any(gathered(self.run.world, lost)):
            step = best.step
            best.withdraw()
            again = "" if best.step is None else f"; that of step {best.step} is the best again"
            self.run.warn(f"step {step}, the best by its evaluation, was not saved{again}")
        else:
            best.keep()

    def _write_model(self, folder: Path) -> None:
        from valence.training.finish import write_model

        write_model(self.run, folder / "model", self.run.recipe.run.export, self.about)

    def _told(self) -> None:
        for said in self.checkpoints.told():
            self.run.warn(said)
        if self.checkpoints.failed:
            self.saved = None

    def tell(self, *, last: bool = False) -> None:
        """Tells of saves that failed.

        Raises UserError when they were too many in a row; of the ``last`` one when it was.
        """
        self._told()
        failed = self.checkpoints.failed
        if failed < (1 if last else self.run.recipe.run.max_failed_saves):
            return
        steps = self.checkpoints.steps()
        kept = f"the last good one is step-{steps[-1]}" if steps else "there is no earlier one"
        raise UserError(
            f"the state could not be saved ({failed} in a row failed; {kept})",
            code="checkpoint-not-saved",
            where=str(self.checkpoints.folder),
            fix="free disk space or repair the folder, then run the same command again to resume "
            "from the last good checkpoint",
        )
