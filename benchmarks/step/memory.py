"""The peak memory of a call above that of the idle process.

Both sides use this module.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Result = TypeVar("Result")


def peak_above_idle(
    call: Callable[[], Result], device: torch.device = torch.device("cpu")
) -> tuple[Result, float]:
    """The call's result, and the most memory that it takes above what was in use before it (MB =
    1e6 bytes): of a CUDA device what is allocated there, else the resident set of the process, on
    Linux only.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        idle = torch.cuda.memory_allocated(device)
        result = call()
        return result, (torch.cuda.max_memory_allocated(device) - idle) / 1e6
    # memory that the allocator caches from earlier steps would hide a peak
    ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text("5")
    idle = _status("VmRSS")
    result = call()
    return result, (_status("VmHWM") - idle) / 1e6


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
