"""The Python interface: ``train`` for a whole run, ``logprobs`` for the numbers everything rests
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.batching.micro_batches import make_micro_batches
from valence.config.arguments import (
    Argument,
    names_a_model,
    recipe_from_arguments,
    refuse_duplicates,
)
from valence.data.encode import Encoder
from valence.data.load import load, sources_from
from valence.data.objects import PathOrPaths, Rows
from valence.data.template import AsChat
from valence.distributed.process_group import Group, start
from valence.errors import UserError, naming_arguments
from valence.losses import Loss
from valence.models.build import load_tokenizer, stops_of
from valence.models.check import check_layout
from valence.models.policy_model import PolicyModel
from valence.reports.sinks import Sink
from valence.reports.verdict import outputs
from valence.rollouts.hf import evaluating
from valence.terminal import only_warnings, print_message
from valence.training import start as lifecycle
from valence.training.callbacks import Callback, CallbackLike, Callbacks
from valence.training.finish import run_to_end
from valence.training.optim import OptimizerLike, SchedulerLike
from valence.training.signals import Stop
from valence.training.start import terminal_of
from valence.training.trainer import Trainer
from valence.types import Kind

Run = Trainer
"""The type that ``train`` and ``build_run`` return."""

build_run = naming_arguments()(lifecycle.build_run)


@naming_arguments()
def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    method: str | Loss | Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    model: nn.Module | str | Path | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike | None = None,
    train: Rows | PathOrPaths | Mapping[str, Any] | None = None,
    eval: Rows | PathOrPaths | Mapping[str, Any] | float | None = None,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[CallbackLike] = (),
    fresh: bool = False,
    allow: Sequence[str] = (),
    quiet: bool = False,
    console: Console | None = None,
    command: str = "valence.train(...)",
    group: Group | None = None,
    **settings: Any,
) -> Trainer:
    """Train a model, from a recipe (a YAML file or a mapping), from keyword arguments, or from
    both::

        run = valence.train(method="kto", model="org/model", train=rows, loss={"beta": 0.2})
        print(run, run.report, run.ask("Why is the sky blue?"))

    method, settings: settings that override those of ``recipe``; ``overrides`` (``"train.seed=1"``)
    override both. Two arguments for the same setting, such as ``eval`` and ``data={"eval": ...}``,
    are an error. A section is a mapping (``data={"max_length": 512}``), and a single setting has
    its full name (``**{"train.seed": 1}``). A mapping passed as ``model``, ``train`` or ``eval`` is
    the section of that name (``train={"batch_size": 8}``). Unknown names and wrong types raise the
    same errors as in a recipe.

    method may also be a loss, as a function or a ``valence.Loss``, or an advantage function for
    online training; ``reward`` a function, or a list of functions, names and sections. See the page
    on extending Valence for what they take and return.

    model: a name or folder, or a loaded model (of transformers or PEFT), which replaces
    ``model.name``. The object itself is trained: it gets the new weights, in the dtype and on the
    device of the run, or the new adapter over frozen weights, and its dropout is 0. Unless
    weights are split over processes, it can be called at any time, also after an error.
    tokenizer: by default that of the folder or name that the model was loaded from. train, eval:
    rows that replace ``data.train`` and ``data.eval``: a list of dictionaries in any row format, a
    list of ``Example`` objects, a pandas DataFrame, a ``datasets.Dataset``, one or more paths of
    files, or a section with ``path`` as in a recipe, such as ``{"path": FILE, "keys": {...}}``.
    Another mapping is the section ``train`` or ``eval`` of a recipe. eval may also be the share of
    the training rows to hold out, such as 0.1.
    optimizer: an object, or a function that takes the list of trained weights. scheduler: an
    object, or a function that takes the optimizer. callbacks: objects of ``valence.Callback`` or
    ``transformers.TrainerCallback``, or functions that take the run and a record of the log.

    Each call writes to a new folder (``runs/kto``, ``runs/kto-2``, ...), unless ``run.dir`` is set,
    also in a recipe. If that folder already contains a run, it resumes from its last checkpoint; a
    finished run is only loaded.
    fresh: rename that folder and start over. allow: settings, or sections such as ``loss``, that
    may differ from those of the resumed run. Batch size, epochs and training rows may not differ.

    Under torchrun or `accelerate launch` the processes train together: each of them calls this with
    the same arguments. group: the processes; by default those of the environment. Only the sinks of
    rank 0 are used; callbacks are called on all ranks.

    Raises UserError for a mistake in the recipe or the data, if possible before weights are loaded.
    Raises Interrupted (a KeyboardInterrupt) after a signal or run.max_time, once the state has been
    saved.
    """
    loaded = model if isinstance(model, nn.Module) else None
    rows = {
        name: None if isinstance(value, Mapping) else value
        for name, value in (("train", train), ("eval", eval))
    }
    sections: dict[str, Any] = {
        name: value
        for name, value in (("model", model), ("train", train), ("eval", eval))
        if isinstance(value, Mapping)
    }
    arguments: list[Argument] = [("method", "method", method)]
    arguments += [(name, name, value) for name, value in settings.items()]
    arguments += [
        (name, f"data.{name}" if name != "model" and "path" in section else name, section)
        for name, section in sections.items()
    ]
    if isinstance(model, str | Path):
        arguments.append(("model", "model.name", str(model)))
    objects: list[Argument] = [
        ("model", "model.name", loaded),
        ("tokenizer", "model.tokenizer", tokenizer),
        ("reference", "reference.model", reference),
        ("optimizer", "train.optimizer", optimizer),
        ("scheduler", "train.schedule", scheduler),
        *((name, f"data.{name}", value) for name, value in rows.items()),
    ]
    refuse_duplicates([*arguments, *objects], overrides)
    if loaded is not None and not names_a_model(recipe):
        arguments.append(("model", "model.name", name_of_model(loaded, tokenizer is not None)))
    recipe, overrides = recipe_from_arguments(
        recipe, overrides, {setting: v for _, setting, v in arguments if v is not None}
    )
    group = group or start()
    console = console or terminal_of(group)
    if quiet:
        console = only_warnings(console)
    stop = Stop(console)
    with stop.listening(), _same_mode(loaded):
        run = build_run(
            recipe,
            overrides,
            model=loaded,
            tokenizer=tokenizer,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
            rows=rows,
            sinks=sinks,
            callbacks=[Callbacks(callbacks)],  # raises before a model is loaded
            fresh=fresh,
            allow=allow,
            console=console,
            command=command,
            stop=stop,
            group=group,
            new_folder=True,
        )
        run = run if run.finished else run_to_end(run)
    for line in outputs(run.directory):
        print_message(console, line)
    return run


@contextmanager
def _same_mode(model: nn.Module | None) -> Iterator[None]:
    """Put a model back in training or evaluation mode after the block, as it was before."""
    if model is None:
        yield
        return
    was_training = model.training
    try:
        yield
    finally:
        model.train(was_training)


def name_of_model(model: nn.Module, has_tokenizer: bool) -> str:
    """The name of a loaded model in a recipe: where it was loaded from.

    Raises UserError if that is unknown and the tokenizer has to be loaded from there.
    """
    name = str(getattr(model, "name_or_path", "") or "")
    if not name and not has_tokenizer:
        fix = "pass tokenizer=..., or load the model with from_pretrained"
        raise UserError(
            "the tokenizer of the model is unknown, because the model has no name_or_path",
            code="tokenizer-unknown",
            where="model",
            fix=fix,
        )
    return name or type(model).__name__


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of one answer.

    ``tokens``: ids of the tokens that the loss would read. ``logps``: their log-probabilities
    (nats). ``total``: the sum of ``logps``. ``id``: id of the example.
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
    """Compute the log-probabilities of the answers of rows under a causal language model.

    Returns one item per answer, in the order of the rows. A pair has two answers, chosen and
    rejected.

    rows: in any data format of this kind. tokenizer: by default the one in the folder that the
    model was loaded from. max_length, as_chat, chat_template_kwargs: as in the data section of a
    recipe. micro_batch_tokens: tokens per forward pass. Raises UserError if a row cannot be used.
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
    results: dict[tuple[int, int], LogProbs] = {}
    with evaluating(model):
        engine = PolicyModel(model)
        try:
            check_layout(engine)
            for batch in make_micro_batches(units, micro_batch_tokens, engine.device):
                logp = engine(batch).logp
                for s, (unit, side) in enumerate(
                    zip(batch.unit.tolist(), batch.side.tolist(), strict=True)
                ):
                    mask = batch.loss_mask & (batch.sequence_ids == s)
                    results[unit, side] = LogProbs(
                        batch.ids[s], tuple(batch.tokens[mask].tolist()), tuple(logp[mask].tolist())
                    )
        finally:
            engine.causal.set_attn_implementation(before)
    return [results[key] for key in sorted(results)]


__all__ = [
    "Callback",
    "LogProbs",
    "Run",
    "Trainer",
    "build_run",
    "logprobs",
    "make_micro_batches",
    "train",
]
