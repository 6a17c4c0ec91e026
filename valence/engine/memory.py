"""How much memory a run will need, from the shape of its model and before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from valence.engine.checkpointing import Checkpointing
from valence.engine.head import AREA, KEEP, KEEP_CUDA
from valence.engine.shape import Shape

PROGRAM = 400_000_000  # bytes of Python and its libraries; on a CUDA device about as much for its context
HIDDEN = 14  # numbers of hidden size that a layer keeps for the backward pass, per token
INNER = 4  # and of the size inside its feed-forward layer
COMPILED = 0.55  # share of it that a compiled layer keeps, all in the type of the products
RECOMPUTED = {"off": 0.0, "selective": 0.5, "full": 1.0, "offloaded": 1.0}  # share of the layers
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.04}  # bytes of the optimizer's state per trained weight


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted bytes of each part. ``per_token``: activations for each token that runs at once."""

    weights: int
    reference: int
    gradient: int
    optimizer: int
    head: int
    per_token: int
    program: int = PROGRAM

    def total(self, tokens: int) -> int:
        """With this many tokens in the largest micro-batch."""
        fixed = self.program + self.weights + self.reference + self.gradient + self.optimizer + self.head
        return fixed + tokens * self.per_token


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that the device, or the host, has no memory left."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in said or "out of memory" in said


def predict(
    shape: Shape,
    *,
    width: int,
    frozen_copy: bool,
    checkpointing: Checkpointing = "off",
    compiled: bool = False,
    optimizer: str = "adamw",
    device: torch.device = torch.device("cpu"),
) -> Memory:
    """Bytes of a run. width: bytes of one number of the computation; frozen_copy: is the reference a model of its own?

    Weights that train are float32 masters (float64 in float64), with a gradient and two moments each, and copies for products in
    bfloat16. The gradient of the head is there twice for a moment.
    """
    masters = max(width, 4)
    stream = masters if shape.full else width  # the residual stream is as wide as the weights
    copies = width if width < stream else 0
    weights = shape.parameters * (stream + copies) + (0 if shape.full else shape.trained * masters)
    if compiled:
        kept = COMPILED * shape.layers * (HIDDEN * shape.hidden + INNER * shape.inner) * width
    else:
        kept = shape.layers * (HIDDEN * shape.hidden * stream + INNER * shape.inner * width)
    kept += shape.adapted * masters if width == masters else 0  # an adapter widens its input
    again = RECOMPUTED[checkpointing]
    inputs = 0 if checkpointing == "offloaded" else shape.layers * shape.hidden * stream
    return Memory(
        weights=weights,
        reference=shape.parameters * stream if frozen_copy else 0,
        gradient=shape.trained * masters + (shape.vocabulary * shape.hidden * masters if shape.full else 0),
        optimizer=int(shape.trained * (MOMENTS[optimizer] if width < 8 else 16)),
        head=_head(device),
        per_token=int((1 - again) * kept + again * (inputs + kept / shape.layers)),
    )


def _head(device: torch.device) -> int:
    """Bytes of probabilities that are kept, and of a few copies of the logits that exist at once."""
    if device.type != "cuda":
        return KEEP + 4 * 4 * AREA["cpu"]
    return int(KEEP_CUDA * torch.cuda.get_device_properties(device).total_memory) + 4 * 4 * AREA["cuda"]


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new program may use on the device now; None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return min((size for size in (_available(), _allowed()) if size is not None), default=None)


def _available() -> int | None:
    """What Linux says is available, without swapping."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":") for line in path.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def _allowed(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of a container's limit, of either version of control groups."""
    for limit, used, cache, folder in (
        ("memory.max", "memory.current", "inactive_file", root),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", root / "memory"),
    ):
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int(most) - int((folder / used).read_text()) + int(kept[cache])  # files that were read can be dropped
    return None
