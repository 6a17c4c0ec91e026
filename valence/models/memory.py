"""Estimate the memory of a run from the weights of its model, before any of them is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from valence.models.head import CACHE_BYTES, MAX_LOGITS
from valence.models.quantized import BYTES, STATES

if TYPE_CHECKING:
    from valence.models.checkpointing import Checkpointing
    from valence.models.shape import Shape

PROGRAM = 400_000_000  # bytes of Python and its libraries; a CUDA context takes about as much
NCCL_BUFFERS = 1_500_000_000  # bytes of a process that communicates: 1 to 2 GB
SAVED = 1.4
"""Numbers that a layer saves for the backward pass, per number that its matrices read and write.

Measured on a CPU: 1.0 to 1.4 for Llama, Qwen3, Gemma 2 and Phi-3, 1.3 to 1.8 for GPT-2, 0.6 for
OPT, 1.3 to 1.6 for the experts of Qwen3.
"""
COMPILED = 0.55  # fraction of them that a compiled layer saves, all in the dtype of its products
RECOMPUTED = {"off": 0.0, "selective": 0.5, "selective_op": 1.0, "full": 1.0, "offloaded": 1.0}
"""Fraction of the layers that run again, with selective_op without their products."""
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.04}
"""Bytes of the optimizer's state per trained weight in float32."""
DEFAULT_COMPLETIONS = 64
"""Completions that are sampled at once by default."""
MAX_COMPLETIONS = 512
"""Maximum of that default on CUDA."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is split over processes.

    ways: number of processes that shard weights, gradients and optimizer state (FSDP); each gathers
    the weights of a layer to run it. tensor: number of processes that split the matrix products of
    each layer (tensor parallelism). reshard: free the gathered weights of a layer between its
    forward and its backward pass. sync_every_micro_batch: sum gradients after each micro-batch, not
    once per step. offload: keep the shards in the host's memory. context: number of processes that
    share the tokens of a micro-batch (context parallelism).
    """

    ways: int = 1
    tensor: int = 1
    reshard: bool = True
    sync_every_micro_batch: bool = True
    offload: bool = False
    context: int = 1

    @property
    def single(self) -> bool:
        """Whether each process has all weights."""
        return self.ways == self.tensor == 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated bytes in each process.

    ``per_token``: activations per token of a micro-batch. ``gathered``: weights of other processes.
    ``value``: weights, gradients and optimizer state of a value model. ``reward_models``: their
    weights. ``sampling``: completions while they are sampled; the activations of training do not
    exist at that time. ``server``: what a server on the same GPU keeps while it sleeps.
    ``communication``: buffers of NCCL. ``checkpoint``: the copy of the state that a thread writes;
    ``host``: the same with a CUDA device, in the host's memory, which the total does not include.
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
    reward_models: int = 0
    sampling: int = 0
    server: int = 0
    communication: int = 0
    checkpoint: int = 0
    host: int = 0

    def total(self, tokens: int) -> int:
        """Return the bytes of a run with this many tokens in the largest micro-batch."""
        fixed = (
            self.program
            + self.weights
            + self.reference
            + self.gradient
            + self.optimizer
            + self.gathered
            + self.communication
            + self.checkpoint
        )
        return (
            fixed
            + self.value
            + self.reward_models
            + self.server
            + max(self.head + tokens * self.per_token, self.sampling)
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
    has_second_pass: bool = False,
    copies_state: bool = False,
    saves_reference: bool = False,
) -> Memory:
    """Return the estimated bytes of a run in each process.

    width: bytes per number of the computation. frozen_copy: whether the reference is a separate
    model. adapter_copy: whether the reference is a copy that shares the frozen weights. moments:
    bytes of the optimizer's state per trained weight in float32. moments_of_matrices: the same for
    matrices of hidden layers, if these have a different optimizer. has_second_pass: whether
    sequences without a gradient read the keys and values of a first pass, which all layers store.
    copies_state: whether checkpoints are written in the background, from a copy of the trained
    weights, the optimizer's state and, with saves_reference, the reference.

    Trained weights are float32 masters (float64 with float64), with a gradient and two moments, and
    a copy for products in bfloat16. The gradient of a vocabulary matrix briefly exists twice,
    unless it is written in place (on a CPU, see ``gradients``). The 4-bit weights of the running
    layer briefly exist in ``width`` too.
    """
    masters = max(width, 4)
    extra_moments = 0.0 if moments_of_matrices is None else moments_of_matrices - moments
    extra_bytes = shape.matrices // split.tensor * extra_moments
    stream = masters if shape.full else width  # the residual stream is as wide as the weights
    copies = width if width < stream else 0
    parameters, trained = shape.parameters // split.tensor, shape.trained // split.tensor
    # About half of them are vectors of the residual stream, in its dtype and not divided.
    widths = 2 * COMPILED * width if compiled else stream + width / split.tensor
    saved = SAVED * shape.operands / 2 * widths
    saved += shape.adapted * masters if width == masters else 0  # an adapter widens its input
    saved += 2 * shape.scaled * width  # DoRA saves the layer's and the adapter's output
    stored = int((parameters - shape.quantized) * stream + shape.quantized * BYTES)
    unpacked = shape.matrix * width if shape.quantized else 0
    recomputed = RECOMPUTED[checkpointing]
    inputs = 0 if checkpointing == "offloaded" else shape.layers * shape.hidden * stream
    if checkpointing == "selective_op":
        inputs += _results(shape, split.tensor) * width
    keys = 2 * (shape.keys // split.tensor) * width  # and values, of one layer
    stored_keys = shape.layers * keys if has_second_pass else 0
    # Attention saves the keys and values of all tokens, also those of other processes.
    gathered_keys = 0 if split.context == 1 else shape.layers * keys
    copies_gradient = shape.full and not (device.type == "cpu" and split.single)
    optimizer = int((trained * moments + extra_bytes) * (2 if width == 8 else 1))
    reference = stored if frozen_copy else trained * masters if adapter_copy else 0
    state = trained * masters + optimizer + (reference if saves_reference else 0)
    if not copies_state:
        state = 0
    memory = Memory(
        weights=stored + parameters * copies + unpacked + (0 if shape.full else trained * masters),
        reference=reference,
        gradient=trained * masters
        + (shape.vocabulary * shape.hidden * masters // split.tensor if copies_gradient else 0),
        optimizer=optimizer,
        head=_head(device),
        per_token=stored_keys
        + int(_saved(saved, inputs, recomputed, shape.layers) / split.context)
        + int(_saved(gathered_keys, 0, recomputed, shape.layers)),
        checkpoint=0 if device.type == "cuda" else state,
        host=state if device.type == "cuda" else 0,
    )
    return memory if split.ways == 1 else _sharded(memory, shape, split, width)


def _results(shape: Shape, tensor: int) -> float:
    """Return the numbers per token that products and attention of all layers compute: about half of
    what the matrices read and write, and those of attention and of adapters.
    """
    divided = shape.operands * (1 + 1 / tensor) / 4
    return divided + shape.layers * shape.hidden + shape.adapter_outputs


def _saved(layers: float, inputs: float, recomputed: float, num_layers: int) -> float:
    """Return the bytes saved for the backward pass, if a fraction of the layers runs again there.

    layers: bytes that all layers save. inputs: bytes of their inputs.
    """
    return (1 - recomputed) * layers + recomputed * (inputs + layers / num_layers)


def add_value_model(memory: Memory, uncompiled: Memory, shape: Shape, width: int) -> Memory:
    """Add a value model: a copy of the policy's decoder, which shares the frozen weights.

    uncompiled: the memory of the policy without compiled layers, since the copy's layers are not
    compiled.
    """
    untied = shape.outside >= 2 * shape.vocabulary * shape.hidden
    share = 1 - shape.vocabulary * shape.hidden / shape.parameters if shape.full and untied else 1.0
    weights = uncompiled.weights if shape.full else shape.trained * max(width, 4)
    value = int(share * (weights + uncompiled.gradient + uncompiled.optimizer))
    return replace(
        memory,
        value=value,
        per_token=memory.per_token + uncompiled.per_token,
        checkpoint=memory.checkpoint + int(share * uncompiled.checkpoint),
        host=memory.host + int(share * uncompiled.host),
    )


def sampling_bytes(shape: Shape, rows: int, tokens: int, width: int) -> int:
    """Return the bytes of ``rows`` completions that are sampled at once: keys and values of
    ``tokens`` tokens for each, prompt included, and a few copies of the logits in float32.
    """
    return rows * (2 * shape.layers * shape.keys * tokens * width + 4 * 4 * shape.vocabulary)


def completions_per_batch(shape: Shape, tokens: int, width: int, device: torch.device) -> int:
    """Return how many completions are sampled at once by default (see ``rollout.at_once``).

    The size of the device decides, not its free memory: a resumed run samples in the same batches.
    """
    rows = DEFAULT_COMPLETIONS
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).total_memory // 4
        while rows < MAX_COMPLETIONS and sampling_bytes(shape, 2 * rows, tokens, width) <= limit:
            rows *= 2
    return rows


def _sharded(memory: Memory, shape: Shape, split: Split, width: int) -> Memory:
    """Divide the memory of an unsharded model over processes, and add the gathered weights.

    Each process gathers the running layer and the next one in the dtype of the products (all layers
    without ``reshard``), and the weights outside the layers. It also has their gradients before
    they are summed (all gradients without ``sync_every_micro_batch``).
    """
    masters = max(width, 4)
    stream = masters if shape.full else width
    copies = width if width < stream else 0
    outside = shape.outside // split.tensor
    inside = shape.parameters - shape.outside
    layers = (2 * shape.largest if split.reshard else inside) // split.tensor
    narrow = shape.quantized / max(inside, 1)  # fraction of them that is sent in 4 bits
    trained = shape.trained // split.tensor
    running = outside + 2 * shape.largest // split.tensor
    unsummed = min(trained, running) if split.sync_every_micro_batch else trained
    share = 0 if split.offload else 1 / split.ways
    return replace(
        memory,
        weights=int(share * (memory.weights - shape.parameters // split.tensor * copies)),
        reference=int(share * memory.reference),
        gradient=int(memory.gradient - trained * masters + masters * (unsummed + share * trained)),
        optimizer=int(share * memory.optimizer),
        checkpoint=memory.checkpoint // split.ways,
        host=memory.host // split.ways,
        gathered=int(
            outside * (stream + copies)
            + layers * ((1 - narrow) * width + narrow * BYTES)
            + shape.quantized * STATES
        ),
    )


def _head(device: torch.device) -> int:
    """Return the bytes of cached probabilities and of a few copies of the logits."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return CACHE_BYTES[kind] + 4 * 4 * MAX_LOGITS[kind]


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that are free on the device now; None if unknown."""
    if device.type == "cuda":  # including memory that this process has reserved and does not use
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
    """Return the bytes that Linux reports as available without swapping."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":") for line in path.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left of a container's limit, with either version of control groups."""
    for limit_file, usage_file, cache_field, folder in (
        ("memory.max", "memory.current", "inactive_file", root),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", root / "memory"),
    ):
        if (folder / limit_file).exists() and (
            limit := (folder / limit_file).read_text(encoding="utf-8").strip()
        ) != "max":
            fields = dict(
                line.split()
                for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            )
            # cached files can be dropped
            usage = int((folder / usage_file).read_text(encoding="utf-8"))
            return int(limit) - (usage - int(fields[cache_field]))
    return None
