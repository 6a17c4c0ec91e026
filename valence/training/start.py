"""Start or resume a run: from a recipe to a trainer that is ready to fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.config.load import LoadedRecipe, load_recipe
from valence.config.schema import RewardSettings, seconds_of
from valence.data.audit_text import render, warnings_of
from valence.data.objects import PathOrPaths, Rows, as_overrides
from valence.data.rendering import describe_first_rows, describe_rendering
from valence.distributed.process_group import (
    Group,
    SingleProcess,
    check_ranks_agree,
    run_on_first_rank,
)
from valence.errors import UserError, for_interface
from valence.evaluation.calibration import (
    calibrate,
    describe_calibration,
    read_labels,
    require_agreement,
)
from valence.evaluation.judges import RewardJudge
from valence.models.adapters import check_trains
from valence.models.build import stock_model
from valence.models.digest import model_digest
from valence.reports.trackers import check
from valence.rewards.build import judge_settings, reward_of
from valence.targets import with_dtype
from valence.terminal import (
    Terminal,
    only_warnings,
    print_message,
    print_warning,
    prints_only_warnings,
)
from valence.training.assemble import SCORES, make_trainer
from valence.training.changes import choices_of, settings_of
from valence.training.finish import run_to_end
from valence.training.folder import Messages, RunFolder, refuse_inputs_in_folder
from valence.training.models import build_models
from valence.training.plan import crowding, describe, make_plan
from valence.training.prepare import Prepared, class_weight_warning, held_out_warning, prepare
from valence.training.resume import PreviousRun, find_previous_run, record_start, resume
from valence.training.signals import Stop
from valence.training.trainer import Trainer


def train_in_folder(
    recipe: str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str],
    console: Console,
    group: Group,
    **options: Any,
) -> Path:
    """Train as ``train`` does, with its arguments, and return the run's folder.

    Loads no model if the run is finished.
    """
    stop = Stop(console)
    with stop.listening():
        try:
            trainer = build_run(
                recipe,
                overrides,
                console=console,
                group=group,
                stop=stop,
                loads_finished=False,
                **options,
            )
        except _FinishedError as finished:
            return finished.folder
        return run_to_end(trainer).directory


class _FinishedError(Exception):
    """The run in this folder is finished."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def terminal_of(group: Group) -> Console:
    """The console of this process: only rank 0 prints."""
    return Terminal(quiet=group.rank > 0)


def build_run(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    rows: Mapping[str, Rows | PathOrPaths | float | None] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    model: nn.Module | None = None,
    reference: nn.Module | None = None,
    console: Console | None = None,
    quiet: bool = False,
    fresh: bool = False,
    allow: Sequence[str] = (),
    command: str = "valence.train(...)",
    stop: Stop | None = None,
    group: Group | None = None,
    loads_finished: bool = True,
    new_folder: bool = False,
    **parts: Any,
) -> Trainer:
    """Return a trainer that is ready to ``fit``.

    Reads the rows, prints their audit, loads the models, creates the run folder, and restores
    the state of the run in it, if there is one.

    rows: by name (``train``, ``eval``), in place of those of the recipe. The other arguments are
    those of ``valence.train``. loads_finished: False is for internal use; a finished run is then
    not loaded. new_folder: use a folder that does not exist yet if run.dir is not set.
    """
    world = group or SingleProcess()
    model, reference = stock_model(model, "model"), stock_model(reference, "reference")
    in_memory_rows, overrides = as_overrides(rows or {}, overrides)
    console = console or terminal_of(world)
    if quiet:
        console = only_warnings(console)
    in_memory = [name for name, value in in_memory_rows.items() if value is not None]
    source = load_recipe(recipe, overrides, in_memory=in_memory)
    if new_folder and source.settings["run.dir"].is_default:
        path = run_on_first_rank(world, partial(_unused_folder, source.recipe.method))
        source = source.with_automatic("run.dir", path, "a new folder")
    checked = source.recipe
    if model is not None:
        check_trains(model, checked.model)
    refuse_inputs_in_folder(
        Path(checked.run.dir),
        {
            "model.name": checked.model.name,
            "model.adapter": checked.model.adapter,
            "model.tokenizer": checked.model.tokenizer,
            checked.reference_model[0]: checked.reference_model[1],
            "reference.cache": checked.reference.cache,
        },
    )
    (stop := stop or Stop(console)).limit(seconds_of(checked.run.max_time or ""))
    say = partial(_say, console)
    folder = RunFolder(
        Path(checked.run.dir), fresh=fresh, say=partial(say, style="yellow"), group=world
    )
    with ExitStack() as failing:
        failing.callback(folder.close)
        prepared = prepare(
            with_dtype(source, world),
            tokenizer=tokenizer,
            rows=in_memory_rows,
            policy=model,
            training=True,
            console=console,
        )
        check_ranks_agree(
            world, lambda: settings_of(prepared), "give all processes the same recipe"
        )
        previous = find_previous_run(folder, prepared, allow) if folder.is_resumed else None
        prepared = previous.prepared if previous else prepared
        tokens, sharded = _print_plan(prepared, model, previous, console, world)
        finished = _is_finished(previous, folder, stop, loads_finished)
        if not finished:
            run_on_first_rank(world, partial(check_sinks, source))
            folder.claim()
            failing.callback(_record_failure, folder)
            if previous is None:
                record_start(folder, prepared, command, tokens, None)
            measure = partial(_measure_judges, prepared, folder, Messages(console, folder))
            run_on_first_rank(world, measure)
        if model is None:
            say(f"loading and checking {checked.model.name}")
        policy, frozen = build_models(
            prepared, group=world, model=model, reference=reference, fills=not finished,
            compiled=previous.compiled if previous else None, sharded=sharded,
        )  # fmt: skip
        trainer = make_trainer(
            prepared,
            policy,
            frozen,
            folder=None if finished else folder,
            console=console,
            stop=stop,
            micro_batch_tokens=tokens,
            finished=finished,
            world=world,
            facts=folder.facts,
            **parts,
        )
        if previous:
            resume(trainer, previous)
        if not finished:
            start = _starting_weights(trainer, folder) if model is not None else None
            if previous:
                record_start(folder, prepared, command, tokens, previous)
            folder.record(choices=choices_of(policy, world), start=start)
        failing.pop_all()
    if finished:
        folder.close()
    return trainer


def _unused_folder(method: str) -> str:
    """A path in ``runs`` for a run of a method, at which nothing is: ``kto``, ``kto-2``, ..."""
    name = method.rpartition(":")[2]
    paths = (f"runs/{name}" if number == 1 else f"runs/{name}-{number}" for number in count(1))
    return next(path for path in paths if not os.path.lexists(path))


def _is_finished(
    previous: PreviousRun | None, folder: RunFolder, stop: Stop, loads_finished: bool
) -> bool:
    """Whether the run is finished. Raises _FinishedError if its model need not be loaded."""
    if previous is None or not previous.finished:
        return False
    if not loads_finished:
        raise _FinishedError(folder.path)
    stop.no_limit()
    return True


def _measure_judges(prepared: Prepared, folder: RunFolder, messages: Messages) -> None:
    """Measure the LLM judges of a recipe against their labels, before the model is loaded.

    Raises UserError for a judge that agrees too little with its labels.
    """
    for number, spec in enumerate(prepared.recipe.reward):
        settings = judge_settings(spec, f"reward.{number}")
        if settings is None:
            continue
        where = f"reward.{number}.settings"
        if settings.labels is None:
            name = spec.name or settings.model
            messages.warn(f"{name} was not measured against labels: set {where}.labels")
            continue
        with closing(RewardJudge(reward_of([spec], cache=folder.path / SCORES))) as judge:
            calibration = calibrate(judge, read_labels([settings.labels]))
        messages.note_once(describe_calibration(calibration))
        require_agreement(
            calibration,
            settings.min_agreement,
            allow_below=settings.allow_below,
            setting=f"{where}.allow_below: true",
        )


def check_judge_labels(rewards: Sequence[RewardSettings]) -> None:
    """Raise UserError for labels of an LLM judge that cannot be read."""
    for number, spec in enumerate(rewards):
        settings = judge_settings(spec, f"reward.{number}")
        if settings is None or settings.labels is None:
            continue
        try:
            read_labels([settings.labels])
        except UserError as error:
            where = f"reward.{number}.settings.labels ({error.where or settings.labels})"
            raise UserError(error.message, code=error.code, where=where, fix=error.fix) from error


def check_sinks(source: LoadedRecipe) -> None:
    """Raise UserError for a tracker that is not available."""
    with source.placing():
        for sink in source.recipe.run.sinks:
            check(sink.model_dump())


def _starting_weights(trainer: Trainer, folder: RunFolder) -> str | None:
    """Digest of a model object before the first step.

    Raises UserError if it differs from that of the run's first start: the same process may have
    trained it since.
    """
    recorded = folder.facts.get("start")
    if trainer.step > 0:
        return recorded
    digest = model_digest(trainer.policy, adapter=True)
    if folder.is_resumed and digest != recorded:
        raise UserError(
            "the weights of this model object have changed since this run began",
            code="model-changed",
            where="model",
            fix="pass the model with its original weights, or start over with fresh=True",
        )
    return digest


def _record_failure(folder: RunFolder) -> None:
    """Record that a run failed before its training began."""
    if folder.facts.get("status") == "running":
        folder.record(status="failed")


def _say(console: Console, message: str, style: str = "") -> None:
    print_message(console, for_interface(message), style)


def _print_plan(
    prepared: Prepared,
    model: nn.Module | None,
    previous: PreviousRun | None,
    console: Console,
    group: Group,
) -> tuple[int, bool | None]:
    """Print the audit and the plan of a run, or how it resumes.

    Returns the tokens per micro-batch, and whether weights are split over processes.
    """
    say = partial(_say, console)
    if crowded := crowding(group.size):
        print_warning(console, for_interface(crowded))
    if previous:
        say(previous.summary)
        if previous.micro_batch_tokens:
            return previous.micro_batch_tokens, previous.sharded
    elif prints_only_warnings(console):
        _warn_of_data(prepared, console)
    else:
        show_audit(prepared, console)
    plan = make_plan(prepared, model, group, sharded=previous.sharded if previous else None)
    if not (previous or prints_only_warnings(console)):  # the description reads all rows
        for line in describe(plan):
            say(line)
    return plan.micro_batch_tokens, plan.split.ways > 1


def show_audit(prepared: Prepared, console: Console) -> None:
    """Print the audit of the data, and how rows become text."""
    for name, corpus in prepared.corpora.items():
        console.rule(name if name.startswith("mix") else f"data.{name}", align="left")
        if name == "eval" and (held_out := prepared.held_out):
            print_message(console, held_out)
        print_message(console, render(corpus.audit, training=name == "train"))
        for line in describe_first_rows(corpus.loaded, prepared.encoder.tokenizer):
            print_message(console, line)
    for warning in filter(None, (class_weight_warning(prepared), held_out_warning(prepared))):
        print_message(console, warning, "yellow")
    console.rule("text rendering", align="left")
    for line in describe_rendering(prepared.encoder, prepared.recipe.data.chat_template):
        print_message(console, line)


def _warn_of_data(prepared: Prepared, console: Console) -> None:
    """Print the audit's warnings instead of all of it."""
    for name, corpus in prepared.corpora.items():
        where = name if name.startswith("mix") else f"data.{name}"
        for warning in warnings_of(corpus.audit):
            print_warning(console, f"{where}: {warning}")
    for warning in filter(None, (class_weight_warning(prepared), held_out_warning(prepared))):
        print_warning(console, warning)
