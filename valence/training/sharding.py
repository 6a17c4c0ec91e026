"""How the processes of a run share its weights: what is chosen, what must hold for it, and how it
is done.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from valence.config.schema import Recipe
from valence.distributed.fsdp2 import shard
from valence.distributed.protocol import Group
from valence.distributed.tensor import tensor_parallel
from valence.distributed.together import same
from valence.errors import UserError
from valence.models.build import DTYPES
from valence.models.loading import fingerprint
from valence.models.memory import Memory, Split, predict, sampled, with_values
from valence.models.policy_model import PolicyModel
from valence.models.shape import Shape, decoder_layers
from valence.models.stream import Stream
from valence.training.setup import Prepared

MARGIN = 0.8  # share of the free memory that `auto` may plan to take
LEAST = 512  # tokens that run at once, where `auto` finds little memory


def choose(
    recipe: Recipe,
    size: int,
    device: torch.device,
    *,
    before: bool | None,
    fits: Callable[[], bool],
) -> Split:
    """How the weights are split over so many processes. before: whether they were, where `auto`
    chose it before; fits: whether one process could hold all that a run needs, which all agree on.

    Raises UserError when the optimizer, the compiler or the device does not go along with it.
    """
    parallel = recipe.parallel
    if size % parallel.tensor:
        what = f"{size} processes are not a multiple of {parallel.tensor}"
        raise UserError(
            what,
            code="tensor-size-mismatch",
            where="parallel.tensor",
            fix=f"give --nproc a multiple of {parallel.tensor}, or set it to 1",
        )
    ways = size // parallel.tensor
    if parallel.shard == "auto":
        shards = ways > 1 and (not fits() if before is None else before)
    else:
        shards = parallel.shard == "full"
    if not shards or ways == 1:
        split = Split(tensor=parallel.tensor)
    else:
        each = trains_whole(recipe) if parallel.sync == "auto" else parallel.sync == "micro_batch"
        split = Split(
            ways, parallel.tensor, reshard=parallel.reshard, each=each, offload=parallel.offload
        )
    if split.single:
        return split
    if recipe.train.optimizer == "adamw_8bit":
        raise _not_with_split(
            "moments of 8 bits cannot be split over processes",
            "train.optimizer",
            "set train.optimizer: adamw",
        )
    if recipe.train.compile == "on":
        raise _not_with_split(
            "layers that are split over processes are not compiled", "train.compile", "remove it"
        )
    if recipe.train.router_aux_loss:
        what = "the load-balancing loss is not computed where weights are split over processes"
        raise _not_with_split(what, "train.router_aux_loss", "remove it")
    if split.offload:
        check_offload(recipe, device)
    return split


def check_offload(recipe: Recipe, device: torch.device) -> None:
    """Raise UserError where weights would be moved out of the memory of a device that there is
    not.
    """
    if recipe.parallel.offload and device.type != "cuda":
        what = "weights are in the host's memory already: there is no CUDA device"
        raise UserError(
            what, code="parallel-unsupported", where="parallel.offload", fix="remove it"
        )


def _not_with_split(what: str, where: str, fix: str) -> UserError:
    return UserError(
        what,
        code="parallel-unsupported",
        where=where,
        fix=f"{fix}, or set parallel.shard: off and parallel.tensor: 1",
    )


def trains_whole(recipe: Recipe) -> bool:
    """Whether all weights train."""
    return recipe.model.lora is None and recipe.model.adapter is None


def at_rest(recipe: Recipe) -> torch.dtype:
    """Of the weights as they are kept.

    All that train are masters: narrower, they would have lost their last bits.
    """
    dtype = DTYPES[recipe.model.dtype]
    return torch.promote_types(dtype, torch.float32) if trains_whole(recipe) else dtype


def sampled_in(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Of products, keys and values while answers are sampled (see ``PolicyModel.sampling``)."""
    return at_rest(recipe) if device.type == "cpu" else DTYPES[recipe.model.dtype]


def memory_of(
    prepared: Prepared, shape: Shape, device: torch.device, split: Split, *, compiled: bool = False
) -> Memory:
    """What each process of a run will need."""
    recipe = prepared.recipe
    apart = recipe.model.lora is None or recipe.reference.model is not None
    # where nothing is split, its copy shares the policy's frozen weights
    moves = recipe.reference.sync_every is not None
    width = DTYPES[recipe.model.dtype].itemsize
    predicted = partial(
        predict,
        shape,
        width=width,
        frozen_copy=prepared.needs_reference and (apart or (moves and not split.single)),
        checkpointing=recipe.train.checkpointing,
        optimizer=recipe.train.optimizer,
        device=device,
        split=split,
    )
    found = predicted(compiled=compiled)
    if prepared.values_apart:
        found = with_values(found, predicted(), shape, width)
    if prepared.rollouts:
        rows, prompt, new = prepared.rollouts
        found = replace(
            found,
            sampling=sampled(shape, rows, prompt + new, sampled_in(recipe, device).itemsize)
            // split.tensor,
        )
    if recipe.reward:
        from valence.training.reward_models import bytes_of_rewards

        found = replace(found, judges=bytes_of_rewards(recipe))
    return found


def fits_whole(prepared: Prepared, shape: Shape, device: torch.device, free: int | None) -> bool:
    """Whether a process with this much free memory could hold all weights, and what else it takes
    to train.
    """
    asked = prepared.recipe.train.micro_batch_tokens
    needs = memory_of(prepared, shape, device, Split(tensor=prepared.recipe.parallel.tensor))
    return free is None or needs.total(LEAST if asked == "auto" else asked) <= MARGIN * free


def least_free(free: int | None, device: torch.device, group: Group) -> int | None:
    """Bytes that each process has, when this one's device has so many: the least of all.

    Those on a host share its memory.
    """
    if group.size == 1:
        return free
    host = zlib.crc32(socket.gethostname().encode())
    hosts, sizes = group.gather(torch.tensor([[host, -1 if free is None else free]])).unbind(1)
    if device.type != "cuda":
        sizes = sizes // (hosts[:, None] == hosts).sum(0)
    return None if bool((sizes < 0).any()) else int(sizes.min())


def check_folders(prepared: Prepared, group: Group, *, model: bool, reference: bool) -> None:
    """Raises UserError, on all processes, when what one of them would load is not what rank 0
    would. model, reference: whether these are loaded from where the recipe says.
    """
    if group.size == 1:
        return
    recipe = prepared.recipe
    names = {
        "model.name": recipe.model.name if model else None,
        "model.adapter": recipe.model.adapter,
        "reference.model": recipe.reference.model if reference else None,
    }
    facts: dict[str, Any] = {}
    for setting, name in names.items():
        for file, fact in fingerprint(name).items() if name else ():
            facts[f"{file} of {setting}"] = fact
    same(
        group,
        lambda: facts,
        "let all processes read the same folders, as from a disk that they share",
    )


def share(
    engine: PolicyModel,
    stream: Stream | None,
    split: Split,
    data: Group,
    layers: Group,
    device: torch.device,
) -> None:
    """Leaves each process its part of an engine's weights, and reads that from the files, unless
    they were loaded whole. data: the processes that have other rows; layers: those that share each
    layer.
    """
    tensor_parallel(engine.model, layers)
    engine.shared = layers.size > 1
    if split.ways > 1:
        among: Any = data
        shard(
            engine,
            decoder_layers(engine.causal),
            among,
            compute=engine.compute,
            reshard=split.reshard,
            each=split.each,
            offload=split.offload,
        )
    if stream:
        stream.fill(engine.causal, device, parts_on=torch.device("cpu") if split.offload else None)
