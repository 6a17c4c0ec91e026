"""How much memory a run will need, from the shape of its model and before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from valence.models.head import CACHE_BYTES, CACHE_SHARE_CUDA, MAX_LOGITS
from valence.models.quantized import BYTES, STATES

if TYPE_CHECKING:
    from valence.models.checkpointing import Checkpointing
    from valence.models.shape import Shape

PROGRAM = (
    400_000_000  # bytes of Python and its libraries; on a CUDA device about as much for its context
)
HIDDEN = 14  # numbers of hidden size that a layer keeps for the backward pass, per token
INNER = 4  # and of the size inside its feed-forward layer
COMPILED = 0.55  # share of it that a compiled layer keeps, all in the type of the products
RECOMPUTED = {"off": 0.0, "selective": 0.5, "full": 1.0, "offloaded": 1.0}  # share of the layers
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.04}
"""Bytes of the optimizer's state per trained weight in float32."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is shared: weights, gradients and moments over so many processes (``ways``),
    which gather a layer's weights to run it; and before that, the products of each layer over
    ``tensor`` of them.

    reshard: a layer's weights are given back between its forward and its backward run. each:
    gradients are summed after each micro-batch, not once a step. offload: what is split is kept in
    the host's memory.
    """

    ways: int = 1
    tensor: int = 1
    reshard: bool = True
    each: bool = True
    offload: bool = False

    @property
    def single(self) -> bool:
        """Does each process hold a whole model?"""
        return self.ways == self.tensor == 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted bytes of each part, in each process.

    ``per_token``: activations for each token that runs at once; ``gathered``: weights of other
    processes; ``value``: a value model's weights, gradients and moments; ``judges``: reward models;
    ``sampling``: what answers take while they are sampled, when nothing of a training step is
    there.
    """

    weights: int
    reference: int
    gradient: int
    optimizer: int
    head: int
    per_token: int
    program: int = PROGRAM
    gathered: int = 0
    value: int = 0
    judges: int = 0
    sampling: int = 0

    def total(self, tokens: int) -> int:
        """With this many tokens in the largest micro-batch."""
        fixed = (
            self.program
            + self.weights
            + self.reference
            + self.gradient
            + self.optimizer
            + self.gathered
        )
        return (
            fixed
            + self.value
            + self.judges
            + max(self.head + tokens * self.per_token, self.sampling)
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that the device, or the host, has no memory left."""
    said = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in said
        or "out of memory" in said
    )


def predict(
    shape: Shape,
    *,
    width: int,
    frozen_copy: bool,
    adapter_copy: bool = False,
    checkpointing: Checkpointing = "off",
    compiled: bool = False,
    moments: float = MOMENTS["adamw"],
    moments_of_matrices: float | None = None,
    device: torch.device = torch.device("cpu"),
    split: Split = Split(),
) -> Memory:
    """Bytes of a run, in each process. width: bytes of one number of the computation; frozen_copy:
    is the reference a model of its own? adapter_copy: is it a copy that shares frozen weights?
    moments: bytes of the optimizer's state per trained weight in float32. moments_of_matrices: the
    same for matrices of hidden layers, where these have an optimizer of their own.

    Weights that train are float32 masters (float64 in float64), with a gradient and two moments
    each, and copies for products in bfloat16. The gradient of a matrix of the vocabulary is there
    twice for a moment, unless it is written in place (as on a CPU, see ``gradients``), and so are,
    as numbers, weights of 4 bits of the layer that runs.
    """
    masters = max(width, 4)
    more = 0.0 if moments_of_matrices is None else moments_of_matrices - moments
    in_matrices = shape.matrices // split.tensor * more
    stream = masters if shape.full else width  # the residual stream is as wide as the weights
    copies = width if width < stream else 0
    parameters, trained = shape.parameters // split.tensor, shape.trained // split.tensor
    inner = INNER * shape.inner // split.tensor
    if compiled:
        kept = COMPILED * shape.layers * (HIDDEN * shape.hidden + inner) * width
    else:
        kept = shape.layers * (HIDDEN * shape.hidden * stream + inner * width)
    kept += shape.adapted * masters if width == masters else 0  # an adapter widens its input
    kept += 2 * shape.scaled * width  # DoRA keeps the layer's and the adapter's output
    held = int((parameters - shape.quantized) * stream + shape.quantized * BYTES)
    unpacked = shape.hidden * max(shape.inner, shape.heads) * width if shape.quantized else 0
    again = RECOMPUTED[checkpointing]
    inputs = 0 if checkpointing == "offloaded" else shape.layers * shape.hidden * stream
    twice = shape.full and not (device.type == "cpu" and split.single)
    whole = Memory(
        weights=held + parameters * copies + unpacked + (0 if shape.full else trained * masters),
        reference=held if frozen_copy else trained * masters if adapter_copy else 0,
        gradient=trained * masters
        + (shape.vocabulary * shape.hidden * masters // split.tensor if twice else 0),
        optimizer=int((trained * moments + in_matrices) * (2 if width == 8 else 1)),
        head=_head(device),
        per_token=int((1 - again) * kept + again * (inputs + kept / shape.layers)),
    )
    return whole if split.ways == 1 else _sharded(whole, shape, split, width)


def with_values(memory: Memory, alone: Memory, shape: Shape, width: int) -> Memory:
    """With a value model beside the policy: a copy of its decoder, of which it shares what does not
    train. alone: what the policy takes where its layers are not compiled, as the copy's are not.
    """
    untied = shape.outside >= 2 * shape.vocabulary * shape.hidden
    share = 1 - shape.vocabulary * shape.hidden / shape.parameters if shape.full and untied else 1.0
    weights = alone.weights if shape.full else shape.trained * max(width, 4)
    own = int(share * (weights + alone.gradient + alone.optimizer))
    return replace(memory, value=own, per_token=memory.per_token + alone.per_token)


def sampled(shape: Shape, rows: int, tokens: int, width: int) -> int:
    """Bytes of so many answers that are sampled at once: keys and values of each with its prompt,
    of so many tokens, and a few copies of their logits in float32.
    """
    return rows * (2 * shape.layers * shape.keys * tokens * width + 4 * 4 * shape.vocabulary)


def _sharded(whole: Memory, shape: Shape, split: Split, width: int) -> Memory:
    """What is left of it in each process, and what it gathers: the layer that runs and the next one
    (or all), in the type of the products, and what is outside them; and their gradients before they
    are summed (or all of them).
    """
    masters = max(width, 4)
    stream = masters if shape.full else width
    copies = width if width < stream else 0
    outside = shape.outside // split.tensor
    inside = shape.parameters - shape.outside
    layers = (2 * shape.largest if split.reshard else inside) // split.tensor
    narrow = shape.quantized / max(inside, 1)  # share of them that travels in 4 bits
    trained = shape.trained // split.tensor
    unsummed = min(trained, outside + 2 * shape.largest // split.tensor) if split.each else trained
    kept = 0 if split.offload else 1 / split.ways
    return replace(
        whole,
        weights=int(kept * (whole.weights - shape.parameters // split.tensor * copies)),
        reference=int(kept * whole.reference),
        gradient=int(whole.gradient - trained * masters + masters * (unsummed + kept * trained)),
        optimizer=int(kept * whole.optimizer),
        gathered=int(
            outside * (stream + copies)
            + layers * ((1 - narrow) * width + narrow * BYTES)
            + shape.quantized * STATES
        ),
    )


def _head(device: torch.device) -> int:
    """Bytes of probabilities that are kept, and of a few copies of the logits that exist at
    once.
    """
    if device.type != "cuda":
        return CACHE_BYTES + 4 * 4 * MAX_LOGITS["cpu"]
    return (
        int(CACHE_SHARE_CUDA * torch.cuda.get_device_properties(device).total_memory)
        + 4 * 4 * MAX_LOGITS["cuda"]
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new program may use on the device now; None where nothing tells."""
    if device.type == "cuda":  # with what this process keeps, and does not use
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return min(
        (size for size in (_available(), container_memory()) if size is not None), default=None
    )


def _available() -> int | None:
    """What Linux says is available, without swapping."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":") for line in path.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of a container's limit, of either version of control groups."""
    for limit, used, cache, folder in (
        ("memory.max", "memory.current", "inactive_file", root),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", root / "memory"),
    ):
        if (folder / limit).exists() and (
            most := (folder / limit).read_text(encoding="utf-8").strip()
        ) != "max":
            kept = dict(
                line.split()
                for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            )
            # cached files can be dropped
            in_use = int((folder / used).read_text(encoding="utf-8")) - int(kept[cache])
            return int(most) - in_use
    return None
