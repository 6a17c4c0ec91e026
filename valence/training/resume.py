"""Resume a run: find its newest checkpoint, compare its settings and rows, load its state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from valence.config.describe import shorten_value
from valence.config.load import LoadedRecipe
from valence.data.audit_text import audited
from valence.data.lengths import distributions
from valence.distributed import sharded_checkpoint
from valence.distributed.process_group import run_on_first_rank
from valence.errors import UserError
from valence.reports.formatting import visible
from valence.reports.run_record import AUDIT, CHECKPOINTS, MODEL, RECIPE
from valence.storage import add_checksum, add_checksum_line
from valence.training import state_files
from valence.training.changes import (
    ROWS,
    changes,
    hashes_of,
    machine_differences,
    refuse,
    rows_of,
    settings_of,
    start_from_model,
)
from valence.training.checkpoints import Checkpoints, Saved
from valence.training.folder import RunFolder, now, versions
from valence.training.plan import planned_tokens
from valence.training.prepare import Prepared
from valence.training.state import HEAVY, TrainState
from valence.training.trainer import Trainer

OPTIMIZER_SETTINGS = {
    "train.learning_rate": ("lr", "initial_lr"),
    "train.weight_decay": ("weight_decay",),
    "train.betas": ("betas",),
    "value.learning_rate": ("lr", "initial_lr"),
}
"""Settings and their names in the optimizer's parameter groups."""


CONTINUING_SETTINGS = (
    "run.early_stop",
    "train.max_zero_gradient_steps",
    "train.stop_on_collapse",
    "rollout.",
    "reward",
    "loss.",
)
"""A change of these settings lets a run continue that ended early."""


@dataclass(frozen=True)
class PreviousRun:
    """The run in a folder, to be resumed.

    saved: its newest undamaged checkpoint, if any. state: of that checkpoint. recorded: settings,
    rows and choices in that checkpoint. changed: allowed differences of settings and rows, with a
    description each.
    """

    folder: RunFolder
    prepared: Prepared
    saved: Saved | None
    state: Mapping[str, Any] | None
    recorded: Mapping[str, Any]
    changed: Mapping[str, str]

    @property
    def step(self) -> int:
        return self.state["counters"]["step"] if self.state else 0

    @property
    def has_replaced_rows(self) -> bool:
        """Whether an older version has resumed it with other rows or batches.

        The state then has the steps at which they were replaced.
        """
        counters = self.state["counters"] if self.state else {}
        return bool(counters.get("first")) or any(counters.get("firsts", {}).values())

    @property
    def total(self) -> int:
        return self.prepared.total_steps

    @property
    def finished(self) -> bool:
        facts = self.folder.facts
        is_longer = self.total > facts.get("total_steps", 0) or any(
            name.startswith(CONTINUING_SETTINGS) for name in self.changed
        )
        is_complete = facts.get("steps", 0) >= self.total or (
            bool(facts.get("ended_early")) and not is_longer
        )
        return facts.get("status") == "done" and is_complete

    @property
    def choices(self) -> Mapping[str, Any]:
        return self.recorded.get("choices") or {}

    @property
    def compiled(self) -> bool | None:
        """Whether its layers were compiled; None if that is to be decided again."""
        return None if "train.compile" in self.changed else self.choices.get("compiled")

    @property
    def sharded(self) -> bool | None:
        """Whether the model was split over the processes; None if that was not decided."""
        return self.choices.get("sharded")

    @property
    def budget(self) -> Sequence[Sequence[Any]]:
        """Tokens per micro-batch, as in Budget; empty if they are to be planned again."""
        if "train.micro_batch_tokens" in self.changed:
            return ()
        noted = self.folder.facts.get("micro_batch_tokens") or []
        if self.state is None:
            return noted
        # The checkpoint decides. run.json may only continue it: memory may have run out after the
        # checkpoint was written.
        saved = self.state["budget"]
        return noted if noted[: len(saved)] == saved else saved

    @property
    def micro_batch_tokens(self) -> int | None:
        return self.budget[0][2] if self.budget else None

    @property
    def summary(self) -> str:
        """What is printed before training continues."""
        return visible(self._finished() if self.finished else self._going_on())

    def _finished(self) -> str:
        facts = self.folder.facts
        reason = (
            f"it ended early: {facts['ended_early']}"
            if facts.get("ended_early")
            else f"{facts.get('steps')} steps"
        )
        when = f", {facts['finished']}" if facts.get("finished") else ""
        return (
            f"the run in {self.folder.path} is finished ({reason}{when}): nothing to do\n"
            f"  to train longer, set train.max_steps above {self.total}; to start over, use "
            "`valence train RECIPE --fresh`"
        )

    def _going_on(self) -> str:
        where = (
            f"at step {self.step} of {self.total}"
            if self.state
            else "at step 0 (it has no checkpoint yet)"
        )
        if self.state and self.step >= self.total:
            where += ": only the final evaluation and the model are left"
        lines = [
            f"resuming the run in {self.folder.path} {where}",
            *(f"  with {change}" for change in self.changed.values()),
        ]
        before = self.folder.facts.get("total_steps")
        if before and before != self.total:
            lines.append(
                f"  {self.total} steps instead of {before}: from here on, the learning rate "
                f"follows the schedule for {self.total} steps"
            )
        return "\n".join(lines)


def find_previous_run(
    folder: RunFolder, prepared: Prepared, allow: Sequence[str] = ()
) -> PreviousRun:
    """Find the run in this folder and compare it with the recipe.

    allow: settings or sections that may differ. Raises UserError with a list of all other
    machine_differences, and if there is no state to resume from.
    """
    place, recorded, changed = run_on_first_rank(
        folder.group, partial(_find_checkpoint, folder, prepared, allow)
    )
    saved = Saved(Path(place[0]), place[1], recorded) if place else None
    lazy = HEAVY if folder.group.size > 1 else ()
    state = (
        state_files.load(saved.path, sharded_checkpoint.read, lazy)
        if saved and saved.has_state
        else None
    )
    prepared = _as_recorded(prepared, recorded)
    previous = PreviousRun(folder, prepared, saved, state, recorded, changed)
    if previous.finished:
        if not state:
            folder.say(f"the run has no saved state: its weights are in {folder.path / MODEL}")
    elif saved and not state:
        raise UserError(
            "the checkpoints of this run contain no state to resume from (run.save_state is false)",
            code="checkpoint-without-state",
            where=str(saved.path),
            fix="start over (`valence train RECIPE --fresh`), which moves this run aside; its "
            "models are in checkpoints/step-N/model",
        )
    elif previous.has_replaced_rows:
        raise UserError(
            "an earlier version of Valence has resumed this run with another batch size or other "
            "training rows; this version cannot resume it",
            code="run-differs",
            where=f"run.dir: {folder.path}",
            fix=start_from_model(folder, saved.path if saved else None),
        )
    elif previous.step > previous.total:
        raise UserError(
            f"the run has done {previous.step} steps, but the recipe asks for only "
            f"{previous.total}",
            code="run-beyond-steps",
            where=f"run.dir: {folder.path}",
            fix="raise train.max_steps, or export the model as it is (`valence export RUN FOLDER`)",
        )
    return previous


def _find_checkpoint(
    folder: RunFolder, prepared: Prepared, allow: Sequence[str]
) -> tuple[tuple[str, int] | None, Mapping[str, Any], Mapping[str, str]]:
    """Path and step of the newest checkpoint, what the run recorded, and what has changed."""
    checkpoints = Checkpoints(folder.path / CHECKPOINTS, None)
    checkpoints.tidy()
    saved = checkpoints.newest(folder.say)
    recorded = saved.facts if saved else folder.identity
    prepared = _as_recorded(prepared, recorded)
    changed = changes(folder.path, recorded, folder.facts, prepared)
    refuse(changed, recorded, allow, prepared, folder, saved.path if saved else None)
    return (str(saved.path), saved.step) if saved else None, recorded, changed


def _as_recorded(prepared: Prepared, recorded: Mapping[str, Any]) -> Prepared:
    """Replace automatic settings by those that the run recorded."""
    source = with_recorded(prepared.source, recorded.get("settings") or {})
    return replace(prepared, source=source, recipe=source.recipe)


def with_recorded(source: LoadedRecipe, settings: Mapping[str, Any]) -> LoadedRecipe:
    """Replace the automatic settings of a recipe by those that its run recorded.

    Settings of ``data`` are left alone: the rows are already tokenized with them, and a difference
    is refused when resuming.
    """
    for name, setting in source.settings.items():
        if name.startswith("data."):
            continue
        if setting.is_automatic and settings.get(name, setting.value) != setting.value:
            source = source.with_automatic(name, settings[name], "as the run began")
    return source


def resume(trainer: Trainer, previous: PreviousRun) -> None:
    """Continue where the previous run was saved last, or where it began if it has no checkpoint.

    Raises UserError when the state is of another model, optimizer or schedule.
    """
    state = trainer.state
    if state.policy.packs and previous.choices.get("packed") is False:
        state.policy.lay_out(packed=False)
    if differing := machine_differences(previous.recorded, state.policy, trainer.world):
        trainer.messages.note_once(
            visible(
                f"the last digits may differ from those of an uninterrupted run: "
                f"{', '.join(differing)}"
            )
        )
    if trainer.finished or previous.state is None:
        if previous.state:
            state.load_model(previous.state)
        elif not trainer.finished:
            state.registry.parts["log"].load_state_dict({"bytes": 0})
        return
    fresh_groups = [dict(group) for group in state.optimizer.param_groups]
    fresh_rates = getattr(state.scheduler, "base_lrs", [])
    saved_settings = [sorted(group) for group in previous.state["optimizer"]["param_groups"]]
    try:
        if saved_settings != [sorted(group) for group in state.optimizer.param_groups]:
            raise ValueError("it has other settings")
        state.load_state_dict(previous.state)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the saved state belongs to a different optimizer or schedule ({error})",
            code="optimizer-changed",
            where="checkpoint",
            fix="use the optimizer and schedule of the run's first start, or start over "
            "(`valence train RECIPE --fresh`)",
        ) from error
    counters = state.counters
    is_longer = state.total_steps > counters.total
    counters.total = state.total_steps
    _resume_budget(trainer, previous)
    _apply_changed_settings(state, previous, fresh_groups, fresh_rates)
    _resume_best(trainer, previous, is_longer=is_longer)
    trainer.examples.resume(previous.changed)
    if trainer.prepared.method.online and (previous.changed or is_longer):
        # Otherwise the run would end at once, as it did before.
        counters.zero_gradient_steps = 0
    if previous.changed or is_longer:
        state.collapse.collapsed = ""
    assert trainer.saver is not None
    if trainer.world.rank == 0:
        try:
            # A killed process may have written the checkpoint and not pruned older ones.
            trainer.saver.checkpoints.prune(state.best.step)
        except OSError as error:
            trainer.messages.warn(f"an old checkpoint could not be removed: {error}")
    trainer.saver.saved = (
        previous.state["counters"]["step"],
        previous.state["counters"]["settled"],
    )


def _resume_budget(trainer: Trainer, previous: PreviousRun) -> None:
    """Restore the sizes of micro-batches, unless that setting was changed."""
    state = trainer.state
    tokens = state.budget.at(0, "evaluation")
    if "train.micro_batch_tokens" in previous.changed:
        tokens = planned_tokens(trainer.prepared, state.policy, trainer.world)
    changes = [list(change) for change in previous.budget]
    state.budget.load_state_dict(changes or [[0, "evaluation", tokens]])


def _apply_changed_settings(
    state: TrainState,
    previous: PreviousRun,
    fresh_groups: Sequence[Mapping[str, Any]],
    fresh_rates: Sequence[float],
) -> None:
    """Apply changed settings of the optimizer, and adapt the schedule to the number of steps.

    fresh_groups, fresh_rates: parameter groups and base learning rates as the recipe has them.
    """
    arguments = tuple(state.recipe.train.optimizer_settings)
    names = [
        name
        for setting, names in (OPTIMIZER_SETTINGS | {"train.optimizer_settings": arguments}).items()
        if setting in previous.changed and state.is_default_optimizer
        for name in names
    ]
    for group, settings in zip(state.optimizer.param_groups, fresh_groups, strict=True):
        group.update({name: settings[name] for name in names if name in settings})
    scheduler = state.scheduler
    if not isinstance(scheduler, LambdaLR):
        return
    if "lr" in names:
        scheduler.base_lrs = list(fresh_rates)
    for group, rate, factor in zip(
        state.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = rate * factor(scheduler.last_epoch)


def _resume_best(trainer: Trainer, previous: PreviousRun, *, is_longer: bool) -> None:
    """Forget the best evaluation if later ones do not compare with it.

    A run that stopped early continues if it is longer than when it was saved, or if its criterion
    has changed.
    """
    state = trainer.state
    patience = previous.recorded["settings"].get("run.early_stop.patience")
    has_stopped = patience is not None and state.early_stop.since >= patience
    if has_stopped and (
        is_longer or any(name.startswith("run.early_stop") for name in previous.changed)
    ):
        state.early_stop.since = 0
    if any(
        name == "data.eval" or name.startswith(("loss.", "eval.max_examples"))
        for name in previous.changed
    ):
        trainer.messages.note_once(
            "evaluations are not comparable with earlier ones: the best value so far is reset"
        )
        for tracker in (state.best, state.early_stop, state.anomalies):
            tracker.reset()


def record_start(
    folder: RunFolder, prepared: Prepared, command: str, tokens: int, previous: PreviousRun | None
) -> None:
    """Write settings, rows and audit to the folder before the first step, or before the next one.

    tokens: of a micro-batch.
    """
    folder.write(RECIPE, add_checksum_line(prepared.source.to_yaml()))
    audits = {
        name: audited(corpus.audit) | {"distributions": distributions(corpus.units)}
        for name, corpus in prepared.corpora.items()
    }
    folder.write(AUDIT, add_checksum(audits))
    changed = [
        {"setting": name, "value": shorten_value(setting.value), "origin": setting.origin}
        for name, setting in prepared.source.settings.items()
        if not setting.is_default
    ]
    facts: dict[str, Any] = {"command": command, "started": now()}
    if previous:
        resumed = {"at": now(), "step": previous.step, "with": list(previous.changed.values())}
        facts = {"resumes": [*folder.facts.get("resumes", []), resumed], "ended_early": None}
    folder.record(
        **facts,
        status="running",
        changed=changed,
        method=prepared.recipe.method,
        **({"stand_in": prepared.method.stand_in} if prepared.method.is_custom else {}),
        cwd=os.getcwd(),
        total_steps=prepared.total_steps,
        versions=versions(),
        settings=settings_of(prepared),
        rows=rows_of(prepared),
        stop_ids=list(prepared.encoder.end_ids),
        micro_batch_tokens=previous.budget
        if previous and previous.budget
        else [[0, "evaluation", tokens]],
    )
    folder.write(ROWS, hashes_of(prepared))
