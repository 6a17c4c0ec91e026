"""Put a trainer together from its models, its state and its services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from valence.data.audit_text import audited
from valence.distributed.process_group import Group, SingleProcess
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.reports.run_record import LOG
from valence.reports.sinks import FanOut, JsonlSink, Sink
from valence.reports.trackers import make_trackers
from valence.rewards.build import reward_of
from valence.rewards.combine import Combined
from valence.terminal import Terminal
from valence.training.callbacks import CallbackLike
from valence.training.checkpoints import Saver
from valence.training.collector import Collector
from valence.training.engines import make_engine, make_policy_engine
from valence.training.examples import StoredExamples
from valence.training.folder import Messages, RunFolder
from valence.training.model_files import ModelWriter
from valence.training.optim import OptimizerLike, SchedulerLike
from valence.training.out_of_memory import MemoryRetry
from valence.training.plan import planned_server_share
from valence.training.prepare import Prepared
from valence.training.reward_models import reward_model
from valence.training.rounds import Rounds
from valence.training.signals import SharedStop, Stop
from valence.training.state import TrainState
from valence.training.trainer import Trainer

SCORES = "scores"
"""Folder of a run with cached scores, and the replies of LLM judges."""


def make_trainer(
    prepared: Prepared,
    policy: PolicyModel,
    reference: Reference | None,
    *,
    micro_batch_tokens: int,
    folder: RunFolder | None = None,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike = None,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[CallbackLike] = (),
    console: Console | None = None,
    stop: Stop | None = None,
    finished: bool = False,
    world: Group | None = None,
    facts: Mapping[str, Any] | None = None,
    audit: Mapping[str, Any] | None = None,
    samples_in_process: bool = False,
) -> Trainer:
    """Return a trainer that stands at its first step.

    finished: the run is only there to be measured. world: all processes. facts, audit: what is
    known of a run without a ``folder``, for its model card. samples_in_process: ignore the
    recipe's ``rollout.engine``.

    Raises UserError for an optimizer of weights that are not the policy's.
    """
    world, console = world or SingleProcess(), console or Terminal()
    group = world.split(*prepared.recipe.parallel.neighbours)[0]  # the processes with other rows
    messages = Messages(console, folder)
    jsonl = JsonlSink(folder.path / LOG, messages.warn) if folder and folder.writes else None
    state = TrainState(
        prepared, policy, reference, group,
        micro_batch_tokens=micro_batch_tokens, optimizer=optimizer, scheduler=scheduler, log=jsonl,
        trains=folder is not None,
    )  # fmt: skip
    shared_stop = SharedStop(stop or Stop(console), world)
    retry = MemoryRetry(state, messages, folder)
    path = folder.path if folder else None
    examples: StoredExamples | Rounds
    if prepared.method.online:
        collector = Collector(
            prepared, state,
            make_engine=partial(make_policy_engine, prepared, state)
            if samples_in_process
            else partial(
                make_engine, prepared, state, messages, path, world=world,
                server_share=partial(planned_server_share, prepared, policy, world.size),
            ),
            make_policy_engine=partial(make_policy_engine, prepared, state),
            load_reward=partial(_load_reward, prepared, path),
            world=world, stop=shared_stop, messages=messages, retry=retry,
        )  # fmt: skip
        examples = state.rounds = Rounds(prepared, state, collector, messages)
    else:
        examples = StoredExamples(prepared, state, shared_stop, messages, retry)
    if audit is None:
        audit = audited(prepared.corpora["train"].audit) if "train" in prepared.corpora else {}
    model_writer = ModelWriter(
        prepared, state, world, facts=folder.facts if folder else facts or {}, audit=audit,
        log=path / LOG if path else None,
    )  # fmt: skip
    return Trainer(
        prepared, state, examples,
        world=world, stop=shared_stop, messages=messages, retry=retry,
        log=_log(prepared, messages, jsonl, sinks, world, has_folder=folder is not None),
        model_writer=model_writer, folder=folder, jsonl=jsonl,
        saver=Saver(state, folder, jsonl, model_writer, messages) if folder else None,
        callbacks=callbacks, finished=finished,
    )  # fmt: skip


def _log(
    prepared: Prepared,
    messages: Messages,
    jsonl: JsonlSink | None,
    sinks: Sequence[Sink],
    world: Group,
    *,
    has_folder: bool,
) -> FanOut:
    """The log file, the sinks given and those of the recipe."""
    of_recipe = (
        make_trackers([sink.model_dump() for sink in prepared.recipe.run.sinks], messages.note_once)
        if has_folder
        else []
    )
    return FanOut(
        [jsonl] if jsonl else [],
        [*sinks, *of_recipe] if world.rank == 0 else [],
        messages.warn,
    )


def _load_reward(prepared: Prepared, folder: Path | None) -> Combined:
    """The recipe's rewards. Scores that cannot change are kept in the run's folder."""
    if not prepared.has_rewards:
        raise ValueError("the run was opened without its rewards")
    cache = folder / SCORES if folder else None
    return reward_of(prepared.recipe.reward, model=reward_model, cache=cache)
