"""Compute the reference's log-probabilities of every sequence of a run before it starts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from valence.batching.micro_batches import for_teacher
from valence.config.load import load_recipe
from valence.config.needs import caches_reference, method_in, reads_reference
from valence.config.schema import seconds_of
from valence.data.sampler import canonical_order
from valence.distributed.process_group import Group, SingleProcess, gather_objects
from valence.errors import UserError
from valence.models.cache import CachedReference
from valence.reports.console import Progress
from valence.terminal import Terminal, print_message
from valence.training.assemble import make_trainer
from valence.training.folder import RunFolder, now
from valence.training.models import build_models
from valence.training.plan import planned_tokens
from valence.training.prepare import prepare
from valence.training.signals import Stop
from valence.training.step import Objective
from valence.training.trainer import Trainer
from valence.types import TokenizedExample


def score(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    verify: int = 0,
    group: Group | None = None,
    console: Console | None = None,
    command: str = "valence.score(...)",
) -> CachedReference:
    """Fill the reference cache of a recipe; each process of the group computes its share.

    Cached values are not computed again. verify: how many sequences to recompute and compare
    afterwards. Raises UserError if the recipe uses no cache, or cached values are wrong.
    """
    world, console = group or SingleProcess(), console or Terminal()
    source = load_recipe(recipe, overrides)
    where = source.recipe.reference.cache
    with source.placing():
        if method_in(source.recipe).online:
            raise UserError(
                f"{source.recipe.method} trains on completions that do not exist yet",
                code="nothing-to-score",
                where="method",
                fix="to score stored answers, add --data and --out",
            )
        if not reads_reference(source.recipe):
            raise UserError(
                f"{source.recipe.method} uses no reference",
                code="nothing-to-score",
                where="method",
                fix="skip this command: `valence train` needs no reference cache for this method",
            )
        if not caches_reference(source.recipe):
            raise UserError(
                f"{source.recipe.method} compares distributions, which are not cached",
                code="nothing-to-score",
                where="loss.target",
                fix="skip this command, or set loss.target: token",
            )
        if source.recipe.reference.sync_every is not None:
            raise UserError(
                "the reference is synced with the policy, so its values cannot be cached",
                code="nothing-to-score",
                where="reference.sync_every",
                fix="skip this command: `valence train` needs no cache for a synced reference; "
                "or remove reference.sync_every",
            )
        if where == "off":
            raise UserError(
                "the reference cache is off",
                code="nothing-to-score",
                where="reference.cache",
                fix="set it to a folder, or to auto",
            )
    warn = partial(print_message, console, style="yellow")
    folder = (
        RunFolder(Path(source.recipe.run.dir), say=warn, group=world) if where == "auto" else None
    )
    stop = Stop(console)
    with stop.listening(), ExitStack() as ending:
        if folder:
            ending.callback(folder.close)
            if folder.is_resumed:
                raise UserError(
                    "the folder already contains a run",
                    code="run-exists",
                    where=f"run.dir: {folder.path}",
                    fix="choose another run.dir, or set reference.cache to a folder",
                )
        stop.limit(seconds_of(source.recipe.run.max_time or ""))
        prepared = prepare(source)
        if folder:
            folder.claim()
            folder.record(command=command, started=now(), status="scored")
        policy, cached = build_models(prepared, group=world, fills=True)
        assert isinstance(cached, CachedReference)
        trainer = make_trainer(
            prepared,
            policy,
            cached,
            micro_batch_tokens=planned_tokens(prepared, policy, world),
            console=console,
            stop=stop,
            world=world,
        )
        _fill(trainer, cached)
        try:
            cached.sync()
        except OSError as error:
            raise UserError(
                f"the reference cache cannot be written ({error.strerror})",
                code="file-not-writable",
                where=str(cached.folder),
                fix="free disk space or make the folder writable, then rerun the same command to "
                "resume",
            ) from error
        world.barrier("scored")  # from here on, all processes can read all values
    cached.hits, cached.misses = map(
        sum, zip(*gather_objects(trainer.state.group, [cached.hits, cached.misses]), strict=True)
    )
    lines = [f"{cached.summary}; saved in {cached.folder}"]
    if verify:
        lines.append(_verify(trainer, cached, verify))
    for line in lines:
        print_message(console, line)
    return cached


def passes(trainer: Trainer) -> Iterator[list[TokenizedExample]]:
    """Yield the rows whose sequences a run compares with its reference, in groups that are
    processed together.

    The groups are those of each step that is left, of the evaluation, of the test, and of the
    training rows that are measured afterwards. The KL pairs of a group come after it.
    """
    for objective, units, following in _objectives(trainer):
        yield [for_teacher(unit) for unit in units] if objective.teacher else units
        if objective.method.needs_kl_pairs:
            yield objective.make_kl_pairs(units, following)[0]


def _objectives(
    trainer: Trainer,
) -> Iterator[tuple[Objective, list[TokenizedExample], Iterator[TokenizedExample]]]:
    """The rows of steps and evaluations, with their objective and the rows that follow them."""
    state, prepared = trainer.state, trainer.prepared
    samplers = [(state.objective, prepared.sampler)] if "train" in prepared.corpora else []
    samplers += [(objective, part.sampler) for part, objective in state.auxiliary]
    for objective, sampler in samplers:
        for step in range(state.step, state.total_steps) if reads_cache(objective) else ():
            indices, following = sampler.step(step)
            yield (
                objective,
                [sampler.units[i] for i in indices],
                map(sampler.units.__getitem__, following),
            )
    if not reads_cache(state.objective):
        return
    for name, limit in (("eval", trainer.recipe.eval.max_examples), ("test", None)):
        if name in prepared.corpora:
            units = prepared.corpora[name].units[:limit]
            yield state.objective, [units[i] for i in canonical_order(units, 0, 0)], iter(())
    if rows := _measured_training_rows(trainer):
        yield state.objective, rows, iter(())


def reads_cache(objective: Objective) -> bool:
    """Whether a step reads values of the reference, also those of a teacher with its weights."""
    return isinstance(objective.teacher or objective.reference, CachedReference)


def _measured_training_rows(trainer: Trainer) -> list[TokenizedExample]:
    """The training rows that are evaluated after training; none if they form no KL pairs."""
    objective, units = trainer.state.objective, trainer.prepared.measured_training_rows
    units = [units[i] for i in canonical_order(units, 0, 0)]
    try:
        if objective.method.needs_kl_pairs:
            objective.make_kl_pairs(units, iter(()))
    except UserError:
        return []
    return units


def _fill(trainer: Trainer, cached: CachedReference) -> None:
    """Compute the reference's values of every sequence that the run reads."""
    num_processes, messages = trainer.state.group.size, trainer.messages
    total = sum(
        len(unit.answers) * (1 + objective.method.needs_kl_pairs)
        for objective, units, _ in _objectives(trainer)
        for unit in units
    )
    done = tokens = 0
    with Progress(messages.console, "scoring", total) as bar:
        objective = trainer.state.objective
        for units in passes(trainer):
            rounds = objective.rounds(objective.divide(units))
            for batch, is_dummy in rounds:
                with rounds.running():
                    if is_dummy:
                        cached.join_collectives(batch)
                        continue
                    cached(batch)
                    done += batch.sequences * num_processes  # the others have done about as much
                    tokens += len(batch.tokens) * num_processes
                    bar.update(min(done, total), tokens=tokens)


def _verify(trainer: Trainer, cached: CachedReference, number: int) -> str:
    """Compute this many sequences again, drawn from all rows, and describe the differences.

    Raises UserError when they differ from the cached values.
    """
    prepared, objective = trainer.prepared, trainer.state.objective
    places = [(corpus, i) for corpus in prepared.corpora.values() for i in range(len(corpus.units))]
    places = random.Random(prepared.recipe.train.seed).sample(places, min(number, len(places)))
    chosen = [corpus.units[i] for corpus, i in places]
    local: list[tuple[int, float]] = []
    rounds = objective.rounds(objective.divide(chosen))
    for batch, is_dummy in rounds:
        with rounds.running():
            if is_dummy:
                cached.join_collectives(batch)
            else:
                local.append(cached.check(batch))
    results = [pair for pairs in gather_objects(trainer.state.group, local) for pair in pairs]
    count = sum(count for count, _ in results)
    largest = max(difference for _, difference in results)
    return f"computed {count} sequences again: they differ by {largest:.2g} nats per token at most"
