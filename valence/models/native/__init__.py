"""Kernels for CPUs that multiply bfloat16, compiled on the machine that runs them.

On a CPU, PyTorch copies its operands several times in products of small bfloat16 matrices with
float32 results, which attention consists of. The head's log-softmax passes over a large array ten
times. Without a compiler or such a CPU, both use PyTorch's own operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from valence.storage import publish

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp")


class _Strided(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class _Sizes(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "heads",
                "groups",
                "heads_per_task",
                "queries",
                "d",
                "dv",
                "window",
                "threads",
            )
        ),
        ("scale", ctypes.c_float),
    )


class _Runs(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("queries", "query_at", "keys", "key_at")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None where they are ``unavailable``."""
    return None if unavailable() else ctypes.CDLL(str(_build()))


@cache
def unavailable() -> str | None:
    """Return the reason why the kernels cannot run on this machine, or None."""
    if os.environ.get("VALENCE_NATIVE") == "0":
        return "VALENCE_NATIVE=0"
    if not torch.cpu._is_avx512_bf16_supported():
        return "the CPU has no instructions for bfloat16"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    try:
        _build()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the kernels cannot be compiled ({error})"
    return None


@cache
def _build() -> Path:
    """Return the shared library, compiled once for each version of the source and kind of CPU."""
    cpu = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        if Path("/proc/cpuinfo").exists()
        else ""
    )
    kind = "".join(line for line in cpu.splitlines() if line.startswith(("model name", "flags")))
    name = hashlib.sha256(
        SOURCE.read_bytes() + " ".join(FLAGS).encode() + kind.encode()
    ).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "valence" / "native"
    target = folder / f"kernels-{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            built = Path(temporary) / target.name
            subprocess.run(
                ["g++", *FLAGS, str(SOURCE), "-o", str(built)],
                check=True,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
            )
            publish(target, built)
    return target


class Runs:
    """Queries and keys of each run (``layout.RowRun``) in the kernel's data structure."""

    def __init__(self, queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> None:
        self.columns = [torch.tensor(column) for rows in (queries, keys) for column in _flat(rows)]
        self.handle = _Runs(len(queries), *(column.data_ptr() for column in self.columns))


def _flat(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the rows joined, and where each starts and ends."""
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    return [i for row in rows for i in row], ends


def attention_unsupported(q: Tensor, v: Tensor, softcap: float) -> str | None:
    """Return the reason why the kernel cannot compute attention of q[..., D] and v[..., D_v], or
    None.
    """
    if q.device.type != "cpu":
        return "its kernel runs only on a CPU"
    if q.dtype != torch.bfloat16:
        return "its kernel supports only bfloat16"
    if softcap:
        return "its kernel does not support a soft-cap"
    if any(width % 16 or width > 1024 for width in (q.shape[-1], v.shape[-1])):
        return "its kernel needs a head size that is a multiple of 16, at most 1024"
    return unavailable()


def forward(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return attention [H, T, D_v] of q[H, T, D], k[H_kv, T_k, D], v[H_kv, T_k, D_v], and log sum
    exp(score) over the visible keys of each query [H, T].
    """
    kernels = library()
    assert kernels is not None
    q, k, v = map(_dense, (q, k, v))
    # The output projection reads all heads of a token together.
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    sizes, (a, b, c) = _sizes(q, k, v, scale, window), map(_strided, (q, k, v))
    kernels.forward(*map(ctypes.byref, (sizes, runs.handle, a, b, c)), _pointer(out), _pointer(lse))
    return out.transpose(0, 1), lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    runs: Runs,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. out, lse: results of ``forward``; grad[H, T, D_v].

    The gradients of keys and values are summed in float32.
    """
    kernels = library()
    assert kernels is not None
    q, k, v, out, grad, lse = *map(_dense, (q, k, v, out, grad)), lse.contiguous()
    d_q = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    tasks = len(q) // _heads_per_task(q, k)
    d_k, d_v = (torch.zeros(tasks, *x.shape[1:]) for x in (k, v))
    parts = [_sizes(q, k, v, scale, window), runs.handle, *map(_strided, (q, k, v, out, grad))]
    kernels.backward(
        *map(ctypes.byref, parts), *map(_pointer, (lse, d_q, d_k, d_v)), ctypes.c_int64(k.shape[1])
    )
    if tasks > len(k):
        d_k, d_v = (x.unflatten(0, (len(k), -1)).sum(1) for x in (d_k, d_v))
    return d_q.transpose(0, 1), d_k.to(k.dtype), d_v.to(v.dtype)


def head_unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Return the reason why the kernel cannot compute the head of hidden[N, h] with weight[V, h],
    or None.
    """
    if hidden.device.type != "cpu":
        return "its kernel runs only on a CPU"
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return "its kernel needs weights in bfloat16 or float32"
    if hidden.shape[1] % 16:
        return "its kernel needs a hidden size that is a multiple of 16"
    return unavailable()


def head_statistics(
    hidden: Tensor, weight: Tensor, column: Tensor, stats: Tensor, scale: float, *, keep: bool
) -> Tensor | None:
    """Fill stats[4, N] with the statistics of the logits scale * hidden[N, h] @ weight[w, h]^T that
    a softmax needs: the maximum of each row; relative to it, the sum of exp(logit) and of logit *
    exp(logit); and the logit at column[N], 0 if the column is outside this range.

    Return exp(logit - maximum) [N, w] in bfloat16 with ``keep``, None without.
    """
    kernels = library()
    assert kernels is not None
    hidden, weight = hidden.contiguous(), weight.contiguous()
    exponentials = hidden.new_empty(len(hidden), len(weight)) if keep else None
    kernels.measure(
        *map(_pointer, (hidden, weight, column, stats)),
        None if exponentials is None else _pointer(exponentials),
        *map(ctypes.c_int64, (len(hidden), *weight.shape)), ctypes.c_float(scale),
        ctypes.c_int64(weight.dtype == torch.bfloat16), ctypes.c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return exponentials


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strided(x: Tensor) -> _Strided:
    return _Strided(x.data_ptr(), x.stride(0), x.stride(1))


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _heads_per_task(q: Tensor, k: Tensor) -> int:
    """Return how many heads that share keys are one task: all of them, unless that makes too few
    tasks for the threads.
    """
    return len(q) // len(k) if len(k) >= 4 else 1


def _sizes(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> _Sizes:
    groups, threads = len(q) // len(k), torch.get_num_threads()
    return _Sizes(
        len(q), groups, _heads_per_task(q, k), *q.shape[1:], v.shape[2], window, threads, scale
    )
