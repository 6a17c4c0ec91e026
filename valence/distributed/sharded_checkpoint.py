"""Write and read sharded tensors as safetensors files, each process its shards, with PyTorch's
distributed checkpoints.
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

from valence.distributed.process_group import Group, ProcessGroup
from valence.errors import UserError

FILE = 256 << 20
"""Bytes of one file, approximately: a process has it in host memory twice while it writes."""


def write(folder: Path, tensors: Mapping[str, Tensor], group: Group | None = None) -> list[Path]:
    """Write tensors into an existing folder: each process its shards, replicated tensors once.

    All processes call it with the same names; without a process group, one. group: all processes;
    default: PyTorch's. Returns the files of this process, which are on disk. Raises UserError in
    all processes if one cannot write.
    """
    is_distributed = dist.is_initialized()
    size = dist.get_world_size() if is_distributed else 1
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(tensors, size), save_distributed=True
    )
    fix = "free some space, or choose another folder"
    with _user_errors("checkpoint-incomplete", folder, "the checkpoint cannot be written", fix):
        save(
            dict(tensors),
            storage_writer=writer,
            process_group=group.torch_group if isinstance(group, ProcessGroup) else None,
            no_dist=not is_distributed,
        )
    number = dist.get_rank() + 1 if is_distributed else 1
    return sorted(folder.glob(f"shard-{number:05d}-*.safetensors"))


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors, replicated or sharded in any way, from a folder of safetensors files, such as
    those of ``write``.

    Each process reads its parts without the others. Values are rounded to the type of the tensor
    that they fill. Raises UserError if a tensor is missing, incomplete, or has another shape.
    """
    problem = "the checkpoint is incomplete or damaged"
    with _user_errors("checkpoint-damaged", folder, problem, "use another one"):
        reader = HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        for name in into:
            # PyTorch checks names and shapes, but leaves tensors unfilled where a shard is missing
            tensor = stored.get(name)
            if isinstance(tensor, TensorStorageMetadata) and (
                sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size)
            ):
                raise ValueError(f"shards of {name} are missing")
        load(dict(into), storage_reader=reader, no_dist=True)


def _file_numbers(tensors: Mapping[str, Tensor], size: int) -> dict[str, int]:
    """Tensor -> the number of its file, from 1, in each of ``size`` processes."""
    numbers: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + num_bytes // FILE
        num_bytes += tensor.numel() * tensor.element_size() // size
    return numbers


@contextmanager
def _user_errors(code: str, folder: Path, problem: str, fix: str) -> Iterator[None]:
    """Turn PyTorch's errors, which it raises in all processes, into UserError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if not isinstance(failure, Exception):
                raise failure from error  # an interrupt
        reasons = "; ".join(
            # each process reads alone, as rank 0
            str(failure) if code == "checkpoint-damaged" else f"rank {rank}: {failure}"
            for rank, (failure, _) in sorted(error.failures.items())
        )
        raise UserError(f"{problem} ({reasons})", code=code, where=str(folder), fix=fix) from error
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{problem} ({error})", code=code, where=str(folder), fix=fix) from error
