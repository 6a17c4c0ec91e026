"""Estimate a run before it starts: steps, tokens, memory and the size of micro-batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from valence.batching.micro_batches import StepPacker
from valence.config.schema import SELF
from valence.data.sampler import Sampler
from valence.data.tokenized_dataset import TokenizedDataset
from valence.distributed.launcher import usable_cores
from valence.distributed.process_group import Group, SingleProcess
from valence.distributed.tensor_parallel import check_tensor_parallel
from valence.errors import UserError
from valence.models.build import DTYPES, best_device, check_vocabulary
from valence.models.checkpointing import Checkpointing, recompute_layers
from valence.models.compiling import why_not
from valence.models.dtypes import slow_dtype
from valence.models.memory import Memory, Split, free_memory
from valence.models.policy_model import PolicyModel
from valence.models.shape import Shape
from valence.rollouts.servers import Placement
from valence.training.memory import (
    MARGIN,
    MIN_TOKENS,
    SLEEPING_SERVER,
    can_compile,
    check_offload,
    choose_checkpointing,
    choose_split,
    fits_on_one_device,
    memory_of,
    min_free_memory,
    num_shards,
    plan_server,
    server_share,
    shape_of_run,
    skeleton_of_recipe,
)
from valence.training.optim import optimizer_class
from valence.training.prepare import Prepared
from valence.types import TokenizedExample, plural

MIN_OPERATIONS_TO_COMPILE = {"cpu": 2e14, "cuda": 1e17}
"""Operations of a run, about five minutes, above which compiling layers saves time."""
MAX_TOKENS = {"cpu": 4096, "mps": 8192, "cuda": 32768}  # larger micro-batches are not faster
MIN_SERVER = 1.2  # memory of a server, in multiples of its weights


@dataclass(frozen=True)
class Plan:
    """Estimates for a run.

    free: bytes available to each process on its device; None if unknown. processes: their number.
    split: how weights are split over them. server: the GPUs of a sampling server that the run
    starts. server_share: of their memory; None is vLLM's default. checkpointing: the mode that is
    used, also for `auto`.
    """

    prepared: Prepared
    shape: Shape
    memory: Memory
    device: torch.device
    free: int | None
    processes: int
    split: Split
    server: Placement | None = None
    server_share: float | None = None
    checkpointing: Checkpointing = "off"

    @property
    def dealt(self) -> int:
        """Number of processes that train on different rows."""
        return self.processes // self.split.tensor // self.split.context

    @cached_property
    def micro_batch_tokens(self) -> int:
        """Tokens per micro-batch: those of the recipe, or the largest power of two that fits.

        A power of two does not change with small differences of free memory.
        """
        requested = self.prepared.recipe.train.micro_batch_tokens
        if requested != "auto":
            return requested
        tokens = MAX_TOKENS[self.device.type] * self.split.context
        while (
            self.free is not None
            and tokens > MIN_TOKENS
            and self.memory.total(tokens) > MARGIN * self.free
        ):
            tokens //= 2
        return tokens

    @property
    def largest(self) -> int:
        """Upper bound for the tokens of a micro-batch."""
        return max(
            map(
                self._largest,
                (self.prepared.planned, *(part.sampler for part in self.prepared.mixed)),
            )
        )

    def _largest(self, sampler: Sampler) -> int:
        order = np.argsort(_num_rows(sampler.units), kind="stable")[-sampler.batch_size :]
        longest = [sampler.units[i] for i in order.tolist()]
        # a prefix that sequences share is computed once
        step = len(StepPacker(longest).tree.tokens)
        return max(_rows(longest[-1]), min(self.micro_batch_tokens, -(-step // self.dealt)))


def make_plan(
    prepared: Prepared,
    model: nn.Module | None = None,
    group: Group | None = None,
    *,
    sharded: bool | None = None,
    starts_server: bool = True,
    checkpointing: Checkpointing | None = None,
) -> Plan:
    """Plan a run from its recipe, model and device, without loading weights.

    model: used instead of the model that the recipe names. group: all processes call this together
    and get the same plan. sharded: an earlier decision to split weights over processes.
    checkpointing: the mode of a policy that is already loaded.
    starts_server: whether a run is planned, which may start a sampling server.

    Raises UserError if the model does not exist, the tokenizer or adapter does not fit it, or it
    does not support checkpointing or the split.
    """
    group = group or SingleProcess()
    recipe, device = prepared.recipe, best_device()
    with prepared.source.placing():
        check_offload(recipe, device)
        skeleton = skeleton_of_recipe(prepared) if model is None else model
        if checkpointing is None:
            check_vocabulary(skeleton, prepared.tokenizer)
            check_tensor_parallel(skeleton, recipe.parallel.tensor)
        shape = shape_of_run(prepared, skeleton)
        free = min_free_memory(free_memory(device), device, group)
        split = choose_split(
            recipe,
            group.size,
            device,
            before=sharded,
            fits=lambda: fits_on_one_device(prepared, shape, device, free, group.size),
        )
        compiled = (
            pays_to_compile(prepared, shape.parameters, device, group.size)
            if can_compile(recipe, split)
            else False
        )
        mode = checkpointing or choose_checkpointing(
            prepared, shape, device, split, free, group.size
        )
        if model is None:
            recompute_layers(skeleton, mode, device)
        memory = memory_of(
            prepared,
            shape,
            device,
            split,
            compiled=compiled,
            processes=group.size,
            checkpointing=mode,
        )
    server = plan_server(recipe, device, group.size) if starts_server else None
    share = None
    if server is not None:
        memory = replace(memory, server=SLEEPING_SERVER if server.is_shared else 0)
        share = server_share(recipe, server, memory, device)
    return Plan(prepared, shape, memory, device, free, group.size, split, server, share, mode)


def pays_to_compile(prepared: Prepared, weights: int, device: torch.device, processes: int) -> bool:
    """Whether to compile layers: if the recipe says so, or `auto` and the run is long enough.

    Decided by counting operations, so that reruns decide alike and their reference cache stays
    valid. Raises UserError if compilation is requested and not available.
    """
    requested, reason = prepared.recipe.train.compile, why_not(device)
    if requested == "on" and reason:
        raise UserError(
            reason,
            code="compile-unavailable",
            where="train.compile",
            fix="install g++, or set train.compile: auto"
            if device.type == "cpu"
            else "set train.compile: auto",
        )
    train = prepared.recipe.train
    not_compiled = (
        prepared.recipe.model.quantize
        or train.router_aux_loss
        or train.checkpointing == "selective_op"
    )
    if requested != "auto" or reason or "train" not in prepared.corpora or not_compiled:
        return requested == "on"
    epochs = prepared.total_steps / prepared.steps_per_epoch
    tokens = epochs * int(prepared.corpora["train"].units.num_sequence_tokens.sum())
    return 6 * weights * tokens / processes >= MIN_OPERATIONS_TO_COMPILE[device.type]


def planned_tokens(prepared: Prepared, policy: PolicyModel, world: Group) -> int:
    """Tokens of a micro-batch that the plan chooses for a loaded policy. All processes call it."""
    plan = make_plan(
        prepared,
        policy.causal,
        world,
        sharded=policy.is_sharded,
        checkpointing=policy.checkpointing,
        starts_server=False,
    )
    return plan.micro_batch_tokens


def planned_server_share(prepared: Prepared, policy: PolicyModel, processes: int) -> float | None:
    """The share of a GPU's memory that ``Plan.server_share`` is for a loaded policy.

    A process calls it alone.
    """
    recipe, device = prepared.recipe, policy.device
    server = plan_server(recipe, device, processes)
    if server is None:
        return None
    shape = shape_of_run(prepared, policy.causal)
    ways = num_shards(recipe, processes) if policy.is_sharded else 1
    parallel = recipe.parallel
    split = Split(ways, parallel.tensor, context=parallel.context)
    memory = memory_of(prepared, shape, device, split)
    memory = replace(memory, server=SLEEPING_SERVER if server.is_shared else 0)
    return server_share(recipe, server, memory, device)


def crowding(processes: int) -> str:
    """A warning if there are more processes on this host than cores or GPUs; else empty.

    Launchers set ``LOCAL_WORLD_SIZE`` to the number of processes on this host.
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
    """Lines to print: steps, tokens, weights, and an estimate of memory.

    in_detail: also mention the sequences without gradient.
    """
    prepared, shape, memory = plan.prepared, plan.shape, plan.memory
    method, requested = prepared.method, prepared.recipe.train.micro_batch_tokens
    units = prepared.planned.units
    longest = int(_num_rows(units).max())
    mismatched = (
        ", and as many in KL pairs without gradient" if in_detail and method.needs_kl_pairs else ""
    )
    trained = ", all trained" if shape.full else f" frozen + {shape.trained:,} trained"
    narrow = f", {shape.quantized:,} in 4 bits" if shape.quantized else ""
    total = memory.total(plan.largest)
    per_process = " each" if plan.processes > 1 else ""
    parts = {
        "program": memory.program,
        "weights": memory.weights,
        "reference" if prepared.recipe.teacher.model == SELF else "teacher": memory.reference,
        "gradient and optimizer": memory.gradient + memory.optimizer,
        "activations and head": plan.largest * memory.per_token + memory.head,
    }
    optional = {
        "gathered weights": memory.gathered,
        "communication": memory.communication,
        "copy for a checkpoint": memory.checkpoint,
        "value model": memory.value,
        "reward models": memory.reward_models,
        "completions while sampling, instead of activations": memory.sampling,
        "sleeping server": memory.server,
    }
    parts |= {name: size for name, size in optional.items() if size}
    lines = [
        _describe_steps(prepared),
        f"tokens: {sum(unit.tokens for unit in units):,} per epoch{mismatched}; micro-batches of "
        f"up to {plan.micro_batch_tokens:,} tokens" + (" (auto)" if requested == "auto" else ""),
        f"weights: {shape.parameters:,}{trained}{narrow}",
        *_describe_teacher(prepared),
        *_describe_optimizer(plan),
        *_describe_split(plan),
        *_describe_checkpointing(plan),
        f"memory: about {_gigabytes(total)}{per_process} "
        f"({', '.join(f'{name} {_gigabytes(size)}' for name, size in parts.items())})",
        *_describe_host_memory(plan),
        *_describe_server(plan),
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
            f"{part.sampler.batch_size} per step, weight {part.weight:g}"
        )
        lines.append(f"mix: {part.method.name} on {mixed}")
    if plan.free is not None and total > plan.free:
        lines.append(f"only {_gigabytes(plan.free)} of memory is free: {_less_memory(plan)}")
    if longest > plan.micro_batch_tokens:
        lines.append(
            f"the longest row has {longest:,} tokens, more than train.micro_batch_tokens: each "
            "such row is a micro-batch by itself"
        )
    if warning := slow_dtype(plan.device, DTYPES[prepared.recipe.model.dtype]):
        lines.append(warning)
    return lines


def _describe_teacher(prepared: Prepared) -> list[str]:
    """The teacher that is another model, and whether its tokens are those of the policy."""
    teacher = prepared.recipe.teacher
    if teacher.model == SELF:
        return []
    shared = prepared.shared_vocabulary
    tokens = (
        "its tokens are compared when training starts"
        if shared is None
        else f"its tokens match ({shared:,} are shared)"
    )
    return [f"teacher: {teacher.model}; {tokens}"]


def _describe_steps(prepared: Prepared) -> str:
    steps, per_epoch = prepared.total_steps, prepared.steps_per_epoch
    rows = f"{len(prepared.corpora['train'].units)} {plural(prepared.method.kind)}"
    details = f"{per_epoch} per epoch of {rows}"
    if prepared.recipe.train.max_steps is not None:
        details += f", so {steps / per_epoch:.3g} epochs"
        epochs = prepared.source.settings["train.epochs"]
        if epochs.origin != "default":
            details += f"; train.max_steps overrides train.epochs: {epochs.value:g}"
    return f"steps: {steps} ({details})"


def _less_memory(plan: Plan) -> str:
    """The settings that reduce the memory of a run and are not set yet, as an imperative."""
    recipe = plan.prepared.recipe
    options = ["model.lora"] if plan.shape.full else []
    if plan.checkpointing != "full":
        options.append("train.checkpointing: full")
    requested = recipe.train.micro_batch_tokens
    if requested != "auto":
        options.append(f"train.micro_batch_tokens below {requested}")
    return f"use {', '.join(options)} or a smaller model" if options else "use a smaller model"


def _describe_optimizer(plan: Plan) -> Iterator[str]:
    """Lines about an optimizer that the recipe names by its import path."""
    train, shape = plan.prepared.recipe.train, plan.shape
    kind = optimizer_class(train)
    if kind is None:
        return
    name = kind.path
    others = shape.trained - shape.matrices
    if kind.only_matrices:
        yield (
            f"optimizer: {name} for {shape.matrices:,} weights in matrices of hidden layers"
            + (f", AdamW for the other {others:,} (embedding, head, norms, biases)" * bool(others))
        )
    else:
        yield f"optimizer: {name}"
    yield (
        f"optimizer memory: {kind.state_bytes:.3g} bytes per weight, measured on one small matrix; "
        f"temporary memory inside a step of {name} is unknown and not included"
    )
    if kind.has_modes and train.schedule != "constant":
        yield (
            f"{name} averages weights instead of lowering the learning rate: "
            "set train.schedule: constant"
        )


def _describe_server(plan: Plan) -> Iterator[str]:
    """The GPUs and the memory of a sampling server that the run starts on GPUs."""
    server, recipe = plan.server, plan.prepared.recipe
    if server is None:
        return
    gpus = ", ".join(map(str, server.devices))
    shared = ", shared with training" if server.is_shared else ""
    memory = "vLLM's default fraction of its memory"
    size = 0.0
    if plan.server_share is not None:
        size = plan.server_share * torch.cuda.get_device_properties(plan.device).total_memory
        memory = f"{plan.server_share:.0%} of its memory ({_gigabytes(size)})"
    times = "while it samples (it sleeps during training)" if server.sleeps else "always"
    yield f"server: GPU {gpus}{shared}, {memory} {times}; weights are sent by {server.transport}"
    width = 2 if recipe.model.dtype == "bfloat16" else 4
    weights = plan.shape.parameters * width // len(server.devices)
    if plan.server_share is not None and size < MIN_SERVER * weights:
        yield (
            f"the server needs {_gigabytes(weights)} for its weights, and more for keys and "
            f"values, but can use only {_gigabytes(size)}: use more GPUs (rollout.devices), "
            f"model.lora, or a smaller model"
        )


def _describe_host_memory(plan: Plan) -> list[str]:
    host = plan.memory.host
    per_process = " each" if plan.processes > 1 else ""
    return (
        [f"host memory: {_gigabytes(host)}{per_process} for a copy while a checkpoint is written"]
        if host
        else []
    )


def _describe_checkpointing(plan: Plan) -> list[str]:
    if plan.prepared.recipe.train.checkpointing != "auto":
        return []
    reason = "memory suffices" if plan.checkpointing == "off" else "needs less memory"
    return [f"checkpointing: {plan.checkpointing} (auto: {reason})"]


def _describe_split(plan: Plan) -> list[str]:
    """How the weights are split over processes; empty for a single process."""
    if plan.processes == 1:
        full = plan.prepared.recipe.parallel.shard == "full"
        line = "1 process: parallel.shard: full has no effect; add --nproc N to shard the weights"
        return [line] if full else []
    split = plan.split
    weights = (
        "all weights" if split.tensor == 1 else f"1/{split.tensor} of each layer (parallel.tensor)"
    )
    held = weights
    if split.ways > 1:
        held = f"1/{split.ways} of {weights}, their gradients and optimizer state"
    replicas = plan.processes // (split.ways * split.tensor)
    if split.ways > 1 and replicas > 1:
        held += f", in {replicas} replicas (parallel.shard_size)"
    auto = " (parallel.shard: auto)" if plan.prepared.recipe.parallel.shard == "auto" else ""
    shared = "" if split.context == 1 else f"; {split.context} share each row (parallel.context)"
    return [f"{plan.processes} processes: each holds {held}{auto}{shared}"]


def _num_rows(units: Sequence[TokenizedExample]) -> NDArray[np.int64]:
    """Distinct tokens of each of these examples."""
    if isinstance(units, TokenizedDataset):
        return units.num_unique_tokens
    return np.fromiter(map(_rows, units), np.int64, len(units))


def _rows(unit: TokenizedExample) -> int:
    """Tokens computed for an example, whose completions share their prompt."""
    return len(unit.prompt_ids) + sum(len(answer.ids) for answer in unit.answers)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
