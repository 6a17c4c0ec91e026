"""python -m benchmarks.checkpoint.sharded [--large]: how long a save of sharded weights blocks a
step.

Two gloo processes train a random Llama-shaped model of 27 million weights (--large: 100 million)
with `parallel.shard: full`, in float32 with AdamW. Saves that block training (`run.async_save:
false`) and background saves alternate, with undisturbed steps between them. Prints medians of rank
0 in seconds: a step, a blocking save, the call of a background save, how much slower the steps are
until that save is on the disk, and their number. Other work on the machine distorts the figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from benchmarks.checkpoint.cases import LARGE, MIDDLE, build, tokenizer_of_bytes
from benchmarks.checkpoint.measure import (
    STEPS_BETWEEN_SAVES,
    WARM_UP_STEPS,
    Finished,
    is_saving,
    step_timer,
)
from valence.distributed.launcher import launch
from valence.distributed.process_group import start
from valence.training.trainer import Trainer

PROCESSES, ROUNDS = 2, 5
FOLDER = "VALENCE_BENCHMARK_FOLDER"
"""Environment variable with the folder of the run."""


def train(*, is_large: bool) -> None:
    """Measure in one of the processes."""
    case = replace(LARGE if is_large else MIDDLE, threads=1)
    group = start(device="cpu")
    timings: list[Generator[None, float, None]] = []
    run = build(
        case,
        Path(os.environ[FOLDER]) / "run",
        tokenizer_of_bytes(),
        (step_timer(timings),),
        group=group,
        parallel={"shard": "full"},
    )
    timings.append(measurement_loop(run))
    next(timings[0])
    with suppress(Finished):
        run.fit()
    group.close()


def measurement_loop(run: Trainer) -> Generator[None, float, None]:
    """Save between steps, and print the figures. The caller sends the duration of each step."""
    assert run.saver is not None
    checkpoints = run.saver.checkpoints
    steps: list[float] = []
    blocking: list[float] = []
    call: list[float] = []
    while_writing: list[list[float]] = []
    for _ in range(WARM_UP_STEPS):
        yield
    for _ in range(ROUNDS):
        for in_background in (False, True):
            yield
            for _ in range(STEPS_BETWEEN_SAVES):
                steps.append((yield))
            checkpoints.in_background = in_background
            began = time.perf_counter()
            run.save(wait=False)
            (call if in_background else blocking).append(time.perf_counter() - began)
            while_writing += [[]] if in_background else []
            while run.world.any(is_saving()):  # the same number of steps in both processes
                while_writing[-1].append((yield))
    checkpoints.wait()
    typical = median(steps)
    figures = {
        "a step": typical,
        "blocking save": median(blocking),
        "call of a background save": median(call),
        "slower steps during it": median(
            sum(seconds) - len(seconds) * typical for seconds in while_writing
        ),
    }
    if run.world.rank == 0:
        weights = sum(p.numel() for p in run.state.trained_weights.values())
        print(f"{weights / 1e6:.1f} million weights, {run.world.size} processes")
        for name, seconds in figures.items():
            print(f"{name:28} {seconds:.3f} s")
        print(f"{'steps during it':28} {median(map(len, while_writing)):.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint.sharded", description=__doc__
    )
    parser.add_argument("--large", action="store_true", help="100 million weights instead of 27")
    is_large = parser.parse_args().large
    disable_progress_bar()
    if "RANK" in os.environ:
        train(is_large=is_large)
        return 0
    with TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        program = (sys.executable, "-m", "benchmarks.checkpoint.sharded")
        return launch(["--large"] if is_large else [], PROCESSES, program=program)


if __name__ == "__main__":
    sys.exit(main())
