"""Kernels for processors that multiply bfloat16, compiled on the machine that runs them.

PyTorch's products of small bfloat16 matrices with float32 results go through several copies on a
CPU; attention consists of nothing else. The head's log-softmax passes over a large array ten times.
Where there is no compiler or no such processor, both run on PyTorch's own operations.
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

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp")


class _Strided(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class _Sizes(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "groups", "together", "queries", "d", "dv", "window", "threads")
        ),
        ("scale", ctypes.c_float),
    )


class _Runs(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("own", "own_at", "keys", "key_at")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None where it cannot run (``why_not`` says why)."""
    return None if why_not() else ctypes.CDLL(str(_built()))


@cache
def why_not() -> str | None:
    """What keeps the kernel from running here, or None."""
    if os.environ.get("VALENCE_NATIVE") == "0":
        return "VALENCE_NATIVE=0"
    if not torch.cpu._is_avx512_bf16_supported():
        return "the processor does not multiply bfloat16"
    if shutil.which("g++") is None:
        return "there is no g++"
    try:
        _built()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"it cannot be compiled ({error})"
    return None


@cache
def _built() -> Path:
    """The shared library, compiled once for each source and kind of processor."""
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
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / target.name
            subprocess.run(
                ["g++", *FLAGS, str(SOURCE), "-o", str(made)],
                check=True,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
            )
            made.replace(target)
    return target


class Runs:
    """Queries and path of each run (``layout.RowRun``), as the kernel reads them."""

    def __init__(self, own: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> None:
        self.columns = [torch.tensor(column) for rows in (own, keys) for column in _flat(rows)]
        self.handle = _Runs(len(own), *(column.data_ptr() for column in self.columns))


def _flat(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    return [i for row in rows for i in row], ends


def serves(q: Tensor, v: Tensor, softcap: float) -> bool:
    """Whether the kernel can run these heads."""
    widths = q.shape[-1], v.shape[-1]
    fits = (
        q.dtype == torch.bfloat16
        and not softcap
        and all(width % 16 == 0 and width <= 1024 for width in widths)
    )
    return fits and library() is not None


def forward(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """q[H, T, D], k[H_kv, T_k, D], v[H_kv, T_k, D_v] -> [H, T, D_v], and log sum exp(score) over
    what each query sees [H, T].
    """
    found = library()
    assert found is not None
    q, k, v = map(_dense, (q, k, v))
    # whoever projects it wants all heads of a token together
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    sizes, (a, b, c) = _sizes(q, k, v, scale, window), map(_strided, (q, k, v))
    found.forward(*map(ctypes.byref, (sizes, runs.handle, a, b, c)), _pointer(out), _pointer(lse))
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
    """Gradients of q, k and v; out and lse as of ``forward``, grad[H, T, D_v].

    Those of keys and values are summed in float32.
    """
    found = library()
    assert found is not None
    q, k, v, out, grad, lse = *map(_dense, (q, k, v, out, grad)), lse.contiguous()
    d_q = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    tasks = len(q) // _together(q, k)
    d_k, d_v = (torch.zeros(tasks, *x.shape[1:]) for x in (k, v))
    parts = [_sizes(q, k, v, scale, window), runs.handle, *map(_strided, (q, k, v, out, grad))]
    found.backward(
        *map(ctypes.byref, parts), *map(_pointer, (lse, d_q, d_k, d_v)), ctypes.c_int64(k.shape[1])
    )
    if tasks > len(k):
        d_k, d_v = (x.unflatten(0, (len(k), -1)).sum(1) for x in (d_k, d_v))
    return d_q.transpose(0, 1), d_k.to(k.dtype), d_v.to(v.dtype)


def measures(hidden: Tensor, weight: Tensor) -> bool:
    """Whether ``measure`` can run these rows."""
    fits = (
        hidden.device.type == "cpu"
        and hidden.dtype == torch.bfloat16
        and weight.dtype in (torch.bfloat16, torch.float32)
    )
    return fits and hidden.shape[1] % 16 == 0 and library() is not None


def measure(
    hidden: Tensor, weight: Tensor, column: Tensor, found: Tensor, scale: float, keep: bool
) -> Tensor | None:
    """Fills found[4, N] with what a softmax needs to know of the logits scale * hidden[N, h] @
    weight[w, h]^T: the largest of each row; relative to that the sum of exp(logit), and of logit *
    exp(logit); and the logit at ``column``[N], 0 if that is not in this range. Returns exp(logit -
    largest) [N, w] in bfloat16 if those are to be kept.
    """
    native = library()
    assert native is not None
    hidden, weight = hidden.contiguous(), weight.contiguous()
    kept = hidden.new_empty(len(hidden), len(weight)) if keep else None
    native.measure(
        *map(_pointer, (hidden, weight, column, found)), None if kept is None else _pointer(kept),
        *map(ctypes.c_int64, (len(hidden), *weight.shape)), ctypes.c_float(scale),
        ctypes.c_int64(weight.dtype == torch.bfloat16), ctypes.c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return kept


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strided(x: Tensor) -> _Strided:
    return _Strided(x.data_ptr(), x.stride(0), x.stride(1))


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _together(q: Tensor, k: Tensor) -> int:
    """How many heads that share keys are one task: all of them, unless that makes too few tasks to
    run at once.
    """
    return len(q) // len(k) if len(k) >= 4 else 1


def _sizes(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> _Sizes:
    groups, threads = len(q) // len(k), torch.get_num_threads()
    return _Sizes(len(q), groups, _together(q, k), *q.shape[1:], v.shape[2], window, threads, scale)
