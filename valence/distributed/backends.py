"""Which ways processes can talk to each other in this installation of PyTorch."""

from __future__ import annotations

import torch.distributed as dist


def backends() -> dict[str, bool]:
    """By name: gloo between hosts' memories, nccl between CUDA devices."""
    there = dist.is_available()
    return {"gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available()}
