"""The Python interface: ``train`` for a whole run, ``logprobs`` for the numbers everything rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from valence.config.load import load_recipe
from valence.data.audit_text import render
from valence.data.encode import Encoder
from valence.data.load import InMemory, Rows, load
from valence.data.pack import collate, pack
from valence.engine.logprobs import Engine
from valence.engine.models import load_tokenizer, without_dropout
from valence.errors import UserError
from valence.report.sinks import Sink
from valence.training.build import build_models
from valence.training.finish import run_to_end
from valence.training.folder import RunFolder, refuse_own_inputs
from valence.training.loop import Callback, OptimizerLike, Run, SchedulerLike, begin
from valence.training.methods import method_of
from valence.training.plan import describe, make_plan
from valence.training.setup import Prepared, class_weight_warning, prepare
from valence.training.signals import Stop
from valence.types import Kind


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    scheduler: SchedulerLike | None = None,
    train: Rows | None = None,
    eval: Rows | None = None,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callback] = (),
    fresh: bool = False,
    quiet: bool = False,
    console: Console | None = None,
    command: str = "valence.train(...)",
) -> Run:
    """Runs a recipe (a YAML file or a mapping) to its end. Objects given replace what the recipe checked.

    train, eval: rows as dictionaries in any format that files may have, or Examples. optimizer: an object, or a function
    of the list of trained weights; scheduler: an object, or a function of the optimizer. callbacks are called with the
    run and each logged record. fresh: move an earlier run of the same folder aside.

    Raises UserError for a mistake in the recipe or the data, before any weight is loaded where that can be known.
    """
    console = console or Console()
    stop = Stop(console)
    with stop.listening():
        run = build_run(
            recipe, overrides, model=model, tokenizer=tokenizer, reference=reference, optimizer=optimizer, scheduler=scheduler,
            given={"train": train, "eval": eval}, sinks=sinks, callbacks=callbacks, fresh=fresh, quiet=quiet, console=console,
            command=command, stop=stop,
        )  # fmt: skip
        return run_to_end(run)


def build_run(
    recipe: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Rows | None] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    model: nn.Module | None = None,
    reference: nn.Module | None = None,
    console: Console | None = None,
    quiet: bool = False,
    fresh: bool = False,
    command: str = "valence.train(...)",
    **parts: Any,
) -> Run:
    """A ``Run`` that is ready to ``fit``: rows read and audited (shown on the console), models loaded, folder claimed."""
    console = console or Console()
    in_memory = [name for name, rows in (given or {}).items() if rows is not None]
    source = load_recipe(recipe, overrides, method_of=method_of, in_memory=in_memory)
    checked = source.recipe
    refuse_own_inputs(Path(checked.run.dir), {
        "model.name": checked.model.name, "model.adapter": checked.model.adapter, "model.tokenizer": checked.model.tokenizer,
        "reference.model": checked.reference.model, "reference.cache": checked.reference.cache,
    })  # fmt: skip
    folder = RunFolder(Path(checked.run.dir), fresh=fresh)
    prepared = prepare(source, tokenizer=tokenizer, given=given)
    if not quiet:
        show_audit(prepared, console)
    plan = make_plan(prepared, model)
    if not quiet:
        for line in describe(plan):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    folder.claim()
    begin(folder, prepared, command)
    folder.state(micro_batch_tokens=plan.micro_batch_tokens)
    if not quiet and model is None:
        console.print(f"loading and checking {checked.model.name}", markup=False, highlight=False, soft_wrap=True)
    policy, frozen = build_models(prepared, model=model, reference=reference, fills=True)
    return Run(
        prepared, policy, frozen, folder=folder, console=console, quiet=quiet, micro_batch_tokens=plan.micro_batch_tokens, **parts
    )


def show_audit(prepared: Prepared, console: Console) -> None:
    """What is in the data, on screen."""
    for name, corpus in prepared.corpora.items():
        console.rule(name if name.startswith("mix") else f"data.{name}", align="left")
        console.print(render(corpus.audit, training=name == "train"), markup=False, highlight=False, soft_wrap=True)
    if warning := class_weight_warning(prepared):
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of one answer: ``tokens`` and ``logps`` (nats) of its trained tokens, and their ``total``."""

    id: str
    tokens: tuple[int, ...]
    logps: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logps)


@torch.no_grad()
def logprobs(
    model: nn.Module,
    rows: Rows,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: Kind = "demonstration",
    max_length: int = 1024,
    micro_batch_tokens: int = 4096,
) -> list[LogProbs]:
    """Log-probabilities that a causal model gives to the answers of rows (any format; pairs have two answers each), in order.

    tokenizer: by default the one in the folder that the model was loaded from. Raises UserError when a row cannot be used.
    """
    tokenizer = tokenizer or load_tokenizer(str(model.name_or_path))
    encoder = Encoder(tokenizer, max_length=max_length)
    loaded = load([InMemory(rows)], kind)
    encoded = encoder.encode_all(loaded.examples, loaded.sources)
    if encoded.unusable:
        raise UserError(encoded.unusable[0].reason, where=str(encoded.unusable[0].origin), fix=encoded.unusable[0].fix)
    units = encoded.units
    config: Any = model.config
    before = config._attn_implementation
    engine = Engine(without_dropout(model))
    engine.check_layout()
    found: dict[tuple[int, int], LogProbs] = {}
    with_mode = model.training
    model.eval()
    try:
        for dealt in pack(units, micro_batch_tokens):
            batch = collate([units[i] for i in dealt], dealt, device=engine.device)
            logp = engine(batch).logp
            for s, (unit, side) in enumerate(zip(batch.unit.tolist(), batch.side.tolist(), strict=True)):
                ours = batch.mask & (batch.seq == s)
                found[unit, side] = LogProbs(batch.ids[s], tuple(batch.tokens[ours].tolist()), tuple(logp[ours].tolist()))
    finally:
        model.train(with_mode)
        engine.causal.set_attn_implementation(before)  # type: ignore[operator]
    return [found[key] for key in sorted(found)]


__all__ = ["LogProbs", "Run", "build_run", "logprobs", "show_audit", "train"]
