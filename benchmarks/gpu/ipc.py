"""Part A: whether another process reads weights in the memory of the GPU, as vLLM does with
``rollout.transport: ipc``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.gpu.results import run_process
from valence.rollouts.transports import export, shareable_buffer

BYTES = 3 * 2**20
RECEIVER = """
import base64, pickle, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

handles = pickle.loads(base64.b64decode(sys.argv[1]))
arguments = list(handles[str(torch.cuda.get_device_properties(0).uuid)])
arguments[6] = 0  # number of the device in this process
print(int(rebuild_cuda_tensor(*arguments).long().sum()))
"""


def compare_shared_memory(device: torch.device, log: Path) -> dict[str, int]:
    """Return the sum of bytes in a buffer minus the sum that another process reads there, for two
    contents of a buffer.
    """
    buffer = shareable_buffer(BYTES, device)
    differences: list[int] = []
    for step in (1, 3):
        buffer.copy_(torch.arange(0, step * BYTES, step) % 251)
        torch.cuda.synchronize(device)
        output = run_process([sys.executable, "-c", RECEIVER, export(buffer)], log)
        differences.append(int(buffer.long().sum()) - int(output.splitlines()[-1]))
    return {"difference": max(map(abs, differences))}
