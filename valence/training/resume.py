"""A run that is taken up: what it was, and its newest state put back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from valence.checksums import add_checksum, add_checksum_line
from valence.data.audit_text import audited
from valence.data.lengths import distributions
from valence.distributed import shards
from valence.distributed.together import by_first
from valence.errors import UserError
from valence.reports.console import visible
from valence.runs import store
from valence.runs.folder import RunFolder, now, versions
from valence.runs.keeper import Checkpoints, Saved
from valence.training.choices import with_recorded
from valence.training.compare import (
    OF_THE_ORDER,
    ROWS,
    changes,
    differences,
    hashes_of,
    refuse,
    rows_of,
    settings_of,
)
from valence.training.loop import Run
from valence.training.rendering import in_short
from valence.training.saving import HEAVY, load_weights
from valence.training.setup import Prepared

HYPER = {
    "train.learning_rate": ("lr", "initial_lr"),
    "train.weight_decay": ("weight_decay",),
    "train.betas": ("betas",),
    "value.learning_rate": ("lr", "initial_lr"),
}
"""What the optimizer calls them."""


MAY_GO_ON = ("run.early_stop", "train.max_zero_gradient_steps", "rollout.", "reward", "loss.")
"""Settings after whose change a run that ended early may go on."""


@dataclass(frozen=True)
class PreviousRun:
    """What a run that is taken up was.

    ``saved``: its newest whole checkpoint, if it came that far; ``changed``: settings and rows that
    differ and may, and how.
    """

    folder: RunFolder
    prepared: Prepared
    saved: Saved | None
    state: Mapping[str, Any] | None
    was: Mapping[str, Any]
    changed: Mapping[str, str]

    @property
    def step(self) -> int:
        return self.state["counters"]["step"] if self.state else 0

    @cached_property
    def first(self) -> int:
        """The step at which the present rows begin.

        Where steps are made up otherwise, it is put so that as much of the data is behind the run
        as it was.
        """
        if self.state is None:
            return 0
        first = self.state["counters"]["first"]
        if "data.train" in self.changed:
            return self.step
        if not any(name in self.changed for name in OF_THE_ORDER):
            return first
        was, now = self.was["settings"], self.prepared.recipe
        rows = self.was["rows"]["data.train"]["rows"]
        if self.prepared.method.online:  # rounds do not end with an epoch
            before = rows / was["train.batch_size"] * was["rollout.epochs"] * was["rollout.steps"]
            after = rows / now.train.batch_size * now.rollout.steps_per_round
        else:
            full, rest = divmod(rows, was["train.batch_size"])
            before, after = (
                full + (rest > 0 and not was["train.drop_last"]),
                self.prepared.steps_per_epoch,
            )
        return self._behind(first, before, after)

    @cached_property
    def firsts(self) -> dict[str, int]:
        """Likewise of the rows of each part of `mix`, by their name."""
        if self.state is None:
            return {}
        saved, was = self.state["counters"]["firsts"], self.was["settings"]
        found: dict[str, int] = {}
        for i, part in enumerate(self.prepared.mixed):
            size = was.get(f"mix.{i}.batch_size") or was["train.batch_size"]
            if part.rows in self.changed:
                found[part.rows] = self.step
            elif size == part.sampler.batch_size:
                found[part.rows] = saved.get(part.rows, 0)
            else:
                before, after = -(-len(part.sampler.units) // size), part.sampler.steps_per_epoch
                found[part.rows] = self._behind(saved.get(part.rows, 0), before, after)
        return found

    def _behind(self, first: int, before: float, after: float) -> int:
        """The step at which rows begin that have been gone through as far as they were, with so
        many steps an epoch before and after.
        """
        return self.step - round((self.step - first) / before * after)

    @property
    def total(self) -> int:
        return self.prepared.steps_from(self.first)

    @property
    def finished(self) -> bool:
        facts = self.folder.facts
        longer = self.total > facts.get("total_steps", 0) or any(
            name == "data.train" or name.startswith(MAY_GO_ON) for name in self.changed
        )
        enough = facts.get("steps", 0) >= self.total or (
            bool(facts.get("ended_early")) and not longer
        )
        return facts.get("status") == "done" and enough

    @property
    def choices(self) -> Mapping[str, Any]:
        return self.was.get("choices") or {}

    @property
    def compiled(self) -> bool | None:
        """Whether its layers were compiled; None where that is to be chosen anew."""
        return None if "train.compile" in self.changed else self.choices.get("compiled")

    @property
    def sharded(self) -> bool | None:
        """Whether the model was split over the processes; None where that was not chosen."""
        return self.choices.get("sharded")

    @property
    def budget(self) -> Sequence[Sequence[Any]]:
        """The tokens that ran at once, as Budget has them; empty where that is to be chosen
        anew.
        """
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
    def told(self) -> str:
        """What is said before it goes on."""
        return visible(self._finished() if self.finished else self._going_on())

    def _finished(self) -> str:
        facts = self.folder.facts
        how = (
            f"it ended early: {facts['ended_early']}"
            if facts.get("ended_early")
            else f"{facts.get('steps')} steps"
        )
        when = f", {facts['finished']}" if facts.get("finished") else ""
        return (
            f"the run in {self.folder.path} is finished ({how}{when}): nothing to do\n"
            "  to train longer, raise train.epochs or train.max_steps; to start over, use "
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
            *(f"  with {said}" for said in self.changed.values()),
        ]
        before = self.folder.facts.get("total_steps")
        if before and before != self.total:
            lines.append(
                f"  {self.total} steps instead of {before}: the learning-rate schedule is that "
                f"of {self.total} steps from here on"
            )
        if self.state and "data.train" in self.changed:
            lines.append(f"  from step {self.step} on, all rows of the new data are trained on")
        return "\n".join(lines)


def look(folder: RunFolder, prepared: Prepared, allow: Sequence[str] = ()) -> PreviousRun:
    """The run in this folder.

    Raises UserError, with a list of differences, when it is not the one that the recipe describes,
    but for what is allowed by name (a setting, or a section with all in it).
    """
    place, was, changed = by_first(folder.group, partial(_look, folder, prepared, allow))
    saved = Saved(Path(place[0]), place[1], was) if place else None
    lazy = HEAVY if folder.group.size > 1 else ()
    state = store.load(saved.path, shards.read, lazy) if saved and saved.has_state else None
    prepared = _as_recorded(prepared, was)
    found = PreviousRun(folder, prepared, saved, state, was, changed)
    if found.finished:
        if not state:
            folder.say(f"no state of it is kept: its weights are those in {folder.path / 'model'}")
    elif saved and not state:
        raise UserError(
            "the checkpoints of this run hold no state to go on from (run.save_state is false)",
            code="checkpoint-without-state",
            where=str(saved.path),
            fix="start anew (`valence train RECIPE --fresh`), which moves it aside; its models "
            "are in checkpoints/step-N/model",
        )
    elif found.step > found.total:
        raise UserError(
            f"the run has done {found.step} steps, more than the {found.total} that are asked "
            f"for now",
            code="run-beyond-steps",
            where=f"run.dir: {folder.path}",
            fix="raise train.epochs or train.max_steps, or use what is there (`valence export "
            "RUN FOLDER`)",
        )
    return found


def _look(
    folder: RunFolder, prepared: Prepared, allow: Sequence[str]
) -> tuple[tuple[str, int] | None, Mapping[str, Any], Mapping[str, str]]:
    """Of the newest checkpoint where it is and its step; what the run was; what has changed
    since.
    """
    checkpoints = Checkpoints(folder.path / "checkpoints", None)
    checkpoints.tidy()
    saved = checkpoints.newest(folder.say)
    was = saved.facts if saved else folder.identity
    prepared = _as_recorded(prepared, was)
    changed = changes(folder.path, was, prepared)
    refuse(changed, folder.facts, allow, prepared, folder.path)
    return (str(saved.path), saved.step) if saved else None, was, changed


def _as_recorded(prepared: Prepared, was: Mapping[str, Any]) -> Prepared:
    """The run with the automatic settings that it had before."""
    source = with_recorded(prepared.source, was.get("settings") or {})
    return replace(prepared, source=source, recipe=source.recipe)


def take_up(run: Run, earlier: PreviousRun) -> None:
    """Puts a run where the earlier one was saved last; before the first checkpoint, where it began.

    Raises UserError when the state is of another model, optimizer or schedule.
    """
    if run.policy.packs and earlier.choices.get("packed") is False:
        run.policy.lay_out(packed=False)
    if other := differences(earlier.was, run.world):
        run.say_once(
            visible(f"last digits may differ from those of an undisturbed run: {', '.join(other)}")
        )
    if run.finished or earlier.state is None:
        if earlier.state:
            load_weights(run, earlier.state)
        elif not run.finished:
            run.registry.parts["log"].load_state_dict({"bytes": 0})
        return
    fresh = [dict(group) for group in run.optimizer.param_groups]
    bases = getattr(run.scheduler, "base_lrs", [])
    kinds = [sorted(group) for group in earlier.state["optimizer"]["param_groups"]]
    try:
        if kinds != [sorted(group) for group in run.optimizer.param_groups]:
            raise ValueError("it has other settings")
        run.load_state_dict(earlier.state)
    except (KeyError, ValueError) as error:
        what = f"the saved state is that of another optimizer or schedule ({error})"
        fix = "give those that the run began with, or start anew (`valence train RECIPE --fresh`)"
        raise UserError(what, code="optimizer-changed", where="checkpoint", fix=fix) from error
    counters, total = run.counters, run.counters.total
    counters.first, counters.firsts, counters.total = earlier.first, earlier.firsts, run.total_steps
    _budget(run, earlier)
    _hyper(run, earlier, fresh, bases)
    _selections(run, earlier, longer=run.total_steps > total)
    if run.rounds is not None:
        run.rounds.take_up(earlier.changed)
        # else it would end at once, as it did before
        if earlier.changed or run.total_steps > total:
            counters.zero_gradient_steps = 0
    assert run.saver is not None
    if run.world.rank == 0:
        try:
            run.saver.checkpoints.prune(run.best.step)  # as the one that was killed would have
        except OSError as error:
            run.warn(f"an old checkpoint could not be removed: {error}")
    run.saver.saved = earlier.state["counters"]["step"], earlier.state["counters"]["settled"]


def _budget(run: Run, earlier: PreviousRun) -> None:
    planned = [[0, "evaluation", run.budget.at(0, "evaluation")]]
    if "train.micro_batch_tokens" in earlier.changed:
        planned = [[0, "evaluation", run.planned_tokens()]]
    run.budget.load_state_dict([list(change) for change in earlier.budget] or planned)


def _hyper(
    run: Run, earlier: PreviousRun, fresh: Sequence[Mapping[str, Any]], bases: Sequence[float]
) -> None:
    """Settings of the optimizer that were changed on purpose, and the learning rate where the
    number of steps has grown.
    """
    names = [
        name
        for setting, names in HYPER.items()
        if setting in earlier.changed and run.own_optimizer
        for name in names
    ]
    for group, settings in zip(run.optimizer.param_groups, fresh, strict=True):
        group.update({name: settings[name] for name in names if name in settings})
    if not isinstance(run.scheduler, LambdaLR):
        return
    if "lr" in names:
        run.scheduler.base_lrs = list(bases)
    for group, base, factor in zip(
        run.optimizer.param_groups, run.scheduler.base_lrs, run.scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(run.scheduler.last_epoch)


def _selections(run: Run, earlier: PreviousRun, longer: bool) -> None:
    """The best evaluation so far is none when others follow that do not compare.

    A run that ended early is given another try where it is to go on: it is ``longer`` now than when
    it was saved, or ends for another reason.
    """
    patience = earlier.was["settings"].get("run.early_stop.patience")
    ended = patience is not None and run.early.since >= patience
    if ended and (
        longer
        or any(
            name == "data.train" or name.startswith("run.early_stop") for name in earlier.changed
        )
    ):
        run.early.since = 0
    if any(
        name == "data.eval" or name.startswith(("loss.", "eval.max_examples"))
        for name in earlier.changed
    ):
        run.say_once(
            "evaluations no longer compare with those before: the best so far is forgotten"
        )
        for each in (run.best, run.early, run.watch):
            each.reset()


def begin(
    folder: RunFolder, prepared: Prepared, command: str, tokens: int, earlier: PreviousRun | None
) -> None:
    """Writes what is known before the first step, or before the next one. tokens: that run at
    once.
    """
    folder.write("config.yaml", add_checksum_line(prepared.source.to_yaml()))
    audits = {
        name: audited(corpus.audit) | {"distributions": distributions(corpus.units)}
        for name, corpus in prepared.corpora.items()
    }
    folder.write("audit.json", add_checksum(audits))
    changed = [
        {"setting": name, "value": in_short(setting.value), "origin": setting.origin}
        for name, setting in prepared.source.settings.items()
        if not setting.is_default
    ]
    facts: dict[str, Any] = {"command": command, "started": now()}
    if earlier:
        here = {"at": now(), "step": earlier.step, "with": list(earlier.changed.values())}
        facts = {"taken_up": [*folder.facts.get("taken_up", []), here], "ended_early": None}
    folder.state(
        **facts,
        status="running",
        changed=changed,
        method=prepared.recipe.method,
        cwd=os.getcwd(),
        total_steps=prepared.steps_from(earlier.first if earlier else 0),
        versions=versions(),
        settings=settings_of(prepared),
        rows=rows_of(prepared),
        stop_ids=list(prepared.encoder.end_ids),
        micro_batch_tokens=earlier.budget
        if earlier and earlier.budget
        else [[0, "evaluation", tokens]],
    )
    folder.write(ROWS, hashes_of(prepared))
