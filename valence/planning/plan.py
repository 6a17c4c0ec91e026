"""What a run will take, before it runs: steps, tokens, memory, time; and how many tokens it may run
at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from valence.batching.kl_pairs import make_kl_pairs_in_groups
from valence.batching.micro_batches import StepPacker
from valence.data.sampler import Sampler
from valence.data.tokenized_dataset import TokenizedDataset
from valence.distributed.launch import usable_cores
from valence.distributed.protocol import Group
from valence.distributed.single import Single
from valence.distributed.tensor import check_shares
from valence.errors import UserError
from valence.models import speed
from valence.models.build import DTYPES, best_device, check_vocabulary
from valence.models.checkpointing import recompute_layers
from valence.models.compiling import why_not
from valence.models.memory import Memory, Split, free_memory
from valence.models.policy_model import PolicyModel
from valence.models.shape import Shape, shape_of
from valence.models.speed import Work
from valence.planning.memory import (
    LEAST,
    MARGIN,
    check_offload,
    choose_split,
    fits_whole,
    layers_of,
    least_free,
    memory_of,
    sampled_in,
)
from valence.reports.console import duration
from valence.trainer.methods import Method, read_of_tokens
from valence.trainer.prepare import Prepared
from valence.types import TokenizedExample, plural

WORTH_COMPILING = {"cpu": 2e14, "cuda": 1e17}
"""Operations of a run, about five minutes of them, from which on compiled layers save more time
than they take to compile.
"""
MOST = {"cpu": 4096, "mps": 8192, "cuda": 32768}  # beyond them, a step is not faster
LOOKED_AT = 4  # steps whose work is counted
ROWS_LOOKED_AT = 512  # rows of an evaluation whose work is counted


@dataclass(frozen=True)
class Plan:
    """What was found out about a run before it starts.

    ``free``: bytes that each process has on its device, where something tells; ``processes``: all
    of them; ``split``: how they share the weights.
    """

    prepared: Prepared
    shape: Shape
    memory: Memory
    device: torch.device
    free: int | None
    processes: int
    split: Split

    @property
    def dealt(self) -> int:
        """Processes that a step's rows are dealt to."""
        return self.processes // self.split.tensor

    @cached_property
    def micro_batch_tokens(self) -> int:
        """The recipe's, or with `auto` the largest power of two that fits (a power of two, so that
        it is the same next time).
        """
        asked = self.prepared.recipe.train.micro_batch_tokens
        if asked != "auto":
            return asked
        tokens = MOST[self.device.type]
        while (
            self.free is not None
            and tokens > LEAST
            and self.memory.total(tokens) > MARGIN * self.free
        ):
            tokens //= 2
        return tokens

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch that may come to a process."""
        return max(
            map(
                self._largest,
                (self.prepared.planned, *(part.sampler for part in self.prepared.mixed)),
            )
        )

    def _largest(self, sampler: Sampler) -> int:
        order = np.argsort(_num_rows(sampler.units), kind="stable")[-sampler.batch_size :]
        longest = [sampler.units[i] for i in order.tolist()]
        # what they begin with in common, as answers to one prompt do, runs once
        step = int(_work(longest).tokens)
        return max(_rows(longest[-1]), min(self.micro_batch_tokens, -(-step // self.dealt)))

    @cached_property
    def work(self) -> list[list[tuple[Method, Work, Work]]]:
        """Of some of the run's steps: for each method what trains, and what is only measured."""
        prepared = self.prepared
        parts = [
            (prepared.method, prepared.planned),
            *((part.method, part.sampler) for part in prepared.mixed),
        ]
        numbers = range(0, prepared.total_steps, -(-prepared.total_steps // LOOKED_AT))
        return [
            [self._work_of(method, sampler, number) for method, sampler in parts]
            for number in numbers
        ]

    def _work_of(self, method: Method, sampler: Sampler, number: int) -> tuple[Method, Work, Work]:
        return method, *self._work_of_units(
            method, [sampler.units[i] for i in sampler.step(number)[0]]
        )

    def _work_of_units(
        self, method: Method, units: Sequence[TokenizedExample]
    ) -> tuple[Work, Work]:
        """Of the units themselves, and of the mismatched sequences that go with them."""
        own, both = _work(units), list(units)
        if method.needs_kl_pairs:
            both += make_kl_pairs_in_groups(
                units, len(units), "next", max_length=self.prepared.recipe.data.max_length
            )
        return own, _work(both) - own

    def seconds(self, *, again: bool = False) -> float:
        """About how long a step takes, by its operations and the rate at which this machine
        multiplies matrices. again: in an epoch after the first, where the cache knows what the
        reference said of the answers.
        """
        recipe = self.prepared.recipe
        known = again and self._keeps_reference
        operations = [
            speed.step(
                self.shape,
                trained,
                measured,
                *((measured,) if known else (trained, measured) if method.asks_reference else ()),
                checkpointing=recipe.train.checkpointing,
            )
            + (self._operations_of_answers(trained) if method.online else 0)
            for step in self.work
            for method, trained, measured in step
        ]
        return sum(operations) / len(self.work) / self._rate / self.processes

    @property
    def _rate(self) -> float:
        """Operations per second of a process."""
        dtype = DTYPES[self.prepared.recipe.model.dtype]
        return speed.EFFICIENCY[dtype] * speed.matmul_rate(
            self.device, dtype, self.shape.hidden, self.shape.inner
        )

    @property
    def _keeps_reference(self) -> bool:
        """Whether the reference's log-probabilities of a row are computed once in the run."""
        recipe = self.prepared.recipe
        return (
            recipe.reference.cache != "off"
            and recipe.reference.sync_every is None
            and not recipe.reward
        )

    @property
    def evaluations(self) -> int:
        """How often data.eval is measured."""
        prepared, recipe = self.prepared, self.prepared.recipe.eval
        if "eval" not in prepared.corpora:
            return 0
        every, steps = prepared.evaluation_interval, prepared.total_steps
        return -(-steps // every) + recipe.at_start

    @property
    def evaluation_seconds(self) -> float:
        """About how long it takes to measure held-out rows, test rows, and training rows
        afterwards.

        0 where the model's own answers are measured: they would have to be sampled first.
        """
        prepared, recipe = self.prepared, self.prepared.recipe
        if prepared.method.online:
            return 0.0
        operations = 0.0
        if times := self.evaluations:
            held_out = prepared.corpora["eval"].units[: recipe.eval.max_examples]
            operations += self._operations_of_measuring(held_out)
            operations += (times - 1) * self._operations_of_measuring(
                held_out, is_known=self._keeps_reference
            )
        if "test" in prepared.corpora:
            operations += self._operations_of_measuring(prepared.corpora["test"].units)
        if most := recipe.eval.train_examples:
            operations += self._operations_of_measuring(prepared.corpora["train"].units[:most])
        return operations / self._rate / self.processes

    def _operations_of_measuring(
        self, units: Sequence[TokenizedExample], *, is_known: bool = False
    ) -> float:
        """Of measuring rows once. is_known: the reference's log-probabilities of them are
        stored.
        """
        looked_at, method = units[:ROWS_LOOKED_AT], self.prepared.method
        own, mismatched = self._work_of_units(method, looked_at)
        passes = 2 if method.asks_reference and not is_known else 1
        each = speed.forward(self.shape, own) + speed.forward(self.shape, mismatched)
        return passes * each * len(units) / len(looked_at)

    def _operations_of_answers(self, trained: Work) -> float:
        """What own answers add to a step: each is measured once in its round, and a value model
        trains beside the policy.
        """
        prepared, recipe = self.prepared, self.prepared.recipe
        measured = len(read_of_tokens(recipe, reference=prepared.needs_reference)) * speed.forward(
            self.shape, trained
        )
        headless = replace(self.shape, vocabulary=0)
        values = (
            speed.step(headless, trained, checkpointing=recipe.train.checkpointing)
            if prepared.values_apart
            else 0
        )
        return measured / recipe.rollout.num_epochs + values

    @property
    def round_seconds(self) -> float | None:
        """About how long it takes to sample the answers of a round, were all as long as they may
        be; None where a server does.
        """
        if self.prepared.rollouts is None:
            return None
        rows, prompt, new = self.prepared.rollouts
        recipe = self.prepared.recipe
        turns = -(-recipe.train.batch_size * recipe.rollout.num_rollouts // (rows * self.dealt))
        return turns * speed.sampling(
            self.shape, rows, prompt, new, self.device, sampled_in(recipe, self.device)
        )

    @property
    def total_seconds(self) -> float:
        """About how long all steps take."""
        steps = self.prepared.total_steps
        first = min(steps, self.prepared.steps_per_epoch)
        return first * self.seconds() + (steps - first) * self.seconds(again=True)


def make_plan(
    prepared: Prepared,
    model: nn.Module | None = None,
    group: Group | None = None,
    *,
    sharded: bool | None = None,
) -> Plan:
    """Looks at the model (that of the recipe, unless another is given) and at the device, and loads
    nothing. group: all processes, which call it together and find the same. sharded: whether
    weights are split over them, where it was chosen before.

    Raises UserError when there is no such model, the tokenizer or the adapter does not fit it, its
    layers cannot be recomputed as the recipe asks, or weights not be split.
    """
    group = group or Single()
    recipe, spec, device = prepared.recipe, prepared.recipe.model, best_device()
    with prepared.source.placing():
        check_offload(recipe, device)
        bare = layers_of(prepared, model)
        check_vocabulary(bare, prepared.tokenizer)
        recompute_layers(bare, recipe.train.checkpointing, device)
        check_shares(bare, recipe.parallel.tensor)
        shape = shape_of(
            bare, lora=spec.lora, adapter=spec.adapter, quantize=spec.quantize is not None
        )
        free = least_free(free_memory(device), device, group)
        split = choose_split(
            recipe,
            group.size,
            device,
            before=sharded,
            fits=lambda: fits_whole(prepared, shape, device, free),
        )
        compiled = (
            pays_to_compile(prepared, shape.parameters, device, group.size)
            if split.single
            else False
        )
        memory = memory_of(prepared, shape, device, split, compiled=compiled)
    return Plan(prepared, shape, memory, device, free, group.size, split)


def pays_to_compile(prepared: Prepared, weights: int, device: torch.device, processes: int) -> bool:
    """Whether the recipe asks for compiled layers, or leaves it open and the run is long.

    Counted, not measured: the values in a reference cache are those of one way to compute them.
    Raises UserError when they are asked for and cannot be had.
    """
    asked, why = prepared.recipe.train.compile, why_not(device)
    if asked == "on" and why:
        raise UserError(
            why,
            code="compile-unavailable",
            where="train.compile",
            fix="install what is missing, or set it to auto or off",
        )
    not_compiled = prepared.recipe.model.quantize or prepared.recipe.train.router_aux_loss
    if asked != "auto" or why or "train" not in prepared.corpora or not_compiled:
        return asked == "on"
    epochs = prepared.total_steps / prepared.steps_per_epoch
    tokens = epochs * int(prepared.corpora["train"].units.num_sequence_tokens.sum())
    return 6 * weights * tokens / processes >= WORTH_COMPILING[device.type]


def planned_tokens(prepared: Prepared, policy: PolicyModel, world: Group) -> int:
    """Tokens of a micro-batch that the plan chooses for a loaded policy. All processes call it."""
    plan = make_plan(prepared, policy.causal, world, sharded=policy.is_sharded)
    return plan.micro_batch_tokens


def crowding(processes: int) -> str:
    """What to warn of when so many processes of this host share its cores; empty where each has
    one, or a GPU of its own.

    Under a launcher ``LOCAL_WORLD_SIZE`` says how many are on this host.
    """
    local, cores = int(os.environ.get("LOCAL_WORLD_SIZE", processes)), usable_cores()
    if local <= cores or torch.cuda.device_count() >= local:
        return ""
    shared = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"{local} processes share the {shared} of this machine and slow each other down: use "
        f"at most --nproc {cores}"
    )


def describe(plan: Plan, *, in_detail: bool = False) -> list[str]:
    """Lines to print: optimizer steps, tokens per epoch, trained weights, and what memory and time
    they are predicted to take.

    in_detail: also name what is computed without gradient.
    """
    prepared, shape, memory = plan.prepared, plan.shape, plan.memory
    method, asked = prepared.method, prepared.recipe.train.micro_batch_tokens
    units = prepared.planned.units
    longest = int(_num_rows(units).max())
    mismatched = (
        ", and as many in KL pairs without gradient" if in_detail and method.needs_kl_pairs else ""
    )
    trained = ", all trained" if shape.full else f" frozen + {shape.trained:,} trained"
    narrow = f", {shape.quantized:,} in 4 bits" if shape.quantized else ""
    total, each = memory.total(plan.largest), " each" if plan.processes > 1 else ""
    parts = {
        "program": memory.program,
        "weights": memory.weights,
        "reference": memory.reference,
        "gradient and optimizer": memory.gradient + memory.optimizer,
        "activations and head": plan.largest * memory.per_token + memory.head,
    }
    more = {
        "gathered weights": memory.gathered,
        "value model": memory.value,
        "reward models": memory.judges,
        "or, while sampling, answers": memory.sampling,
    }
    parts |= {name: size for name, size in more.items() if size}
    rows = len(prepared.corpora["train"].units)
    lines = [
        f"steps: {prepared.total_steps} ({prepared.steps_per_epoch} per epoch of {rows} "
        f"{plural(method.kind)})",
        f"tokens: {sum(unit.tokens for unit in units):,} per epoch{mismatched}; micro-batches of "
        f"{plan.micro_batch_tokens:,}" + (" (auto)" if asked == "auto" else ""),
        f"weights: {shape.parameters:,}{trained}{narrow}",
        *_shared(plan),
        f"memory: about {_gigabytes(total)}{each} "
        f"({', '.join(f'{name} {_gigabytes(size)}' for name, size in parts.items())})",
        *_times(plan),
    ]
    if prepared.source.settings.get(
        "loss.desirable_weight", prepared.source.settings["method"]
    ).origin.endswith("auto"):
        up, down = (prepared.recipe.loss[f"{name}_weight"] for name in ("desirable", "undesirable"))
        lines.append(
            f"class weights: auto sets desirable_weight to {up:.4g} and undesirable_weight to "
            f"{down:.4g}"
        )
    for part in prepared.mixed:
        mixed = (
            f"{len(part.sampler.units)} {plural(part.method.kind)}, "
            f"{part.sampler.batch_size} a step, weight {part.weight:g}"
        )
        lines.append(f"mix: {part.method.name} on {mixed}")
    if plan.free is not None and total > plan.free:
        lines.append(
            f"only {_gigabytes(plan.free)} of memory are free: use model.lora, "
            f"train.checkpointing: full, or a smaller model"
        )
    if longest > plan.micro_batch_tokens:
        lines.append(
            f"the largest row has {longest} tokens, more than train.micro_batch_tokens: such "
            f"rows form micro-batches of their own"
        )
    if prepared.ends_early:
        lines.append(prepared.ends_early)
    if said := speed.slow(plan.device, DTYPES[prepared.recipe.model.dtype]):
        lines.append(said)
    return lines


def _times(plan: Plan) -> list[str]:
    """What to say of the time that a run takes."""
    prepared, rollout = plan.prepared, plan.prepared.recipe.rollout
    steps, measuring = plan.total_seconds, plan.evaluation_seconds
    count = prepared.total_steps
    parts = f"{count} step{'s' * (count != 1)} of about {duration(plan.seconds())} at first"
    parts += f", {duration(measuring)} for evaluation" if measuring else ""
    more = "sampling, scoring, evaluation, " if prepared.method.online else ""
    said = [
        f"time: about {duration(steps + measuring)} ({parts}), without {more}loading the model "
        f"and writing files"
    ]
    if (each := plan.round_seconds) is not None:
        rounds = -(-prepared.total_steps // rollout.steps_per_round)
        said.append(
            f"sampling: up to about {duration(each)} per round, {duration(rounds * each)} in "
            f"total, "
            f"if every answer has {rollout.max_new_tokens:,} tokens"
        )
    return said


def _shared(plan: Plan) -> list[str]:
    """What to say of how processes share the run."""
    if plan.processes == 1:
        full = plan.prepared.recipe.parallel.shard == "full"
        return ["1 process: parallel.shard: full has nothing to split over"] if full else []
    split = plan.split
    whole = (
        "all weights" if split.tensor == 1 else f"1/{split.tensor} of every layer (parallel.tensor)"
    )
    held = f"1/{split.ways} of {whole}, their gradients and moments" if split.ways > 1 else whole
    auto = " (parallel.shard: auto)" if plan.prepared.recipe.parallel.shard == "auto" else ""
    return [f"{plan.processes} processes: each holds {held}{auto}"]


def _num_rows(units: Sequence[TokenizedExample]) -> NDArray[np.int64]:
    """Distinct tokens of each of these examples."""
    if isinstance(units, TokenizedDataset):
        return units.num_unique_tokens
    return np.fromiter(map(_rows, units), np.int64, len(units))


def _rows(unit: TokenizedExample) -> int:
    """Tokens that run for a unit, whose answers share their prompt."""
    return len(unit.prompt_ids) + sum(len(answer.ids) for answer in unit.answers)


def _work(units: Sequence[TokenizedExample]) -> Work:
    """Of one pass over these units, were they all in one micro-batch."""
    tree = StepPacker(units).tree
    return Work(
        tokens=len(tree.tokens),
        scored=float(tree.loss_mask.sum()),
        pairs=float((tree.position_ids + 1).sum()),
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
