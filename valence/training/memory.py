"""How the weights of a run are split over processes, and the memory that each of them needs."""

from __future__ import annotations

import math
import os
import socket
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from valence.config.schema import Recipe
from valence.data.targets import ONE
from valence.distributed.process_group import Group, check_split
from valence.errors import UserError
from valence.models.adapters import starts_at_base, unsplittable
from valence.models.build import DTYPES
from valence.models.checkpointing import Checkpointing
from valence.models.memory import (
    MOMENTS,
    NCCL_BUFFERS,
    Memory,
    Split,
    add_value_model,
    predict,
    sampling_bytes,
)
from valence.models.shape import Shape, shape_of, skeleton
from valence.reports.run_record import is_run
from valence.rewards.build import list_reward_models
from valence.rollouts.servers import Placement, place_server
from valence.training.optim import optimizer_class
from valence.training.prepare import Prepared
from valence.training.reward_recipes import (
    RewardModelSettings,
    find_reward_model,
    parse_settings,
    placed_at_reward,
)

MARGIN = 0.8  # share of the free memory that `auto` plans to use
SLEEPING_SERVER = 2**31  # bytes that a server keeps on a GPU while it sleeps: an estimate
CHECKPOINTING_TOKENS = 4096  # tokens per micro-batch for which `checkpointing: auto` decides
MIN_TOKENS = 512  # tokens per micro-batch that `auto` never goes below


def choose_split(
    recipe: Recipe,
    size: int,
    device: torch.device,
    *,
    before: bool | None,
    fits: Callable[[], bool],
) -> Split:
    """Choose how the weights are split over ``size`` processes.

    before: what `auto` chose at an earlier start. fits: whether one process can hold everything
    that a run needs; all processes agree on it.

    Raises UserError if the optimizer, the compiler or the device does not support the split.
    """
    parallel = recipe.parallel
    check_split(size, parallel.tensor, "tensor")
    check_split(size, parallel.context, "context")
    ways = num_shards(recipe, size)
    if parallel.shard == "auto":
        shards = ways > 1 and (not fits() if before is None else before)
    else:
        shards = parallel.shard == "full"
    if not shards or ways == 1:
        split = Split(tensor=parallel.tensor, context=parallel.context)
    else:
        sync_every_micro_batch = (
            not recipe.trains_adapter if parallel.sync == "auto" else parallel.sync == "micro_batch"
        )
        split = Split(
            ways,
            parallel.tensor,
            reshard=parallel.reshard,
            sync_every_micro_batch=sync_every_micro_batch,
            offload=parallel.offload,
            context=parallel.context,
        )
    if split.single:
        return split
    if recipe.train.optimizer == "adamw_8bit":
        raise _unsupported_with_split(
            "8-bit optimizer state cannot be sharded",
            "train.optimizer",
            "set train.optimizer: adamw",
        )
    if recipe.train.optimizer not in ("adamw", "torch.optim.AdamW"):
        raise _unsupported_with_split(
            f"{recipe.train.optimizer} may need complete weights, but they are sharded over "
            "processes",
            "train.optimizer",
            "set train.optimizer: adamw",
        )
    if recipe.model.lora is not None and (setting := unsplittable(recipe.model.lora)):
        raise _unsupported_with_split(
            f"an adapter with {setting} does not support sharded weights",
            f"model.lora.{setting}",
            f"remove model.lora.{setting}",
        )
    if recipe.train.compile == "on" and split.tensor > 1:
        raise _unsupported_with_split(
            "layers whose products are split over processes cannot be compiled",
            "train.compile",
            "remove train.compile",
        )
    if recipe.train.router_aux_loss:
        raise _unsupported_with_split(
            "the load-balancing loss is not computed for sharded weights",
            "train.router_aux_loss",
            "remove train.router_aux_loss",
        )
    if split.offload:
        check_offload(recipe, device)
    return split


def can_compile(recipe: Recipe, split: Split) -> bool:
    """Whether layers may be compiled with this split: sharded ones only if the recipe says so."""
    is_requested = split.single or recipe.train.compile == "on"
    return is_requested and split.tensor == split.context == 1


def num_shards(recipe: Recipe, size: int) -> int:
    """The number of processes that share a copy of the weights if these are sharded.

    Raises UserError if ``size`` processes do not divide into such groups.
    """
    tensor, shard_size = recipe.parallel.tensor, recipe.parallel.shard_size
    if shard_size is None:
        return size // tensor
    group_size = tensor * shard_size
    if size % group_size:
        product = f" (parallel.tensor {tensor} times {shard_size})" if tensor > 1 else ""
        raise UserError(
            f"{size} processes are not a multiple of {group_size}{product}",
            code="shard-size-mismatch",
            where="parallel.shard_size",
            fix=f"set --nproc to a multiple of {group_size}, or remove parallel.shard_size",
        )
    return shard_size


def check_offload(recipe: Recipe, device: torch.device) -> None:
    """Raise UserError if weights are to be offloaded without a CUDA device."""
    if recipe.parallel.offload and device.type != "cuda":
        raise UserError(
            "only weights of a CUDA device can be offloaded to CPU memory; this run has no CUDA "
            "device",
            code="parallel-unsupported",
            where="parallel.offload",
            fix="remove parallel.offload",
        )


def _unsupported_with_split(problem: str, where: str, fix: str) -> UserError:
    return UserError(
        problem,
        code="parallel-unsupported",
        where=where,
        fix=f"{fix}, or set parallel.shard: off and parallel.tensor: 1",
    )


def at_rest(recipe: Recipe) -> torch.dtype:
    """Dtype of the stored weights; trained ones have float32 masters."""
    dtype = DTYPES[recipe.model.dtype]
    return torch.promote_types(dtype, torch.float32) if not recipe.trains_adapter else dtype


def sampled_in(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Dtype of products, keys and values while sampling (see ``PolicyModel.sampling``)."""
    return at_rest(recipe) if device.type == "cpu" else DTYPES[recipe.model.dtype]


def skeleton_of_recipe(prepared: Prepared) -> nn.Module:
    """The model of the recipe on the meta device."""
    spec = prepared.recipe.model
    scores = len(spec.attributes or ONE) if prepared.method.is_reward_model else None
    return skeleton(
        spec.name,
        trust_remote_code=spec.trust_remote_code,
        gguf_file=spec.gguf_file,
        num_scores=scores,
    )


def shape_of_run(prepared: Prepared, model: nn.Module) -> Shape:
    """Count the weights of a model, loaded or not, with the adapter that the recipe adds."""
    spec = prepared.recipe.model
    return shape_of(model, lora=spec.lora, adapter=spec.adapter, quantize=spec.quantize is not None)


def memory_of(
    prepared: Prepared,
    shape: Shape,
    device: torch.device,
    split: Split,
    *,
    compiled: bool = False,
    processes: int = 1,
    checkpointing: Checkpointing | None = None,
) -> Memory:
    """Estimate the memory that each process of a run needs.

    checkpointing: the choice of `auto`; by default that of the recipe, with "full" for `auto`.
    """
    recipe = prepared.recipe
    lora, is_named = recipe.model.lora, recipe.reference_model[1] is not None
    # without a split, a copy shares the policy's frozen weights
    is_copy = recipe.reference.sync_every is not None or lora is None or not starts_at_base(lora)
    is_separate = is_named or not recipe.trains_adapter or (is_copy and not split.single)
    is_average = recipe.teacher.has_average
    width = DTYPES[recipe.model.dtype].itemsize
    estimate = partial(
        predict,
        shape,
        width=width,
        frozen_copy=(prepared.needs_reference and is_separate and not recipe.teacher.is_served)
        or (is_average and not recipe.trains_adapter),
        adapter_copy=(prepared.needs_reference and is_copy and not is_separate)
        or (is_average and recipe.trains_adapter),
        checkpointing=checkpointing or _set_checkpointing(recipe) or "full",
        **_moments(recipe),
        device=device,
        split=split,
        # with several processes, KL pairs have separate micro-batches
        has_second_pass=prepared.method.needs_kl_pairs and processes == 1,
        # a checkpoint with a model is written while training waits
        copies_state=recipe.run.async_save and recipe.run.save_state and not recipe.run.save_hf,
        saves_reference=recipe.reference.sync_every is not None or is_average,
    )
    memory = estimate(compiled=compiled)
    if processes > 1 and device.type == "cuda":
        memory = replace(memory, communication=NCCL_BUFFERS)
    if prepared.has_separate_value_model:
        memory = add_value_model(memory, estimate(), shape, width)
    if rollouts := prepared.rollouts(shape, device):
        rows, prompt, new = rollouts
        memory = replace(
            memory,
            sampling=sampling_bytes(shape, rows, prompt + new, sampled_in(recipe, device).itemsize)
            // split.tensor,
        )
    if recipe.reward:
        memory = replace(memory, reward_models=bytes_of_rewards(recipe))
    return memory


def plan_server(recipe: Recipe, device: torch.device, processes: int) -> Placement | None:
    """Choose the GPUs of a sampling server; None if the run starts none, or has no GPU.

    Raises UserError for GPUs that the server cannot have (see ``place_server``).
    """
    rollout = recipe.rollout
    if not (recipe.reward and rollout.start) or device.type != "cuda":
        return None
    return place_server(
        rollout.devices,
        rollout.sleep,
        rollout.transport,
        ahead=rollout.ahead > 0,
        has_adapter=recipe.trains_adapter,
        num_processes=int(os.environ.get("LOCAL_WORLD_SIZE", processes)),
        num_devices=torch.cuda.device_count(),
    )


def server_share(
    recipe: Recipe, placement: Placement, memory: Memory, device: torch.device
) -> float | None:
    """The share of a GPU's memory that a server may use, as vLLM's --gpu-memory-utilization.

    None: vLLM's default, for a server that has its GPUs alone.
    """
    share = recipe.rollout.memory_share
    if share is not None or not placement.is_shared:
        return share
    total = torch.cuda.get_device_properties(device).total_memory
    # while the server samples, the trainer compares log-probabilities of a few completions at most
    remaining = MARGIN * (total - memory.total(MIN_TOKENS)) / total
    return max(0.01, math.floor(100 * remaining) / 100)


def _set_checkpointing(recipe: Recipe) -> Checkpointing | None:
    """The recipe's checkpointing mode; None for `auto`."""
    mode = recipe.train.checkpointing
    return None if mode == "auto" else mode


def choose_checkpointing(
    prepared: Prepared,
    shape: Shape,
    device: torch.device,
    split: Split,
    free: int | None,
    processes: int,
) -> Checkpointing:
    """The recipe's checkpointing mode; for `auto`, the fastest one whose micro-batches fit.

    free: bytes available to each process before a model is loaded; None if unknown.
    """
    if mode := _set_checkpointing(prepared.recipe):
        return mode
    requested = prepared.recipe.train.micro_batch_tokens
    tokens = CHECKPOINTING_TOKENS if requested == "auto" else requested
    # in a compiled layer, selective_op would store nothing
    can_select = prepared.recipe.train.compile == "off"
    modes: list[Checkpointing] = ["off", "selective_op", "full"] if can_select else ["off", "full"]
    totals = {
        mode: memory_of(
            prepared, shape, device, split, processes=processes, checkpointing=mode
        ).total(tokens)
        for mode in modes
    }
    if free is None or totals["full"] >= totals["off"]:  # a model of one layer would save nothing
        return "off"
    fitting: list[Checkpointing] = [mode for mode in modes if totals[mode] <= MARGIN * free]
    return fitting[0] if fitting else "full"


def _moments(recipe: Recipe) -> dict[str, float]:
    """Bytes of the optimizer's state per weight, as ``predict`` takes them."""
    kind = optimizer_class(recipe.train)
    if kind is None:
        return {"moments": MOMENTS[recipe.train.optimizer]}
    if kind.only_matrices:
        return {"moments": MOMENTS["adamw"], "moments_of_matrices": kind.state_bytes}
    return {"moments": kind.state_bytes}


def fits_on_one_device(
    prepared: Prepared, shape: Shape, device: torch.device, free: int | None, processes: int
) -> bool:
    """Whether each of the processes, with ``free`` bytes, can hold all weights and train them."""
    requested = prepared.recipe.train.micro_batch_tokens
    tokens = MIN_TOKENS if requested == "auto" else requested
    parallel = prepared.recipe.parallel
    split = Split(tensor=parallel.tensor, context=parallel.context)
    memory = memory_of(prepared, shape, device, split, processes=processes)
    return free is None or memory.total(tokens) <= MARGIN * free


def min_free_memory(free: int | None, device: torch.device, group: Group) -> int | None:
    """The smallest number of free bytes of any process; those on one host share its memory.

    free: bytes on this process's device; None if unknown.
    """
    if group.size == 1:
        return free
    host = zlib.crc32(socket.gethostname().encode())
    hosts, sizes = group.gather(torch.tensor([[host, -1 if free is None else free]])).unbind(1)
    if device.type != "cuda":
        sizes = sizes // (hosts[:, None] == hosts).sum(0)
    return None if bool((sizes < 0).any()) else int(sizes.min())


def bytes_of_rewards(recipe: Recipe) -> int:
    """Bytes of the weights of all reward models of a recipe, without loading them.

    Raises UserError if one of them does not exist.
    """
    return sum(
        _bytes_of_reward_model(target, parse_settings(target, settings, where), where)
        for target, settings, where in list_reward_models(recipe.reward)
    )


def _bytes_of_reward_model(target: str, settings: RewardModelSettings, where: str) -> int:
    source, _ = find_reward_model(target, settings, where)
    with placed_at_reward(target, where):
        spec = source.recipe.model
        dtype = at_rest(source.recipe) if is_run(target) else DTYPES[spec.dtype]
        layers = skeleton(spec.name, trust_remote_code=spec.trust_remote_code, num_scores=1)
        return sum(p.numel() for p in layers.parameters()) * dtype.itemsize
