"""The reference's log-probabilities of every sequence that a run will need, computed and kept
before the run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from valence.config.load import load_recipe
from valence.config.schema import seconds_of
from valence.data.sampler import canonical_order
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.together import gathered
from valence.errors import UserError
from valence.models.cache import CachedReference
from valence.reports.console import Progress
from valence.runs.folder import RunFolder, now
from valence.runs.signals import Stop
from valence.terminal import Terminal, print_message
from valence.training.build import build_models
from valence.training.loop import Run
from valence.training.measure import trained_units
from valence.training.methods import method_in, method_of
from valence.training.setup import prepare
from valence.training.step import Objective
from valence.types import MicroBatch, TokenizedExample


def score(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    verify: int = 0,
    group: Group | None = None,
    console: Console | None = None,
    quiet: bool = False,
    command: str = "valence.score(...)",
) -> CachedReference:
    """Fills the reference cache of a recipe, each process of the group with its share.

    What is there already is not computed.

    verify: of how many sequences the values are computed again afterwards and compared. Raises
    UserError when the recipe keeps no cache, or what it keeps is not what the reference gives.
    """
    world, console = group or Single(), console or Terminal()
    source = load_recipe(recipe, overrides, method_of=method_of)
    where = source.recipe.reference.cache
    with source.placing():
        methods = [
            method_in(source.recipe),
            *(method_of(part.method) for part in source.recipe.mix),
        ]
        if methods[0].online:
            what = f"{source.recipe.method} compares answers that are not there yet"
            raise UserError(
                what,
                code="nothing-to-score",
                where="method",
                fix="to score stored answers, give --data and --out",
            )
        if not any(method.needs_reference for method in methods):
            raise UserError(
                f"{source.recipe.method} reads no reference",
                code="nothing-to-score",
                where="method",
                fix="there is nothing to score",
            )
        if source.recipe.reference.sync_every is not None:
            raise UserError(
                "the reference moves with the policy",
                code="nothing-to-score",
                where="reference.sync_every",
                fix="there is nothing to keep",
            )
        if where == "off":
            raise UserError(
                "there is no cache to fill",
                code="nothing-to-score",
                where="reference.cache",
                fix="name a folder, or set it to auto",
            )
    warn = partial(print_message, console, style="yellow")
    folder = (
        RunFolder(Path(source.recipe.run.dir), say=warn, group=world) if where == "auto" else None
    )
    stop = Stop(console)
    with stop.listening(), ExitStack() as ending:
        if folder:
            ending.callback(folder.close)
            if folder.taken_up:
                fix = "choose another run.dir, or name a folder in reference.cache"
                raise UserError(
                    "the folder holds a run already",
                    code="run-exists",
                    where=f"run.dir: {folder.path}",
                    fix=fix,
                )
        stop.limit(seconds_of(source.recipe.run.max_time or ""))
        prepared = prepare(source)
        if folder:
            folder.claim()
            folder.state(command=command, started=now(), status="scored")
        policy, cached = build_models(prepared, group=world, fills=True)
        assert isinstance(cached, CachedReference)
        run = Run(prepared, policy, cached, console=console, quiet=quiet, stop=stop, world=world)
        _fill(run, cached)
        try:
            cached.sync()
        except OSError as error:
            what = f"what was computed cannot be kept ({error.strerror})"
            raise UserError(
                what,
                code="file-not-writable",
                where=str(cached.folder),
                fix="make room, and give the same command again",
            ) from error
        world.barrier("scored")  # what one has computed all can read
    cached.hits, cached.misses = map(
        sum, zip(*gathered(run.group, [cached.hits, cached.misses]), strict=True)
    )
    said = [
        f"{cached.summary}; kept in {cached.folder}",
        *([_verified(run, cached, verify)] if verify else []),
    ]
    for line in said if not quiet else []:
        print_message(console, line)
    return cached


def passes(run: Run) -> Iterator[list[TokenizedExample]]:
    """The units whose sequences a run compares with its reference, as they come together: those of
    each step that is left, of an evaluation, of the test, and of the training rows that are
    measured afterwards; behind them those of the mismatched sequences that go with them.
    """
    for objective, units, following in _own(run):
        yield units
        if objective.method.needs_kl_pairs:
            yield objective.make_kl_pairs(units, following)[0]


def _own(
    run: Run,
) -> Iterator[tuple[Objective, list[TokenizedExample], Iterator[TokenizedExample]]]:
    """Units of steps and of all that is measured with what they train, and those that follow in
    their epoch.
    """
    samplers = [(run.objective, run.sampler, run.counters.first)] if run.sampler else []
    samplers += [
        (objective, part.sampler, run.counters.firsts.get(part.rows, 0))
        for part, objective in run.mixed
    ]
    for objective, sampler, first in samplers:
        for step in range(run.step, run.total_steps) if objective.reference else ():
            ours, following = sampler.step(step - first)
            yield (
                objective,
                [sampler.units[i] for i in ours],
                map(sampler.units.__getitem__, following),
            )
    for name, most in (("eval", run.recipe.eval.max_examples), ("test", None)):
        if name in run.prepared.corpora:
            units = run.prepared.corpora[name].units[:most] if run.objective.reference else ()
            yield run.objective, [units[i] for i in canonical_order(units, 0, 0)], iter(())
    if run.objective.reference and (trained := _trained(run)):
        yield run.objective, trained, iter(())


def _trained(run: Run) -> list[TokenizedExample]:
    """The training rows that are measured afterwards; none where these few make no whole, as then
    they are not.
    """
    units = trained_units(run)
    units = [units[i] for i in canonical_order(units, 0, 0)]
    try:
        if run.objective.method.needs_kl_pairs:
            run.objective.make_kl_pairs(units, iter(()))
    except UserError:
        return []
    return units


def _fill(run: Run, cached: CachedReference) -> None:
    group = run.group
    total = sum(
        len(unit.answers) * (1 + objective.method.needs_kl_pairs)
        for objective, units, _ in _own(run)
        for unit in units
    )
    done = tokens = 0
    with Progress(run.console, "scoring", total, quiet=run.quiet) as bar:

        def scored(batch: MicroBatch) -> None:
            nonlocal done, tokens
            cached(batch)
            done += batch.sequences * group.size  # about what the others have done as well
            tokens += len(batch.tokens) * group.size
            bar.update(min(done, total), tokens=tokens)

        for units in passes(run):
            run.objective.run_micro_batches(run.objective.divide(units), scored, cached.beside)


def _verified(run: Run, cached: CachedReference, number: int) -> str:
    """What to say after so many sequences, drawn from all rows, were computed again.

    Raises UserError when they differ.
    """
    units = [unit for corpus in run.prepared.corpora.values() for unit in corpus.units]
    chosen = random.Random(run.recipe.train.seed).sample(units, min(number, len(units)))
    own = run.objective.run_micro_batches(run.objective.divide(chosen), cached.check, cached.beside)
    found = [pair for pairs in gathered(run.group, own) for pair in pairs]
    count, largest = sum(count for count, _ in found), max(difference for _, difference in found)
    return f"computed {count} sequences again: they differ by {largest:.2g} nats a token at most"
