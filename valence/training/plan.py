"""What a run will take, before it runs: steps, tokens, memory, time; and how many tokens it may run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from valence.data.forest import plant
from valence.data.mismatch import mismatch_groups
from valence.data.pack import strands
from valence.data.sampler import Sampler
from valence.data.targets import ONE
from valence.engine import speed
from valence.engine.checkpointing import recompute_layers
from valence.engine.memory import Memory, free_memory, predict
from valence.engine.models import DTYPES
from valence.engine.shape import Shape, shape_of, skeleton, skeleton_of
from valence.engine.speed import Work
from valence.report.console import duration
from valence.training.build import best_device, check_vocabulary, pays_to_compile
from valence.training.methods import Method
from valence.training.setup import Prepared
from valence.types import Encoded, plural

LEAST = 512  # tokens that run at once, where `auto` finds little memory
MOST = {"cpu": 4096, "mps": 8192, "cuda": 32768}  # beyond them, a step is not faster
MARGIN = 0.8  # share of the free memory that `auto` may plan to take
LOOKED_AT = 4  # steps whose work is counted


@dataclass(frozen=True)
class Plan:
    """What was found out about a run before it starts. ``free``: bytes on the device, where something tells."""

    prepared: Prepared
    shape: Shape
    memory: Memory
    device: torch.device
    free: int | None

    @cached_property
    def micro_batch_tokens(self) -> int:
        """The recipe's, or with `auto` the largest power of two that fits (a power of two, so that it is the same next time)."""
        asked = self.prepared.recipe.train.micro_batch_tokens
        if asked != "auto":
            return asked
        tokens = MOST[self.device.type]
        while self.free is not None and tokens > LEAST and self.memory.total(tokens) > MARGIN * self.free:
            tokens //= 2
        return tokens

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch that may come."""
        trained_on = [corpus.units for name, corpus in self.prepared.corpora.items() if name.endswith("train")]
        lengths = sorted(_rows(unit) for units in trained_on for unit in units)
        step = sum(lengths[-self.prepared.recipe.train.batch_size :])
        return max(lengths[-1], min(self.micro_batch_tokens, step))

    @cached_property
    def work(self) -> list[list[tuple[Method, Work, Work]]]:
        """Of some of the run's steps: for each method what trains, and what is only measured."""
        prepared = self.prepared
        parts = [(prepared.method, prepared.sampler), *((part.method, part.sampler) for part in prepared.mixed)]
        numbers = range(0, prepared.total_steps, -(-prepared.total_steps // LOOKED_AT))
        return [[self._work_of(method, sampler, number) for method, sampler in parts] for number in numbers]

    def _work_of(self, method: Method, sampler: Sampler, number: int) -> tuple[Method, Work, Work]:
        units = [sampler.units[i] for i in sampler.step(number)[0]]
        trained, both = _work(units), list(units)
        if method.mismatches:
            both += mismatch_groups(units, len(units), "next", max_length=self.prepared.recipe.data.max_length)
        return method, trained, _work(both) - trained

    def seconds(self, *, again: bool = False) -> float:
        """About how long a step takes, by its operations and the rate at which this machine multiplies matrices. again: in an
        epoch after the first, where the cache knows what the reference said of the answers."""
        recipe = self.prepared.recipe
        known = again and recipe.reference.cache != "off" and recipe.reference.sync_every is None
        operations = [
            speed.step(
                self.shape,
                trained,
                measured,
                *((measured,) if known else (trained, measured) if method.needs_reference else ()),
                checkpointing=recipe.train.checkpointing,
            )
            for step in self.work
            for method, trained, measured in step
        ]
        dtype = DTYPES[recipe.model.dtype]
        rate = speed.EFFICIENCY[dtype] * speed.matmul_rate(self.device, dtype, self.shape.hidden, self.shape.inner)
        return sum(operations) / len(self.work) / rate

    @property
    def total_seconds(self) -> float:
        """About how long all steps take."""
        steps = self.prepared.total_steps
        first = min(steps, self.prepared.sampler.steps_per_epoch)
        return first * self.seconds() + (steps - first) * self.seconds(again=True)


def make_plan(prepared: Prepared, model: nn.Module | None = None) -> Plan:
    """Looks at the model (that of the recipe, unless another is given) and at the device, and loads nothing.

    Raises UserError when there is no such model, the tokenizer or the adapter does not fit it, or its layers cannot be recomputed
    as the recipe asks.
    """
    recipe, spec, device = prepared.recipe, prepared.recipe.model, best_device()
    with prepared.source.placing():
        if model is None:
            scores = len(spec.attributes or ONE) if prepared.method.of_scores else None
            model = skeleton(spec.name, trust_remote_code=spec.trust_remote_code, gguf_file=spec.gguf_file, scores=scores)
        else:
            model = skeleton_of(model)
        check_vocabulary(model, prepared.tokenizer)
        recompute_layers(model, recipe.train.checkpointing, device)
        shape = shape_of(model, lora=spec.lora, adapter=spec.adapter)
        compiled = pays_to_compile(prepared, shape.parameters, device)
    memory = predict(
        shape,
        width=DTYPES[spec.dtype].itemsize,
        frozen_copy=prepared.needs_reference and (spec.lora is None or recipe.reference.model is not None),
        checkpointing=recipe.train.checkpointing,
        compiled=compiled,
        optimizer=recipe.train.optimizer,
        device=device,
    )
    return Plan(prepared, shape, memory, device, free_memory(device))


def describe(plan: Plan) -> list[str]:
    """Lines to print: optimizer steps, tokens per epoch, trained weights, and what memory and time they are predicted to take."""
    prepared, shape, memory = plan.prepared, plan.shape, plan.memory
    method, asked = prepared.method, prepared.recipe.train.micro_batch_tokens
    units = prepared.corpora["train"].units
    longest = max(map(_rows, units))
    mismatched = " and as many mismatched ones, measured only," if method.mismatches else ""
    trained = "all of which train" if shape.full else f"of which {shape.trained:,} train"
    total = memory.total(plan.largest)
    parts = {
        "program": memory.program,
        "weights": memory.weights,
        "reference": memory.reference,
        "gradient and optimizer": memory.gradient + memory.optimizer,
        "activations and head": plan.largest * memory.per_token + memory.head,
    }
    lines = [
        f"steps: {prepared.total_steps} ({prepared.sampler.steps_per_epoch} per epoch of {len(units)} {plural(method.kind)})",
        f"tokens: {sum(unit.tokens for unit in units):,}{mismatched} per epoch; {plan.micro_batch_tokens:,} at once"
        + (" (auto)" if asked == "auto" else ""),
        f"weights: {shape.parameters:,}, {trained}",
        f"memory: about {_gigabytes(total)} ({', '.join(f'{name} {_gigabytes(size)}' for name, size in parts.items())})",
        f"time: about {duration(plan.seconds())} a step at first, {duration(plan.total_seconds)} in all without evaluation",
    ]
    if prepared.source.settings.get("loss.desirable_weight", prepared.source.settings["method"]).origin.endswith("auto"):
        up, down = (prepared.recipe.loss[f"{name}_weight"] for name in ("desirable", "undesirable"))
        lines.append(f"class weights: auto sets desirable_weight to {up:.4g} and undesirable_weight to {down:.4g}")
    for part in prepared.mixed:
        rows = f"{len(part.sampler.units)} {plural(part.method.kind)}, {part.sampler.batch_size} a step, weight {part.weight:g}"
        lines.append(f"mix: {part.method.name} on {rows}")
    if plan.free is not None and total > plan.free:
        lines.append(f"that is more memory than is free: {_gigabytes(plan.free)}")
    if longest > plan.micro_batch_tokens:
        lines.append(f"the largest row has {longest} tokens, more than train.micro_batch_tokens: such rows run alone")
    if prepared.ends_early:
        lines.append(prepared.ends_early)
    return lines


def _rows(unit: Encoded) -> int:
    """Tokens that run for a unit, whose answers share their prompt."""
    return len(unit.prompt_ids) + sum(len(answer.ids) for answer in unit.answers)


def _work(units: Sequence[Encoded]) -> Work:
    """Of one pass over these units, were they all in one micro-batch."""
    forest = plant([strand for unit in units for strand in strands(unit)])
    return Work(tokens=len(forest.tokens), scored=float(forest.mask.sum()), pairs=float((forest.pos + 1).sum()))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
