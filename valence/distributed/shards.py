"""Tensors whose parts lie in several processes, as safetensors files of which each process writes
and reads its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from valence.errors import UserError

FILE = 256 << 20
"""Bytes of one file, about: a process has it in its host's memory twice while it writes."""


def write(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Writes tensors into a folder that is there, each process the parts that it holds; what
    several hold is written once.

    All processes call it with the same names; without a process group, one. Returns the files that
    this process wrote, which are on the disk. Raises UserError in all of them when one cannot
    write.
    """
    several = dist.is_initialized()
    share = dist.get_world_size() if several else 1
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files(tensors, share), save_distributed=True
    )
    with _told(folder, "cannot be written", "make room, or choose another folder"):
        save(dict(tensors), storage_writer=writer, no_dist=not several)
    return sorted(folder.glob(f"shard-{dist.get_rank() + 1 if several else 1:05d}-*.safetensors"))


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fills tensors, whole or sharded in any way, from a folder that ``write`` or any number of
    safetensors files filled.

    Each process reads what it needs, by itself. Values are rounded to the type of the tensor that
    they fill. Raises UserError when a tensor is not there, not all of it, or of another shape.
    """
    fix = "use another one"
    with _told(folder, "this is not a whole checkpoint", fix):
        reader = HuggingFaceStorageReader(str(folder))
        there = reader.read_metadata().state_dict_metadata
        for name, tensor in into.items():
            if why := _lacks(there.get(name), tensor):
                raise UserError(
                    f"this is not a whole checkpoint ({name} {why})",
                    code="checkpoint-damaged",
                    where=str(folder),
                    fix=fix,
                )
        load(dict(into), storage_reader=reader, no_dist=True)


def _files(tensors: Mapping[str, Tensor], share: int) -> dict[str, int]:
    """The number of the file, from 1, of each process' part of each tensor; the same in all
    processes.
    """
    found: dict[str, int] = {}
    size = 0
    for name, tensor in tensors.items():
        found[name] = 1 + size // FILE
        size += tensor.numel() * tensor.element_size() // share
    return found


def _lacks(there: object, tensor: Tensor) -> str:
    if not isinstance(there, TensorStorageMetadata):
        return "is missing"
    if there.size != tensor.shape:
        return f"has the axes {list(there.size)} instead of {list(tensor.shape)}"
    return (
        "is not there as a whole"
        if sum(math.prod(part.sizes) for part in there.chunks) != tensor.numel()
        else ""
    )


@contextmanager
def _told(folder: Path, what: str, fix: str) -> Iterator[None]:
    """Turns what PyTorch raises in all processes into one error, and does without its word about
    one process.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        for failed, _ in error.failures.values():
            if not isinstance(failed, Exception):
                raise failed from error  # an interrupt
        ranks = "; ".join(
            f"rank {rank}: {failed}" for rank, (failed, _) in sorted(error.failures.items())
        )
        raise UserError(
            f"{what} ({ranks})", code="checkpoint-incomplete", where=str(folder), fix=fix
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f"{what} ({error})", code="checkpoint-damaged", where=str(folder), fix=fix
        ) from error
