"""When and how the checkpoints of a run are written, and when failed saves end it."""

from __future__ import annotations

import os
from pathlib import Path

from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import gather_objects
from valence.errors import UserError
from valence.models.cache import CachedReference
from valence.reports.sinks import JsonlSink
from valence.runs.checkpoints import Checkpoints
from valence.runs.folder import RunFolder
from valence.runs.messages import Messages
from valence.runs.state import State
from valence.trainer.model_files import ModelWriter, SavedWith
from valence.trainer.state import TrainState


class Saver:
    """The checkpoints of a run with a folder.

    log: of the process that writes it. saved: step and settled step of the newest checkpoint.
    """

    def __init__(
        self,
        state: TrainState,
        folder: RunFolder,
        log: JsonlSink | None,
        model_writer: ModelWriter,
        messages: Messages,
    ) -> None:
        self._state, self._folder, self._log = state, folder, log
        self._model_writer, self._messages = model_writer, messages
        self._world, self._settings = model_writer.world, state.recipe.run
        self._is_split = state.has_split_weights
        self.checkpoints = Checkpoints(
            folder.path / "checkpoints",
            self._settings.keep,
            self._world if self._is_split else None,
            sharded_checkpoint.write,
            in_background=self._settings.async_save,
        )
        self.saved: tuple[int, int] | None = None
        self._saved_with: SavedWith | None = None

    @property
    def _cached(self) -> CachedReference | None:
        reference = self._state.reference
        return reference if isinstance(reference, CachedReference) else None

    def prepare(self) -> None:
        """Bring everything that a checkpoint depends on to the disk. All processes call it."""
        self.check_best()
        self._saved_with = self._model_writer.saved_with() if self._settings.save_hf else None
        if self._cached is None or self._world.size == 1:
            return
        failure = None
        try:
            self._cached.sync()
        except OSError as error:
            failure = (
                f"rank {self._world.rank}: {self._cached.folder} cannot be written "
                f"({error.strerror})"
            )
        for message in filter(None, gather_objects(self._world, failure)):
            self._messages.warn(message)

    def save(self, state: State, *, wait: bool) -> None:
        """Start to write a checkpoint, unless the newest one holds the same.

        wait: return when it is written, and try again if it failed before. All processes call it;
        where each holds all weights, one alone writes. Raises UserError in all processes that save
        together when too many of their saves failed before.
        """
        if not (self._folder.writes or self._is_split):
            return
        if wait or self._is_split:
            self.checkpoints.wait()
            self._report_failures()
        if self._is_split and not wait:
            self.check_failures()
        counters = state["counters"]
        position = counters["step"], counters["settled"]
        if not counters["step"] or self.saved == position:
            return
        self.checkpoints.save(
            counters["step"],
            state if self._settings.save_state else None,
            self._folder.identity,
            first=[
                *([self._log.sync] if self._log else []),
                self._folder.sync,
                *([self._cached.sync] if self._cached else []),
            ],
            add_files=self._write_model if self._settings.save_hf else None,
            spare=self._state.best.step,
            wait=wait,
        )
        self.saved = position

    def _write_model(self, folder: Path) -> None:
        self._model_writer.write(folder / "model", self._settings.export, self._saved_with)

    def check_best(self) -> None:
        """Go back to the previous best checkpoint if the save of the best one has failed.

        Otherwise the previous one would be removed, and there would be none. All processes call it.
        """
        best = self._state.best
        if (best.best, best.step) == best.saved or best.step == self._state.step:
            return
        self.checkpoints.wait()
        is_missing = (
            self._folder.writes
            and best.step is not None
            and not os.path.isdir(self.checkpoints.path(best.step))
        )
        if any(gather_objects(self._world, is_missing)):
            step = best.step
            best.withdraw()
            again = "" if best.step is None else f"; step {best.step} is the best again"
            self._messages.warn(f"step {step}, the best by its evaluation, was not saved{again}")
        else:
            best.confirm()

    def _report_failures(self) -> None:
        for message in self.checkpoints.take_messages():
            self._messages.warn(message)
        if self.checkpoints.failed:
            self.saved = None

    def check_failures(self, *, is_last: bool = False) -> None:
        """Report saves that failed.

        Raises UserError when too many in a row failed; is_last: when the last one failed. Does
        nothing while processes that save together do not all have the result.
        """
        if self.checkpoints.is_pending:
            return
        self._report_failures()
        num_failed = self.checkpoints.failed
        if num_failed < (1 if is_last else self._settings.max_failed_saves):
            return
        steps = self.checkpoints.steps()
        last_good = f"the last good one is step-{steps[-1]}" if steps else "there is no earlier one"
        raise UserError(
            f"the state could not be saved ({num_failed} in a row failed; {last_good})",
            code="checkpoint-not-saved",
            where=str(self.checkpoints.folder),
            fix="free disk space or repair the folder, then run the same command again to resume "
            "from the last good checkpoint",
        )
