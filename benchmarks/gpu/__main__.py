"""python -m benchmarks.gpu PART [--out FOLDER] [--until TIME] [--retry] [--rehearse]

A, is it right? Attention of packed sequences against one sequence at a time and against figures of
a CPU, the head, steps of KTO, DPO and GRPO, memory that two processes share, tiny runs, a run that
is killed and resumed, sharded weights, and the tests for GPUs. B, is it fast? Steps of models of
1.5 and 8 billion weights, their memory against its prediction, attention, its programs for several
sizes, and steps of short documents with each attention backend. C: steps of KTO in turn with TRL.

Each result is printed and written to ``results.jsonl`` at once. The same command goes on after the
checks that have a result. --retry: run those again that failed or missed a limit. --until: the end
in seconds since 1970; later checks are skipped. --rehearse: on the CPU, with tiny sizes and a
simulated device; speeds are not compared. Exit status: 0 if all checks are good, otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import attention, correctness, ipc, peer, sharded, steps, training
from benchmarks.gpu.results import Check, Recorder, kill_processes, read_results, run_process
from benchmarks.step.cases import TINY, Case

WORK = Path("build/first_contact")
"""Default folder for models, caches and results; results of an earlier start are read from it."""
PART_SECONDS = 220
DTYPES = (torch.bfloat16, torch.float32)
PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "trl", "liger-kernel")
GPU_TESTS = {
    "test_gpu.py": "sums_are or compiled or positions or (dtype1 and (shared or gemma2))",
    "test_head.py": "",
    "test_quantized.py": "",
    "test_checkpointing.py": "",
}
"""Files of tests in tests/models, and which of their tests are run (all have no time)."""


def part_a(device: torch.device, work: Path, out: Path) -> Iterator[Check]:
    """Is it right?"""
    rehearses = not torch.cuda.is_available()
    shape = correctness.GROUPED_SMALL if rehearses else correctness.GROUPED
    yield Check("environment", partial(describe_environment, device))
    for dtype in DTYPES:
        for backend in correctness.backends_for(dtype):
            yield Check(
                f"packed, {backend}, {name_of(dtype)}",
                partial(correctness.compare_packed, shape, dtype, device, backend),
                maxima=correctness.PACKED_LIMITS[dtype],
                fix="set VALENCE_ATTENTION to a backend that is right, and make it the automatic "
                "choice",
            )
        for backend in ("torch",) if rehearses else ("triton", "torch"):
            yield Check(
                f"head, {backend}, {name_of(dtype)}",
                partial(
                    correctness.compare_head,
                    backend,
                    TINY if rehearses else steps.LARGER,
                    64 if rehearses else 1024,
                    dtype,
                    device,
                ),
                maxima=correctness.HEAD_LIMITS[dtype],
                fix="VALENCE_HEAD=torch, and compare single logits",
            )
        for method in correctness.STEPS:
            yield Check(
                f"step, {method}, {name_of(dtype)}",
                partial(correctness.compare_step, method, shape, dtype, device),
                maxima=correctness.STEP_LIMITS[dtype],
                fix="compare the log-probabilities of single micro-batches with those of a CPU",
            )
    if not rehearses:  # CPUs have no such memory
        yield Check(
            "ipc",
            partial(ipc.compare_shared_memory, device, out / "logs" / "ipc.log"),
            maxima={"difference": 0},
            fix="rollout.transport=disk for a server on the GPU of training",
        )
    yield Check(
        "run, kto, again, and killed and resumed with an empty cache",
        partial(training.compare_runs, work / "kto", out / "logs"),
        maxima={"unequal_again": 0, "unequal_resumed": 0},
        fix="unequal again: find the kernel that adds in random order (VALENCE_ATTENTION=sdpa). "
        "Only unequal resumed: the compiler chose other kernels (train.compile=off)",
        is_background=True,
    )
    yield Check(
        "sharded",
        partial(sharded.compare_sharded, work / "sharded", out / "logs" / "sharded.log"),
        maxima={
            **{
                name: correctness.PACKED_LIMITS[torch.bfloat16][name]
                for name in ("logp_rms", "grad")
            },
            "unequal_saved": 0,
        },
        minima={"num_sharded": 1},
        fix="values: try train.compile=off, then parallel.shard=off. Unequal saved: "
        "run.async_save=false",
        is_background=True,
    )
    for kind in ("grpo", "qlora"):
        yield Check(
            f"run, {kind}",
            partial(training.train_in_process, work / kind, kind, out / "logs"),
            is_background=True,
        )
    for name, choice in GPU_TESTS.items():
        yield Check(
            f"tests, {name}",
            partial(run_gpu_tests, name, choice, out / "logs" / f"{name}.log"),
            minima={"skipped" if rehearses else "passed": 1},
            fix="fix the failing tests first",
            is_background=True,
        )


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, and whether the compiler works."""
    figures: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            figures[package] = version(package)
        except PackageNotFoundError:
            figures[package] = "missing"
    if torch.cuda.is_available():
        figures["device"] = torch.cuda.get_device_name()
        figures["memory_gb"] = torch.cuda.get_device_properties(device).total_memory / 1e9
        x = torch.ones(1000, device=device)
        compiled = torch.compile(lambda x: (2 * x).sum())
        if compiled(x).item() != 2000:
            raise RuntimeError("a compiled program computes a wrong sum")
    return figures


def run_gpu_tests(name: str, choice: str, log: Path) -> dict[str, Any]:
    """Run the tests of a file that need a GPU; elsewhere they are skipped."""
    command = [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "-k", choice, "--tb=short"]
    output = run_process([*command, f"tests/models/{name}"], log)
    return {word: output.count(f" {word.upper()}") for word in ("passed", "skipped")}


def part_b(device: torch.device, work: Path, out: Path) -> Iterator[Check]:
    """Is it fast?"""
    rehearses = not torch.cuda.is_available()
    yield Check(
        "ceilings",
        partial(steps.ceilings, device),
        maxima={"head_over_products": 1.5},
        fix="use plain products (VALENCE_HEAD=torch), and profile the kernel of the head",
    )
    cases = {
        f"{variant} {case.name}": (case, variant)
        for variant in (steps.SMALL_VARIANTS if rehearses else steps.VARIANTS)
        for case in steps.CASES
    }
    for name, (case, variant) in cases.items():
        yield Check(
            f"step, {name}",
            partial(steps.measure_step, case, variant, device),
            maxima=steps.LIMITS,
            minima={"share": steps.SHARES[name]} if name in steps.SHARES else {},
            fix="share: see profile.txt. Memory: correct valence/models/memory.py, or compare "
            "PYTORCH_ALLOC_CONF and the sizes of micro-batches",
        )
    yield Check("profile of the slowest step", partial(profile_slowest, cases, device, work, out))
    for case in attention.SMALL_CASES if rehearses else attention.CASES:
        for backend in attention.backends_for(case):
            yield Check(
                f"attention, {case}, {backend}",
                partial(attention.measure_attention, case, backend, device),
            )
    counted = (
        (attention.SMALL_PROGRAM_CASE, attention.SMALL_SIZES)
        if rehearses
        else (attention.PROGRAM_CASE, attention.SIZES)
    )
    yield Check("programs, flex", partial(attention.measure_programs, *counted, device))
    variant = (steps.SMALL_VARIANTS if rehearses else steps.VARIANTS)[-1]
    for backend in correctness.BACKENDS:
        yield Check(
            f"short documents, {variant}, {backend}",
            partial(steps.measure_step, steps.SHORT, variant, device, backend),
        )


def profile_slowest(
    cases: Mapping[str, tuple[Case, steps.Variant]], device: torch.device, work: Path, out: Path
) -> dict[str, Any]:
    """Profile the step with the smallest share of the ceiling. work: folder with the results."""
    shares = {
        result.name.removeprefix("step, "): result.figures["share"]
        for result in read_results(work)
        if result.part == "B" and result.name.startswith("step, ") and "share" in result.figures
    }
    return steps.profile_step(*cases[min(shares, key=shares.__getitem__)], device, out)


def part_c(device: torch.device, work: Path, _out: Path) -> Iterator[Check]:
    """How does it compare with TRL?"""
    for name, with_liger in peer.variants():
        yield Check(
            f"kto, 1.5b lora, trl with {name}{' and liger' * with_liger}",
            partial(peer.compare_with_trl, name, with_liger, device, work),
            minima={"times_as_fast": 1.0},
            fix="if the sides disagree, compare the log-probabilities of single rows; else profile",
        )


PARTS: dict[str, Callable[[torch.device, Path, Path], Iterator[Check]]] = {
    "A": part_a,
    "B": part_b,
    "C": part_c,
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, default=WORK)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--until", type=float, default=time.time() + PART_SECONDS)
    for flag in ("--retry", "--rehearse"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse runs all checks on the CPU")
    if options.rehearse and torch.cuda.is_available():
        parser.error("--rehearse is for machines without a GPU: set CUDA_VISIBLE_DEVICES=''")
    work, out = options.work.resolve(), options.out.resolve()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work / "compiled"))
    # TRL does not run on a simulated device.
    is_simulated = options.rehearse and options.part != "C"
    device = torch.device("cpu" if options.rehearse and not is_simulated else "cuda")
    # A CPU of the rehearsal has no time for several processes at once.
    workers = 1 if options.rehearse else 4
    with simulated_device() if is_simulated else nullcontext():
        recorder = Recorder(
            options.part,
            list(dict.fromkeys((out, work))),
            options.until - time.time(),
            compares=options.part == "A" or not options.rehearse,
            retries=options.retry,
            on_failure=nothing if options.rehearse else restart_if_device_is_lost,
        )
        results = recorder.run(PARTS[options.part](device, work, out), workers)
    good = sum(result.is_good for result in results)
    print(f"\npart {options.part}: {good} of {len(results)} good")
    for result in results:
        if not result.is_good:
            print(f"  {result.status:8} {result.name}")
    return 0 if good == len(results) else 1


def simulated_device() -> Any:
    from tests import simulated_cuda

    return simulated_cuda.simulated_device()


def nothing() -> None:
    """There is no device to be lost."""


def restart_if_device_is_lost() -> None:
    """Start this program again if an error has made the device unusable for this process, as an
    illegal access to memory does. The results so far are in the file.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        kill_processes()
        command = [argument for argument in sys.orig_argv if argument != "--retry"]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
