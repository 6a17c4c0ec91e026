"""The Python interface: ``train`` for a whole run, ``logprobs`` for the numbers everything rests
on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.batching.micro_batches import make_micro_batches
from valence.config.arguments import names_a_model, recipe_from_arguments
from valence.config.load import LoadedRecipe, load_recipe
from valence.config.schema import Recipe, seconds_of
from valence.data.audit_text import render, warnings_of
from valence.data.encode import Encoder
from valence.data.load import load, sources_from
from valence.data.objects import PathOrPaths, Rows, as_overrides
from valence.data.template import AsChat
from valence.distributed.processes import start
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.together import by_first, same
from valence.errors import UserError
from valence.models.build import load_tokenizer, stops_of
from valence.models.digest import model_digest
from valence.models.policy_model import PolicyModel
from valence.reports.results import outputs
from valence.reports.sinks import Sink
from valence.reports.trackers import check
from valence.rollouts.hf import evaluating
from valence.runs.folder import RunFolder, refuse_own_inputs
from valence.runs.signals import Stop
from valence.terminal import Terminal, print_message, warn_on_stderr
from valence.training.build import build_models
from valence.training.choices import with_dtype
from valence.training.compare import choices_of, settings_of
from valence.training.finish import run_to_end
from valence.training.loop import Callback, OptimizerLike, Run, SchedulerLike
from valence.training.methods import method_of
from valence.training.plan import crowding, describe, make_plan
from valence.training.rendering import describe_rendering
from valence.training.resume import PreviousRun, begin, look, take_up
from valence.training.setup import Prepared, class_weight_warning, prepare
from valence.types import Kind


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    method: str | None = None,
    overrides: Sequence[str] = (),
    model: nn.Module | str | Path | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike | None = None,
    train: Rows | PathOrPaths | Mapping[str, Any] | None = None,
    eval: Rows | PathOrPaths | Mapping[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callback] = (),
    fresh: bool = False,
    allow: Sequence[str] = (),
    quiet: bool = False,
    console: Console | None = None,
    command: str = "valence.train(...)",
    group: Group | None = None,
    **settings: Any,
) -> Run:
    """Train a model, from a recipe (a YAML file or a mapping), from keyword arguments, or from
    both::

        run = valence.train(method="kto", model="org/model", train=rows, loss={"beta": 0.2})
        print(run, run.report, run.ask("Why is the sky blue?"))

    method, settings: settings of the recipe; they win over those of ``recipe``, and ``overrides``
    (``"train.seed=1"``) win over them. A section is a mapping (``data={"max_length": 512}``), and a
    single setting has its full name (``**{"train.seed": 1}``). Mappings given as ``model``,
    ``train`` or ``eval`` are those sections. Unknown names and wrong types are the errors that a
    recipe has.

    model: a name or folder, or a loaded model, which replaces ``model.name``. tokenizer: by default
    that of the folder or name that the model was loaded from. train, eval: rows as a list of
    dictionaries in any format that files may have, Examples, a pandas DataFrame, a
    ``datasets.Dataset``, or the path of a file (or a list of paths); they replace ``data.train``
    and ``data.eval``. optimizer: an object, or a function of the list of trained weights;
    scheduler: an object, or a function of the optimizer. callbacks are called with the run and each
    record of the log.

    A run that is in the folder (``run.dir``) already resumes from its last checkpoint; a finished
    one is only loaded.
    fresh: move it aside and start again. allow: settings, or sections such as ``data``, that may
    differ from those of the run that resumes.

    Under torchrun or `accelerate launch` the processes train together: each calls this in the same
    way. group: the processes; by default those that the environment names. Sinks are those of rank
    0, callbacks are called on all.

    Raises UserError for a mistake in the recipe or the data, before any weight is loaded where that
    can be known; Interrupted (a KeyboardInterrupt) after a signal or run.max_time, when the state
    is saved.
    """
    given = {
        name: value for name, value in (("method", method), *settings.items()) if value is not None
    }
    sections = {
        name: value
        for name, value in (("model", model), ("train", train), ("eval", eval))
        if isinstance(value, Mapping)
    }
    loaded = model if isinstance(model, nn.Module) else None
    if isinstance(model, str | Path):
        given["model.name"] = str(model)
    elif loaded is not None and not names_a_model(recipe):
        given["model.name"] = name_of_model(loaded, tokenizer is not None)
    recipe, overrides = recipe_from_arguments(recipe, overrides, given | sections)
    rows = {
        name: None if isinstance(value, Mapping) else value
        for name, value in (("train", train), ("eval", eval))
    }
    group = group or start()
    console = console or terminal_of(group)
    stop = Stop(console)
    with stop.listening():
        run = build_run(
            recipe,
            overrides,
            model=loaded,
            tokenizer=tokenizer,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
            given=rows,
            sinks=sinks,
            callbacks=callbacks,
            fresh=fresh,
            allow=allow,
            quiet=quiet,
            console=console,
            command=command,
            stop=stop,
            group=group,
        )
        run = run if run.finished else run_to_end(run)
    for line in () if quiet else outputs(run.directory):
        print_message(console, line)
    return run


def name_of_model(model: nn.Module, has_tokenizer: bool) -> str:
    """What a recipe calls a loaded model: where it was loaded from.

    Raises UserError when that is not known, and a tokenizer would have to be read from there.
    """
    name = str(getattr(model, "name_or_path", "") or "")
    if not name and not has_tokenizer:
        fix = "give tokenizer=, or load the model with from_pretrained"
        raise UserError(
            "the model does not say where it was loaded from, so its tokenizer is not known",
            code="tokenizer-unknown",
            where="model",
            fix=fix,
        )
    return name or type(model).__name__


def train_in_folder(
    recipe: str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str],
    console: Console,
    group: Group,
    **how: Any,
) -> Path:
    """As ``train``, with its arguments, for who wants what it writes and not the model: of a run
    that is finished nothing is loaded. Returns the run's folder; raises what ``train`` does.
    """
    stop = Stop(console)
    with stop.listening():
        try:
            run = build_run(
                recipe,
                overrides,
                console=console,
                group=group,
                stop=stop,
                loads_finished=False,
                **how,
            )
        except _FinishedError as finished:
            return finished.folder
        return Path(run_to_end(run).recipe.run.dir)


class _FinishedError(Exception):
    """There is nothing to do in this folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def terminal_of(group: Group) -> Console:
    """What rank 0 prints on; the others print nothing."""
    return Terminal(quiet=group.rank > 0)


def build_run(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Rows | PathOrPaths | None] | None = None,
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
    **parts: Any,
) -> Run:
    """A ``Run`` that is ready to ``fit``: rows read and audited (shown on the console), models
    loaded, folder claimed, and the state of the run that is there, if any, taken up. Of a finished
    run raises _FinishedError unless ``loads_finished``.
    """
    world = group or Single()
    given, overrides = as_overrides(given or {}, overrides)
    console = console or terminal_of(world)
    source = load_recipe(recipe, overrides, method_of=method_of, in_memory=_given(given))
    checked = source.recipe
    _refuse_own_inputs(checked)
    (stop := stop or Stop(console)).limit(seconds_of(checked.run.max_time or ""))
    say = partial(print_message, console)
    folder = RunFolder(
        Path(checked.run.dir), fresh=fresh, say=partial(say, style="yellow"), group=world
    )
    with ExitStack() as failing:
        failing.callback(folder.close)
        prepared = prepare(
            with_dtype(source, world), tokenizer=tokenizer, given=given, policy=model
        )
        same(world, lambda: settings_of(prepared), "give all processes the same recipe")
        earlier = look(folder, prepared, allow) if folder.taken_up else None
        prepared = earlier.prepared if earlier else prepared
        tokens, sharded = _announced(prepared, model, earlier, console, quiet, world)
        finished = _nothing_to_do(earlier, folder, stop, loads_finished)
        if not finished:
            by_first(world, partial(check_sinks, source))
            folder.claim()
            failing.callback(_gave_up, folder)
            if earlier is None:
                begin(folder, prepared, command, tokens, None)
        if not quiet and model is None:
            say(f"loading and checking {checked.model.name}")
        policy, frozen = build_models(
            prepared, group=world, model=model, reference=reference, fills=not finished,
            compiled=earlier.compiled if earlier else None, sharded=sharded,
        )  # fmt: skip
        run = Run(
            prepared,
            policy,
            frozen,
            folder=None if finished else folder,
            console=console,
            quiet=quiet,
            stop=stop,
            micro_batch_tokens=tokens,
            first=earlier.first if earlier else 0,
            finished=finished,
            world=world,
            **parts,
        )
        if earlier:
            take_up(run, earlier)
        if not finished:
            start = _starting_weights(run, folder) if model is not None else None
            if earlier:
                begin(folder, prepared, command, tokens, earlier)
            folder.state(choices=choices_of(policy, world), start=start)
        failing.pop_all()
    return _looked_at(run, folder) if finished else run


def _nothing_to_do(
    earlier: PreviousRun | None, folder: RunFolder, stop: Stop, loads_finished: bool
) -> bool:
    """Whether the run is finished. Raises _FinishedError if its model is not wanted then."""
    if earlier is None or not earlier.finished:
        return False
    if not loads_finished:
        raise _FinishedError(folder.path)
    stop.no_limit()
    return True


def check_sinks(source: LoadedRecipe) -> None:
    """Raises UserError for a tracker that cannot be had."""
    with source.placing():
        for sink in source.recipe.run.sinks:
            check(sink.model_dump())


def _given(rows: Mapping[str, Rows | None]) -> list[str]:
    return [name for name, given in rows.items() if given is not None]


def _looked_at(run: Run, folder: RunFolder) -> Run:
    """A finished run, whose folder is free for others."""
    run.facts = folder.facts
    folder.close()
    return run


def _starting_weights(run: Run, folder: RunFolder) -> str | None:
    """A digest of a model that was given, as it is before its first step.

    Raises UserError when it is not as it was at the first
    start: in one process it may have been trained since.
    """
    known = folder.facts.get("start")
    if run.step > 0:
        return known
    found = model_digest(run.policy, adapter=True)
    if folder.taken_up and found != known:
        fix = "give it as it was then, or start anew with fresh=True"
        raise UserError(
            "the model given is not as it was when this run began",
            code="model-changed",
            where="model",
            fix=fix,
        )
    return found


def _refuse_own_inputs(checked: Recipe) -> None:
    refuse_own_inputs(
        Path(checked.run.dir),
        {
            "model.name": checked.model.name,
            "model.adapter": checked.model.adapter,
            "model.tokenizer": checked.model.tokenizer,
            "reference.model": checked.reference.model,
            "reference.cache": checked.reference.cache,
        },
    )


def _gave_up(folder: RunFolder) -> None:
    """A run that did not come to its training."""
    if folder.facts.get("status") == "running":
        folder.state(status="failed")


def _announced(
    prepared: Prepared,
    model: nn.Module | None,
    earlier: PreviousRun | None,
    console: Console,
    quiet: bool,
    group: Group,
) -> tuple[int, bool | None]:
    """Says what is going to be done.

    Returns how many tokens run at once, and whether weights are split over processes.
    """
    say = partial(print_message, console)
    if crowded := crowding(group.size):
        say(crowded, style="yellow")
    if earlier:
        if not quiet:
            say(earlier.told)
        if earlier.micro_batch_tokens:
            return earlier.micro_batch_tokens, earlier.sharded
    elif quiet:
        _warn_of_data(prepared, console)
    else:
        show_audit(prepared, console)
    plan = make_plan(prepared, model, group, sharded=earlier.sharded if earlier else None)
    for line in describe(plan) if not (quiet or earlier) else ():
        say(line)
    return plan.micro_batch_tokens, plan.split.ways > 1


def show_audit(prepared: Prepared, console: Console) -> None:
    """What is in the data, and how rows become text, on screen."""
    for name, corpus in prepared.corpora.items():
        console.rule(name if name.startswith("mix") else f"data.{name}", align="left")
        print_message(console, render(corpus.audit, training=name == "train"))
    if warning := class_weight_warning(prepared):
        print_message(console, warning, "yellow")
    console.rule("how rows become text", align="left")
    for line in describe_rendering(prepared.encoder, prepared.recipe.data):
        print_message(console, line)


def _warn_of_data(prepared: Prepared, console: Console) -> None:
    """Print the audit's warnings on standard error, where ``--quiet`` leaves everything else
    out.
    """
    for name, corpus in prepared.corpora.items():
        where = name if name.startswith("mix") else f"data.{name}"
        for warning in warnings_of(corpus.audit):
            warn_on_stderr(console, f"{where}: {warning}")
    if warning := class_weight_warning(prepared):
        warn_on_stderr(console, warning)


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of one answer: ``tokens`` and ``logps`` (nats) of its trained tokens, and
    their ``total``.
    """

    id: str
    tokens: tuple[int, ...]
    logps: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logps)


@torch.no_grad()
def logprobs(
    model: nn.Module,
    rows: Rows | PathOrPaths,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: Kind = "demonstration",
    max_length: int = 1024,
    micro_batch_tokens: int = 4096,
    as_chat: AsChat = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[LogProbs]:
    """Log-probabilities that a causal model gives to the answers of rows (any format; pairs have
    two answers each), in order.

    tokenizer: by default the one in the folder that the model was loaded from. as_chat,
    chat_template_kwargs: as in a recipe's data section. Raises UserError when a row cannot be used.
    """
    tokenizer = tokenizer or load_tokenizer(str(model.name_or_path))
    encoder = Encoder(
        tokenizer,
        max_length=max_length,
        as_chat=as_chat,
        chat_template_kwargs=chat_template_kwargs,
        stop_ids=stops_of(getattr(model, "generation_config", None) or model.config),
    )
    loaded = load(sources_from(rows), kind)
    encoded = encoder.encode_all(loaded.examples, loaded.sources)
    if encoded.unusable:
        raise UserError(
            encoded.unusable[0].reason,
            code=encoded.unusable[0].code,
            where=str(encoded.unusable[0].origin),
            fix=encoded.unusable[0].fix,
        )
    units = encoded.units
    config: Any = model.config
    before = config._attn_implementation
    found: dict[tuple[int, int], LogProbs] = {}
    with evaluating(model):
        engine = PolicyModel(model)
        try:
            engine.check_layout()
            for batch in make_micro_batches(units, micro_batch_tokens, engine.device):
                logp = engine(batch).logp
                for s, (unit, side) in enumerate(
                    zip(batch.unit.tolist(), batch.side.tolist(), strict=True)
                ):
                    ours = batch.loss_mask & (batch.sequence_ids == s)
                    found[unit, side] = LogProbs(
                        batch.ids[s], tuple(batch.tokens[ours].tolist()), tuple(logp[ours].tolist())
                    )
        finally:
            engine.causal.set_attn_implementation(before)
    return [found[key] for key in sorted(found)]


__all__ = ["LogProbs", "Run", "build_run", "logprobs", "show_audit", "train"]
